"""Nodes for Python's own values: numbers that JSON cannot say, containers, dates, paths."""

import base64
import collections
import datetime
import enum
import math
import pathlib
import struct
import zoneinfo
from collections.abc import Callable
from typing import Any

import msgspec

from trainerd.checkpoint.errors import UnsupportedState
from trainerd.checkpoint.trees import KIND, Path, joined

_LARGEST_PLAIN_INT = 2**53  # beyond it readers that take JSON numbers for doubles would round
_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (bool, bytes, complex, dict, float, int, list, set, str, tuple)
}
_PURE_PATHS = {kind.__name__: kind for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath)}
_KEY_TYPES = (str, int, float, bool, bytes, type(None))


def _itself(_encoder: Any, value: Any, _path: Path) -> Any:
    return value


def _encode_int(_encoder: Any, value: int, _path: Path) -> Any:
    if -_LARGEST_PLAIN_INT <= value <= _LARGEST_PLAIN_INT:
        return value
    # Hexadecimal: Python limits the length of decimal conversions.
    return {KIND: "int", "hex": hex(value)}


def _encode_float(_encoder: Any, value: float, _path: Path) -> Any:
    if math.isfinite(value):
        return value
    return {KIND: "float", "bits": struct.pack(">d", value).hex()}


def _encode_str(_encoder: Any, value: str, _path: Path) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        return {KIND: "str", "utf8": _base64(value.encode("utf-8", "surrogatepass"))}
    return value


def _encode_list(encoder: Any, value: list[Any], path: Path) -> Any:
    encode = encoder.encode
    return [encode(item, (path, index)) for index, item in enumerate(value)]


def _encode_dict(encoder: Any, value: dict[Any, Any], path: Path) -> Any:
    if KIND not in value and all(type(key) is str and key.isprintable() for key in value):
        encode = encoder.encode
        return {key: encode(item, (path, key)) for key, item in value.items()}
    return {KIND: "dict", "items": _items(encoder, value, path)}


def _items(encoder: Any, value: dict[Any, Any], path: Path) -> list[Any]:
    return [[_encode_key(encoder, key, path), encoder.encode(item, (path, key))] for key, item in value.items()]


def _encode_key(encoder: Any, key: Any, path: Path) -> Any:
    # Encoded first: it bounds the depth to which the check below goes.
    node = encoder.encode(key, (path, key))
    if not _is_key(key):
        why = "it would not be found again by an equal key" if isinstance(key, tuple) else ""
        raise UnsupportedState(joined((path, key)), f"a dict key of type {type(key).__name__}", why)
    return node


def _is_key(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_key, key))
    return isinstance(key, (*_KEY_TYPES, enum.Enum))


def _mapping(decoder: Any, node: Any, path: Path) -> dict[Any, Any]:
    found = {decoder.decode(key, (path, key)): decoder.decode(item, (path, key)) for key, item in node["items"]}
    _all_kept(found, node["items"])
    return found


def _all_kept(found: Any, items: list[Any]) -> Any:
    if len(found) != len(items):
        raise ValueError(f"{len(items)} items, of which only {len(found)} are different or fit")
    return found


def _sequence(kind: str, ordered: bool = True) -> Callable[[Any, Any, Path], Any]:
    def encode(encoder: Any, value: Any, path: Path) -> Any:
        items = _encode_list(encoder, list(value), path)
        return {KIND: kind, "items": items if ordered else sorted(items, key=msgspec.json.encode)}

    return encode


def _encode_deque(encoder: Any, value: collections.deque[Any], path: Path) -> Any:
    return {KIND: "deque", "maxlen": value.maxlen, "items": _encode_list(encoder, list(value), path)}


def _encode_ordered_dict(encoder: Any, value: collections.OrderedDict[Any, Any], path: Path) -> Any:
    node = {KIND: "OrderedDict", "items": _items(encoder, value, path)}
    # The state_dict() of a module carries the versions of its parts in one, `_metadata`.
    attributes = {name: encoder.encode(item, (path, name)) for name, item in vars(value).items()}
    return node | {"attributes": attributes} if attributes else node


def _decode_ordered_dict(decoder: Any, node: Any, path: Path) -> collections.OrderedDict[Any, Any]:
    value = collections.OrderedDict(_mapping(decoder, node, path))
    for name, item in (node.get("attributes") or {}).items():
        vars(value)[name] = decoder.decode(item, (path, name))
    return value


def _encode_counter(encoder: Any, value: collections.Counter[Any], path: Path) -> Any:
    if vars(value):
        raise UnsupportedState(joined(path), "a Counter", f"it has attributes: {', '.join(vars(value))}")
    return {KIND: "Counter", "items": _items(encoder, value, path)}


def _encode_path(encoder: Any, value: pathlib.PurePath, path: Path) -> Any:
    node = {KIND: "path", "text": encoder.encode(str(value), path)}
    return node if isinstance(value, pathlib.Path) else node | {"pure": type(value).__name__}


def _decode_path(decoder: Any, node: Any, path: Path) -> pathlib.PurePath:
    kind = pathlib.Path if node.get("pure") is None else _PURE_PATHS[node["pure"]]
    return kind(decoder.decode(node["text"], path))


def _decode_deque(decoder: Any, node: Any, path: Path) -> collections.deque[Any]:
    value = collections.deque(decoder.decode(node["items"], path), node["maxlen"])
    _all_kept(value, node["items"])
    return value


