"""Which fields each kind of node must have, and the check that a tree keeps to it before anybody walks it."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from trainerd.checkpoint.trees import KIND, MAX_DEPTH, Path, joined

MAX_NESTING = 3 * MAX_DEPTH + 50
"""Levels of JSON that a tree may have: three for each level of the state, and the description of a NumPy record."""

_Text = Annotated[
    str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")
]  # it is shown, so a terminal must not obey it
_Hex = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{2})*\Z")]
_Base64 = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9+/]*={0,2}\Z")]
_Extent = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Shape = list[_Extent]


class _Node(msgspec.Struct):
    """A node of a known kind; further fields are ignored."""


class _Tensor(_Node):
    tensor: str
    stride: _Shape | None = None
    requires_grad: bool = False
    parameter: bool = False


class _Int(_Node):
    hex: Annotated[str, msgspec.Meta(pattern=r"^-?0x[0-9a-f]+\Z")]


class _Float(_Node):
    bits: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]


class _Str(_Node):
    utf8: _Base64


class _Bytes(_Node):
    base64: _Base64


class _Items(_Node):
    items: list[Any]


class _Two(_Node):
    items: tuple[Any, Any]


class _Three(_Node):
    items: tuple[Any, Any, Any]


class _ThreeInts(_Node):
    items: tuple[int, int, int]


class _Size(_Node):
    items: list[int]


class _Deque(_Node):
    items: list[Any]
    maxlen: _Extent | None


class _Pairs(_Node):
    items: list[tuple[Any, Any]]


class _OrderedDict(_Pairs):
    attributes: dict[str, Any] | None = None


class _DefaultDict(_Pairs):
    factory: str | None


class _Enum(_Node):
    class_: str = msgspec.field(name="class")
    name: str | None
    value: Any


class _Fields(_Node):
    class_: str = msgspec.field(name="class")
    fields: dict[str, Any]


class _Zone(msgspec.Struct):
    zone: _Text | None = None
    offset: tuple[int, int, int] | None = None
    name: str | None = None


class _Datetime(_Node):
    iso: _Text
    fold: Annotated[int, msgspec.Meta(ge=0, le=1)]
    tz: _Zone | None


class _Date(_Node):
    iso: _Text


class _Path(_Node):
    text: str | dict[str, Any]
    pure: str | None = None


class _Scalar(_Node):
    dtype: _Text | list[Any]
    hex: _Hex


class _Array(_Node):
    dtype: _Text | list[Any]
    shape: _Shape
    order: Annotated[str, msgspec.Meta(pattern=r"^[CF]\Z")]
    tensor: str


class _State(_Node):
    state: dict[str, Any]


class _SeededState(_State):
    seed: dict[str, Any]


class _TorchGenerator(_State):
    device: _Text


class _Named(_Node):
    name: _Text


class _Sparse(_Node, kw_only=True):
    shape: _Shape
    values: dict[str, Any]
    requires_grad: bool = False
    parameter: bool = False


class _Coo(_Sparse):
    coalesced: bool
    indices: dict[str, Any]


class _Compressed(_Sparse):
    compressed: dict[str, Any]
    plain: dict[str, Any]


class _Quantized(_Node):
    dtype: _Text
    values: dict[str, Any]
    scale: Any = None
    zero_point: int | None = None
    scales: dict[str, Any] | None = None
    zero_points: dict[str, Any] | None = None
    axis: _Extent | None = None


SHAPES: Mapping[str, type[_Node]] = {
    "tensor": _Tensor,
    "int": _Int,
    "float": _Float,
    "str": _Str,
    "bytes": _Bytes,
    "bytearray": _Bytes,
    "complex": _Two,
    **dict.fromkeys(("tuple", "set", "frozenset"), _Items),
    **dict.fromkeys(("range", "slice"), _Three),
    "torch.Size": _Size,
    "timedelta": _ThreeInts,
    "deque": _Deque,
    **dict.fromkeys(("dict", "Counter"), _Pairs),
    "OrderedDict": _OrderedDict,
    "defaultdict": _DefaultDict,
    "enum": _Enum,
    **dict.fromkeys(("namedtuple", "dataclass"), _Fields),
    "datetime": _Datetime,
    "date": _Date,
    "path": _Path,
    "numpy": _Scalar,
    "ndarray": _Array,
    "numpy.Generator": _SeededState,
    "numpy.RandomState": _State,
    "torch.Generator": _TorchGenerator,
    **dict.fromkeys(("torch.dtype", "torch.device"), _Named),
    "sparse_coo": _Coo,
    **dict.fromkeys(("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"), _Compressed),
    "quantized": _Quantized,
}


def first_fault(tree: Any, tensors: Mapping[str, object]) -> str | None:
    """What is wrong with the first node that is not as the format has it; None if all are.

    Kinds that this version does not know are left to whoever decodes them. Walks level by level, without recursion.
    """
    level: list[tuple[Path, Any]] = [((), tree)]
    for _ in range(MAX_NESTING):
        below: list[tuple[Path, Any]] = []
        for path, node in level:
            if isinstance(node, list):
                for at, item in enumerate(node):
                    if isinstance(item, (dict, list)):
                        below.append(((path, at), item))
                continue
            if not isinstance(node, dict):
                continue
            fault = _fault(node, tensors) if KIND in node else None
            if fault:
                return f"its tree has no valid node at {joined(path)[:200] or 'its root'}: {fault}"
            for key, item in node.items():
                if isinstance(item, (dict, list)):
                    below.append(((path, key), item))
        if not below:
            return None
        level = below
    return f"its tree is nested deeper than {MAX_NESTING} levels"


def _fault(node: dict[str, Any], tensors: Mapping[str, object]) -> str | None:
    kind = node[KIND]
    if not isinstance(kind, str):
        return f"the kind of a node is no string, but {type(kind).__name__}"
    shape = SHAPES.get(kind)
    if shape is None:
        return None
    try:
        known = msgspec.convert(node, shape)
    except msgspec.ValidationError as error:
        return f"{kind}: {str(error)[:300]}"
    if isinstance(known, (_Tensor, _Array)) and known.tensor not in tensors:
        return f"it refers to the tensor {known.tensor[:100]!r}, which the manifest does not list"
    return None
