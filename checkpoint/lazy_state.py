"""A saved state whose tensors are read when they are touched, each verified."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from trainerd.checkpoint import codec, trees

ReadTensors = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
"""Reads tensors by name, all at once; Damaged if a byte is not what was written."""


class LazyState(Mapping[str | int, Any]):
    """A place in a saved state that holds others: keys as in the state, list indices as ints.

    Looking up a key gives the value there, read at that moment; dicts and lists come as a LazyState again, until
    `load()` reads all that is below. What is tied within one such read comes back tied.
    """

    def __init__(self, node: Any, read_tensors: ReadTensors) -> None:
        self._node = node
        self._read_tensors = read_tensors

    def __getitem__(self, key: str | int) -> Any:
        """The value under a key; KeyError if there is none."""
        try:
            return self._open(self._node[key])
        except (IndexError, TypeError):
            raise KeyError(key) from None

    def __iter__(self) -> Iterator[str | int]:
        """The keys, in order."""
        return iter(range(len(self._node)) if isinstance(self._node, list) else self._node)

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._node)

    def at(self, path: str) -> Any:
        """The value at a path such as `hooks.EMA`. KeyError(rest of the path, names that are there)."""
        return self._open(trees.find(self._node, path))

    def load(self) -> Any:
        """The whole value, as it was saved."""
        return self._decode(self._node)

    def _open(self, node: Any) -> Any:
        if isinstance(node, list) or (isinstance(node, dict) and trees.KIND not in node):
            return LazyState(node, self._read_tensors)
        return self._decode(node)

    def _decode(self, node: Any) -> Any:
        tensors = self._read_tensors(list(trees.tensors_in(node)))
        return codec.decode(node, tensors.__getitem__)
