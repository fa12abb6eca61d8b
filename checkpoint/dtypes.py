"""Element types by torch's names, without torch: bytes of an element, and the tag safetensors has for it."""

# Types without a safetensors tag are written as U8 with one dimension; the manifest knows the true type.
_TYPES: dict[str, tuple[int, str | None]] = {
    "bool": (1, "BOOL"),
    "uint8": (1, "U8"),
    "int8": (1, "I8"),
    "uint16": (2, "U16"),
    "int16": (2, "I16"),
    "uint32": (4, "U32"),
    "int32": (4, "I32"),
    "uint64": (8, "U64"),
    "int64": (8, "I64"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float32": (4, "F32"),
    "float64": (8, "F64"),
    "complex32": (4, None),
    "complex64": (8, "C64"),
    "complex128": (16, None),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e4m3fnuz": (1, None),
    "float8_e5m2fnuz": (1, None),
    "float8_e8m0fnu": (1, None),
    "float4_e2m1fn_x2": (1, None),
    "bits1x8": (1, None),
    "bits2x4": (1, None),
    "bits4x2": (1, None),
    "bits8": (1, None),
    "bits16": (2, None),
    **{f"{sign}int{bits}": (1, None) for sign in ("", "u") for bits in range(1, 8)},
}

DTYPES = frozenset(_TYPES)


def item_bytes(dtype: str) -> int:
    """Bytes of one element. KeyError for an unknown type."""
    return _TYPES[dtype][0]


def safetensors_tag(dtype: str) -> str | None:
    """The tag in a safetensors header; None when that format has no such type."""
    return _TYPES[dtype][1]