def _encode_defaultdict(encoder: Any, value: collections.defaultdict[Any, Any], path: Path) -> Any:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", None)
    if factory is not None and (name is None or _FACTORIES.get(name) is not factory):
        raise UnsupportedState(joined(path), "defaultdict", f"its factory must be one of {', '.join(_FACTORIES)}")
    return {KIND: "defaultdict", "factory": name, "items": _items(encoder, value, path)}


def _encode_range(encoder: Any, value: range, path: Path) -> Any:
    return {KIND: "range", "items": _encode_list(encoder, [value.start, value.stop, value.step], path)}


def _encode_slice(encoder: Any, value: slice, path: Path) -> Any:
    return {KIND: "slice", "items": _encode_list(encoder, [value.start, value.stop, value.step], path)}


def _encode_timezone(zone: datetime.tzinfo | None, path: Path) -> Any:
    if zone is None:
        return None
    if type(zone) is zoneinfo.ZoneInfo and zone.key:
        return {"zone": zone.key}
    if type(zone) is datetime.timezone:
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]  # tells a name given from one made up
        return {"offset": [offset.days, offset.seconds, offset.microseconds], "name": name[0] if name else None}
    raise UnsupportedState(joined(path), f"a time zone of type {type(zone).__name__}")


def _decode_timezone(described: Any) -> datetime.tzinfo | None:
    if described is None:
        return None
    if described.get("zone") is not None:
        return zoneinfo.ZoneInfo(described["zone"])
    offset = datetime.timedelta(*described["offset"])
    name = described.get("name")
    return datetime.timezone(offset) if name is None else datetime.timezone(offset, name)


def _encode_datetime(_encoder: Any, value: datetime.datetime, path: Path) -> Any:
    text = value.replace(tzinfo=None).isoformat()
    return {KIND: "datetime", "iso": text, "fold": value.fold, "tz": _encode_timezone(value.tzinfo, path)}


def _decode_datetime(_decoder: Any, node: Any, _path: Path) -> datetime.datetime:
    value = datetime.datetime.fromisoformat(node["iso"])
    return value.replace(fold=node["fold"], tzinfo=_decode_timezone(node["tz"]))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


ENCODERS: dict[type, Callable[[Any, Any, Path], Any]] = {
    type(None): _itself,
    bool: _itself,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    list: _encode_list,
    dict: _encode_dict,
    tuple: _sequence("tuple"),
    set: _sequence("set", ordered=False),
    frozenset: _sequence("frozenset", ordered=False),
    collections.deque: _encode_deque,
    collections.OrderedDict: _encode_ordered_dict,
    collections.Counter: _encode_counter,
    collections.defaultdict: _encode_defaultdict,
    range: _encode_range,
    slice: _encode_slice,
    bytes: lambda _encoder, value, _path: {KIND: "bytes", "base64": _base64(value)},
    bytearray: lambda _encoder, value, _path: {KIND: "bytearray", "base64": _base64(value)},
    complex: lambda encoder, value, path: {
        KIND: "complex",
        "items": [encoder.encode(value.real, path), encoder.encode(value.imag, path)],
    },
    datetime.datetime: _encode_datetime,
    datetime.date: lambda _encoder, value, _path: {KIND: "date", "iso": value.isoformat()},
    datetime.timedelta: lambda _encoder, value, _path: {
        KIND: "timedelta",
        "items": [value.days, value.seconds, value.microseconds],
    },
    type(pathlib.Path()): _encode_path,
    pathlib.PurePosixPath: _encode_path,
    pathlib.PureWindowsPath: _encode_path,
}

DECODERS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "int": lambda _decoder, node, _path: int(node["hex"], 16),
    "float": lambda _decoder, node, _path: struct.unpack(">d", bytes.fromhex(node["bits"]))[0],
    "str": lambda _decoder, node, _path: base64.b64decode(node["utf8"], validate=True).decode("utf-8", "surrogatepass"),
    "dict": _mapping,
    "tuple": lambda decoder, node, path: tuple(decoder.decode(node["items"], path)),
    "set": lambda decoder, node, path: _all_kept(set(decoder.decode(node["items"], path)), node["items"]),
    "frozenset": lambda decoder, node, path: _all_kept(frozenset(decoder.decode(node["items"], path)), node["items"]),
    "deque": _decode_deque,
    "OrderedDict": _decode_ordered_dict,
    "Counter": lambda decoder, node, path: collections.Counter(_mapping(decoder, node, path)),
    "defaultdict": lambda decoder, node, path: collections.defaultdict(
        None if node["factory"] is None else _FACTORIES[node["factory"]], _mapping(decoder, node, path)
    ),
    "range": lambda decoder, node, path: range(*decoder.decode(node["items"], path)),
    "slice": lambda decoder, node, path: slice(*decoder.decode(node["items"], path)),
    "bytes": lambda _decoder, node, _path: base64.b64decode(node["base64"], validate=True),
    "bytearray": lambda _decoder, node, _path: bytearray(base64.b64decode(node["base64"], validate=True)),
    "complex": lambda decoder, node, path: complex(*decoder.decode(node["items"], path)),
    "datetime": _decode_datetime,
    "date": lambda _decoder, node, _path: datetime.date.fromisoformat(node["iso"]),
    "timedelta": lambda _decoder, node, _path: datetime.timedelta(*node["items"]),
    "path": _decode_path,
}
