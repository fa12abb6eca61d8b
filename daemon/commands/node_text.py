"""One node of a checkpoint's tree as one line of text. The kinds are those of docs/checkpoint-format.md."""

import base64
import datetime
import struct
from collections.abc import Callable
from typing import Any

from trainerd.checkpoint.trees import KIND, children, children_key
from trainerd.daemon.console import format_bytes

_SHOWN_ITEMS = 6
_SHOWN_CHARACTERS = 72
_BRACKETS = {
    "list": ("[", "]"),
    "tuple": ("(", ")"),
    "set": ("set{", "}"),
    "frozenset": ("frozenset{", "}"),
    "deque": ("deque[", "]"),
}


def kind_of(node: Any) -> str:
    """The kind of a node; "" for values that JSON says itself."""
    if isinstance(node, list):
        return "list"
    return str(node.get(KIND, "dict")) if isinstance(node, dict) else ""


def one_line(node: Any) -> str | None:
    """The node in one line; None if it is a container whose entries deserve a line each."""
    kind = kind_of(node)
    if not kind:
        return _scalar(node)
    if kind in _LEAVES:
        try:
            return _LEAVES[kind](node)
        except (ValueError, TypeError, LookupError, OverflowError):
            return f"{kind}, which makes no sense"
    if kind in _BRACKETS:
        return _inline_items(node, kind)
    if not children(node):
        return "{}" if kind == "dict" else f"{kind}, empty"
    return None


def key_text(key: Any) -> str:
    """A key as one word of a path; control characters are escaped."""
    text = str(children_key(key))
    return text if text.isprintable() and text else repr(text)


def label(node: Any) -> str:
    """What a container is; "" for plain dicts and lists."""
    kind = kind_of(node)
    if kind in ("dict", "list"):
        return ""
    return f"{kind} {key_text(node['class'])}" if "class" in node else kind


def tensors_in(node: Any) -> dict[str, int]:
    """Bytes of every tensor in a subtree, by name: tied ones count once."""
    found: dict[str, int] = {}
    if isinstance(node, list):
        for item in node:
            found |= tensors_in(item)
    elif isinstance(node, dict):
        if KIND in node and isinstance(node.get("tensor"), str):
            found[node["tensor"]] = node.get("bytes", 0)
        for item in node.values():
            found |= tensors_in(item)
    return found


def _inline_items(node: Any, kind: str) -> str | None:
    items = node if isinstance(node, list) else node["items"]
    if tensors_in(node):
        return None
    texts = [one_line(item) for item in items[:_SHOWN_ITEMS]]
    if any(text is None for text in texts):
        return None
    shown = ", ".join(text for text in texts if text is not None)
    if kind == "tuple" and len(items) == 1:
        shown += ","
    if len(items) > len(texts):
        shown += f", ... {len(items) - len(texts)} more"
    left, right = _BRACKETS[kind]
    return f"{left}{shown}{right}"


def _scalar(value: Any) -> str:
    text = repr(value)
    if len(text) <= _SHOWN_CHARACTERS or not isinstance(value, str):
        return text
    return f"{text[:_SHOWN_CHARACTERS]}... ({len(value)} characters)"


def _tensor(node: dict[str, Any]) -> str:
    return f"{node['dtype']} {node['shape']} {format_bytes(node['bytes'])}"


def _array(node: dict[str, Any]) -> str:
    return f"numpy {_numpy_type(node['dtype'])} {node['shape']} {format_bytes(node['bytes'])}"


def _numpy_type(description: Any) -> str:
    """`float64` for `<f8`; NumPy itself would cost more time than the whole command."""
    if not isinstance(description, str):
        return "record"
    words = {"f": "float", "i": "int", "u": "uint", "c": "complex"}
    word = words.get(description.lstrip("<>|=")[:1])
    size = description[2:]
    return f"{word}{8 * int(size)}" if word and size.isdigit() else description.replace("|b1", "bool")


def _numpy_scalar(node: dict[str, Any]) -> str:
    if not isinstance(node["dtype"], str):
        return "numpy record"
    import numpy as np

    value = np.frombuffer(bytes.fromhex(node["hex"]), dtype=node["dtype"])[0]
    return f"{value} (numpy {value.dtype})"


def _float(node: dict[str, Any]) -> str:
    return str(struct.unpack(">d", bytes.fromhex(node["bits"]))[0])


def _enum(node: dict[str, Any]) -> str:
    return key_text(f"{node['class'].rpartition(':')[2]}.{node['name']}")


def _sparse(node: dict[str, Any]) -> str:
    values = one_line(node["values"])
    return f"{node[KIND]} {node.get('shape', '')}, values {values}"


def _quantized(node: dict[str, Any]) -> str:
    return f"{node['dtype']}, stored as {one_line(node['values'])}"


def _generator(node: dict[str, Any]) -> str:
    return f"{node[KIND]}" + (f" on {node['device']}" if "device" in node else "")


def _named(node: dict[str, Any]) -> str:
    return f"{node[KIND]} {node['name']}"


def _call(node: dict[str, Any]) -> str:
    return f"{node[KIND].removeprefix('torch.')}({', '.join(str(one_line(item)) for item in node['items'])})"


def _blob(node: dict[str, Any]) -> str:
    return f"{node[KIND]}, {format_bytes(len(base64.b64decode(node['base64'])))}"


_LEAVES: dict[str, Callable[[dict[str, Any]], str]] = {
    "tensor": _tensor,
    "ndarray": _array,
    "numpy": _numpy_scalar,
    "numpy.Generator": _generator,
    "numpy.RandomState": _generator,
    "sparse_coo": _sparse,
    "sparse_csr": _sparse,
    "sparse_csc": _sparse,
    "sparse_bsr": _sparse,
    "sparse_bsc": _sparse,
    "quantized": _quantized,
    "torch.Size": _call,
    "torch.dtype": _named,
    "torch.device": _named,
    "torch.Generator": _generator,
    "int": lambda node: str(node["hex"]),
    "float": _float,
    "complex": _call,
    "range": _call,
    "slice": _call,
    "str": lambda node: _scalar(base64.b64decode(node["utf8"]).decode("utf-8", "backslashreplace")),
    "bytes": _blob,
    "bytearray": _blob,
    "enum": _enum,
    "path": lambda node: f"path {node['text']!r}",
    "datetime": lambda node: str(node["iso"]),
    "date": lambda node: str(node["iso"]),
    "timedelta": lambda node: str(datetime.timedelta(*node["items"])),
}
