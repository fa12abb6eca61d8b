"""A stored state of what `torch.load(weights_only=True)` permits: every other value becomes a plain one, and is told.

No class of the user's is needed for it: a dataclass becomes a dict, an enum its value.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from trainerd.checkpoint import codec
from trainerd.checkpoint.trees import KIND, Path, joined


class PlainDecoder(codec.Decoder):
    """Turns nodes into plain values; `changed` lists the others as (path, kind, what it became)."""

    def __init__(self, read_tensor: Callable[[str], torch.Tensor]) -> None:
        super().__init__(read_tensor)
        self.changed: list[tuple[str, str, str]] = []

    def decode(self, node: Any, path: Path) -> Any:
        """The plain value of a node found at a path."""
        kind = node.get(KIND) if isinstance(node, dict) else None
        if kind not in _PLAIN:
            return super().decode(node, path)
        became, make = _PLAIN[kind]
        self.changed.append((joined(path), kind, became))
        return make(self, node, path)

    def as_it_was(self, node: Any, path: Path) -> Any:
        """The value of a node, of its own class."""
        return super().decode(node, path)


def _fields(decoder: PlainDecoder, node: Any, path: Path) -> dict[str, Any]:
    return {name: decoder.decode(item, (path, name)) for name, item in node["fields"].items()}


def _array(decoder: PlainDecoder, node: Any, path: Path) -> Any:
    array = decoder.as_it_was(node, path)
    try:
        return torch.from_numpy(np.ascontiguousarray(array))
    except TypeError:  # text, records, dates
        return {"dtype": str(array.dtype), "shape": list(array.shape), "bytes": array.tobytes()}


def _scalar(decoder: PlainDecoder, node: Any, path: Path) -> Any:
    value = decoder.as_it_was(node, path).item()
    return value if type(value) in (bool, int, float, complex, str, bytes) else repr(value)


_Make = Callable[[PlainDecoder, Any, Path], Any]

_PLAIN: dict[str, tuple[str, _Make]] = {
    "namedtuple": ("tuple", lambda decoder, node, path: tuple(_fields(decoder, node, path).values())),
    "dataclass": ("dict", _fields),
    "enum": ("its value", lambda decoder, node, path: decoder.decode(node["value"], path)),
    "deque": ("list", lambda decoder, node, path: decoder.decode(node["items"], path)),
    "frozenset": ("set", lambda decoder, node, path: set(decoder.decode(node["items"], path))),
    "defaultdict": ("dict", lambda decoder, node, path: decoder.decode({**node, KIND: "dict"}, path)),
    "range": ("tuple", lambda decoder, node, path: tuple(decoder.decode(node["items"], path))),
    "slice": ("tuple", lambda decoder, node, path: tuple(decoder.decode(node["items"], path))),
    "timedelta": ("seconds", lambda decoder, node, path: decoder.as_it_was(node, path).total_seconds()),
    "datetime": ("text", lambda decoder, node, path: decoder.as_it_was(node, path).isoformat()),
    "date": ("text", lambda _decoder, node, _path: node["iso"]),
    "path": ("text", lambda decoder, node, path: decoder.decode(node["text"], path)),
    "numpy": ("Python number", _scalar),
    "ndarray": ("tensor", _array),
    "numpy.Generator": ("dict of its state", lambda decoder, node, path: decoder.decode(node["state"], path)),
    "numpy.RandomState": ("dict of its state", lambda decoder, node, path: decoder.decode(node["state"], path)),
    "torch.Generator": ("tensor of its state", lambda decoder, node, path: decoder.decode(node["state"], path)),
}
