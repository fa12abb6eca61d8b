"""State ↔ tree and tensors, without pickle.

The tree is what JSON can say: None, bool, str, small int, finite float, lists and string-keyed dicts stand for
themselves; everything else is a *node*, an object whose key "!" names its kind. Tensors are replaced by references.
docs/checkpoint-format.md lists the kinds; `plain_values`, `class_values`, `numpy_values` and
`tensor_values` implement them, `nodes` holds their fields.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainerd.checkpoint import class_values, numpy_values, plain_values, tensor_values
from trainerd.checkpoint.errors import CheckpointError, UndecodableState, UnsupportedState
from trainerd.checkpoint.tensor_values import Leaf
from trainerd.checkpoint.trees import KIND, MAX_DEPTH, Path, joined

_ENCODERS: dict[type, Callable[[Any, Any, Path], Any]] = {
    **plain_values.ENCODERS,
    **numpy_values.ENCODERS,
    **tensor_values.ENCODERS,
}
_DECODERS: dict[str, Callable[[Any, Any, Path], Any]] = {
    **plain_values.DECODERS,
    **class_values.DECODERS,
    **numpy_values.DECODERS,
    **tensor_values.DECODERS,
}


def encode(state: object) -> tuple[Any, dict[str, Leaf]]:
    """The tree of a state and its live tensors by name. UnsupportedState names what cannot be held."""
    encoder = Encoder()
    tree = encoder.encode(state, ())
    return tree, encoder.leaves


def decode(tree: Any, read_tensor: Callable[[str], torch.Tensor]) -> Any:
    """The state that a tree describes. `read_tensor` gives a tensor by name; it is asked once for each."""
    return Decoder(read_tensor).decode(tree, ())


def check_inverse(state: object) -> None:
    """Raise UnsupportedState unless decoding gives back what was encoded; no tensor is copied for it."""
    tree, leaves = encode(state)
    try:
        again, _ = encode(decode(tree, lambda name: leaves[name].tensor.detach()))
    except UndecodableState as error:
        raise UnsupportedState(error.path, error.kind, f"it could be saved, but not loaded: {error.why}") from error
    if again != tree:
        raise UnsupportedState("", "a value that does not come back as it was saved")


class Encoder:
    """Turns values into nodes and collects the tensors it meets."""

    def __init__(self) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._names_by_memory: dict[tuple[object, ...], str] = {}
        self._depth = 0

    def encode(self, value: Any, path: Path) -> Any:
        """The node of a value found at a path."""
        handler = _ENCODERS.get(type(value)) or _handler_by_kind(value)
        if handler is None:
            raise UnsupportedState(joined(path), _kind_of(value))
        if self._depth >= MAX_DEPTH:
            why = f"deeper than {MAX_DEPTH} levels; does it contain itself?"
            raise UnsupportedState(joined(path), "nested state", why)
        self._depth += 1
        try:
            return handler(self, value, path)
        finally:
            self._depth -= 1

    def reference(self, tensor: torch.Tensor, path: Path) -> str:
        """The name under which a strided tensor is stored: once, however many references there are."""
        memory = tensor_values.memory_of(tensor)
        name = self._names_by_memory.get(memory) if tensor.numel() else None
        if name is None:
            name = joined(path) or "state"
            if not name.isascii():
                name = name.encode("utf-8", "backslashreplace").decode()
            name = self._free_name(name)
            # The leaf keeps the tensor, so its memory cannot be reused for another one while we encode.
            self.leaves[name] = Leaf(name, tensor)
            self._names_by_memory[memory] = name
        return name

    def _free_name(self, name: str) -> str:
        free, ordinal = name, 1
        # safetensors keeps "__metadata__" for itself.
        while free in self.leaves or free == "__metadata__":
            ordinal += 1
            free = f"{name}#{ordinal}"
        return free


class Decoder:
    """Turns nodes back into values."""

    def __init__(self, read_tensor: Callable[[str], torch.Tensor]) -> None:
        self._read_tensor = read_tensor
        self._shared: dict[object, torch.Tensor] = {}

    def decode(self, node: Any, path: Path) -> Any:
        """The value of a node found at a path."""
        if isinstance(node, list):
            return [self.decode(item, (path, index)) for index, item in enumerate(node)]
        if not isinstance(node, Mapping):
            return node
        kind = node.get(KIND)
        if kind is None:
            return {key: self.decode(item, (path, key)) for key, item in node.items()}
        handler = _DECODERS.get(kind) if isinstance(kind, str) else None
        if handler is None:
            raise UndecodableState(joined(path), str(kind), "this version knows no such kind")
        try:
            return handler(self, node, path)
        except CheckpointError:
            raise
        except Exception as error:
            # Any: a constructor of Python, NumPy, torch or the user may refuse what it is given in its own way.
            raise UndecodableState(joined(path), kind, repr(error)) from error

    def tensor(self, name: str) -> torch.Tensor:
        """The one tensor stored under a name."""
        found = self._shared.get(name)
        if found is None:
            found = self._shared[name] = self._read_tensor(name)
        return found

    def shared(self, key: object, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The one object behind a key: tied references get the same one."""
        found = self._shared.get(key)
        if found is None:
            found = self._shared[key] = make()
        return found


def _handler_by_kind(value: object) -> Callable[[Any, Any, Path], Any] | None:
    """For values whose exact type is the user's: named tuples, enums, dataclasses, NumPy scalars."""
    return class_values.handler_for(value) or numpy_values.handler_for(value)


def _kind_of(value: object) -> str:
    kind = type(value)
    if kind.__module__ in ("builtins", "types"):
        return kind.__name__
    return f"{kind.__module__}.{kind.__qualname__}"
