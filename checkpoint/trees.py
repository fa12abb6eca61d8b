"""Words that the codec and the readers of a tree share: node kinds' key, paths, and finding a place by its path."""

import reprlib
from collections.abc import Iterator
from typing import Any

KIND = "!"
"""The key that makes an object of the tree a node; its value names the kind."""

MAX_DEPTH = 100
"""Levels of nesting that a state may have."""

Path = tuple[Any, ...]
"""Where a value is found: () for the root, (parent path, key) below it. Joined only when somebody asks."""


def joined(path: Path) -> str:
    """The path as people write it: `hooks.EMA.decay`."""
    keys: list[str] = []
    while path:
        path, key = path
        keys.append(_text(key))
    return ".".join(reversed(keys))


def _text(key: Any) -> str:
    # Python itself refuses to write deep tuples and integers of more than 4300 digits.
    if isinstance(key, tuple):
        return _keys.repr(key)
    return hex(key) if isinstance(key, int) and abs(key) > 2**64 else str(key)


class _Keys(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxtuple, self.maxstring, self.maxother = 20, 100, 100

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002 (the base class calls it so)
        return _text(x)


_keys = _Keys()


def children(node: Any) -> dict[str, Any]:
    """What lies directly below a node, by the key that a path would name; empty for a leaf."""
    if isinstance(node, list):
        return {str(index): item for index, item in enumerate(node)}
    if not isinstance(node, dict):
        return {}
    if KIND not in node:
        return dict(node)
    items = node.get("items")
    if node[KIND] in _KEYED and isinstance(items, list):
        return _named([(str(children_key(key)), item) for key, item in items])
    if isinstance(items, list):
        return {str(index): item for index, item in enumerate(items)}
    fields = node.get("fields")
    return dict(fields) if isinstance(fields, dict) else {}


def _named(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """By name; 1 and "1" are two keys with one name, so the second gets a number as its tensor does."""
    found: dict[str, Any] = {}
    ordinals: dict[str, int] = {}
    for name, item in items:
        free = name
        while free in found:
            ordinals[name] = ordinals.get(name, 1) + 1
            free = f"{name}#{ordinals[name]}"
        found[free] = item
    return found


def children_key(key: Any) -> Any:
    """A key of a keyed node as a path shows it: tuples as `(a, b)`."""
    if isinstance(key, dict) and key.get(KIND) == "tuple":
        return "(" + ", ".join(str(children_key(item)) for item in key["items"]) + ")"
    return key


def find(tree: Any, path: str) -> Any:
    """The node at a path. KeyError(the part that led nowhere, the names that are there) otherwise.

    Keys may hold dots themselves (`model.blocks.0.weight` is one key of `model`): the longest key that fits wins.
    """
    node, rest = tree, path
    while rest:
        below = children(node)
        fitting = [key for key in below if rest == key or rest.startswith(f"{key}.")]
        if not fitting:
            raise KeyError(rest, sorted(below))
        key = max(fitting, key=len)
        node, rest = below[key], rest[len(key) + 1 :]
    return node


def tensors_in(node: Any) -> Iterator[str]:
    """Names of the tensors that a node and all below it refer to; one may come several times."""
    if isinstance(node, list):
        for item in node:
            yield from tensors_in(item)
    elif isinstance(node, dict):
        if KIND in node and isinstance(node.get("tensor"), str):
            yield node["tensor"]
        for item in node.values():
            yield from tensors_in(item)


_KEYED = frozenset({"dict", "OrderedDict", "defaultdict", "Counter"})
