"""A described tree as two flat tables: its tensors and its values, by dotted path."""

from dataclasses import dataclass
from typing import Any

from trainerd.checkpoint import trees
from trainerd.checkpoint.convert.selection import holds_tensor, is_keyed, is_leaf, is_tensor
from trainerd.checkpoint.trees import KIND

_NUMPY = {
    **{f"<{letter}{size}": f"{word}{8 * size}" for letter, word in (("i", "int"), ("u", "uint")) for size in (2, 4, 8)},
    "|i1": "int8",
    "|u1": "uint8",
    "|b1": "bool",
    "<f2": "float16",
    "<f4": "float32",
    "<f8": "float64",
    "<c8": "complex64",
    "<c16": "complex128",
}
_BESIDE = ("stride", "requires_grad", "parameter")


@dataclass(frozen=True)
class FlatTensor:
    """A tensor or NumPy array: its name in the manifest; its type (torch's name, or NumPy's own) and shape."""

    stored: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Flat:
    """Tensors and values by path. A list of plain values is one value; what an empty container holds is itself."""

    tensors: dict[str, FlatTensor]
    values: dict[str, Any]


def flatten(node: Any, path: str = "") -> Flat:
    """The tables of a subtree, in its order."""
    flat = Flat({}, {})
    _add(flat, node, path)
    return flat


def _add(flat: Flat, node: Any, path: str) -> None:
    children = trees.children(node)
    if is_tensor(node):
        flat.tensors[path] = FlatTensor(node["tensor"], node["dtype"], tuple(node["shape"]))
        flat.values.update({f"{path}.{key}": node[key] for key in _BESIDE if key in node})
    elif children and not is_leaf(node):
        for name, child in children.items():
            _add(flat, child, f"{path}.{name}" if path else name)
    elif isinstance(node, dict) and not is_keyed(node) and holds_tensor(node):
        _add_made_of_tensors(flat, node, path)
    else:
        flat.values[path] = node


def _add_made_of_tensors(flat: Flat, node: dict[str, Any], path: str) -> None:
    """Arrays, sparse and quantized tensors, generators: what they are beside their tensors is values."""
    if isinstance(node.get("tensor"), str):
        dtype = node["dtype"] if isinstance(node["dtype"], str) else "record"
        flat.tensors[path] = FlatTensor(node["tensor"], _NUMPY.get(dtype, dtype), tuple(node["shape"]))
        return
    for name, item in node.items():
        if holds_tensor(item):
            _add(flat, item, f"{path}.{name}")
        elif name != KIND:
            flat.values[f"{path}.{name}"] = item
