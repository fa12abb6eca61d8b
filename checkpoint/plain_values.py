"""Nodes for Python's own values: numbers that JSON cannot say, containers, dates, paths, the user's plain classes."""

import abc
import base64
import collections
import dataclasses
import datetime
import enum
import math
import pathlib
import struct
import sys
import typing
import zoneinfo
from collections.abc import Callable
from typing import Any

import msgspec

from trainerd.checkpoint.errors import MissingClass, UnsupportedState
from trainerd.checkpoint.trees import KIND, Path, joined

_LARGEST_PLAIN_INT = 2**53  # beyond it readers that take JSON numbers for doubles would round
_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (bool, bytes, complex, dict, float, int, list, set, str, tuple)
}
_KEY_TYPES = (str, int, float, bool, bytes, tuple, type(None))


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
    for key in value:
        if not isinstance(key, (*_KEY_TYPES, enum.Enum)):
            raise UnsupportedState(joined((path, key)), f"a dict key of type {type(key).__name__}")
    return [[encoder.encode(key, (path, key)), encoder.encode(item, (path, key))] for key, item in value.items()]


def _pairs(decoder: Any, node: Any, path: Path) -> list[tuple[Any, Any]]:
    return [(decoder.decode(key, (path, key)), decoder.decode(item, (path, str(key)))) for key, item in node["items"]]


def _sequence(kind: str, ordered: bool = True) -> Callable[[Any, Any, Path], Any]:
    def encode(encoder: Any, value: Any, path: Path) -> Any:
        items = _encode_list(encoder, list(value), path)
        return {KIND: kind, "items": items if ordered else sorted(items, key=msgspec.json.encode)}

    return encode


def _encode_deque(encoder: Any, value: collections.deque[Any], path: Path) -> Any:
    return {KIND: "deque", "maxlen": value.maxlen, "items": _encode_list(encoder, list(value), path)}


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
    if isinstance(zone, zoneinfo.ZoneInfo) and zone.key:
        return {"zone": zone.key}
    if type(zone) is datetime.timezone:
        offset = zone.utcoffset(None)
        return {"offset": [offset.days, offset.seconds, offset.microseconds], "name": zone.tzname(None)}
    raise UnsupportedState(joined(path), f"a time zone of type {type(zone).__name__}")


def _decode_timezone(described: Any) -> datetime.tzinfo | None:
    if described is None:
        return None
    if "zone" in described:
        return zoneinfo.ZoneInfo(described["zone"])
    days, seconds, microseconds = described["offset"]
    offset = datetime.timedelta(days, seconds, microseconds)
    return datetime.UTC if not offset else datetime.timezone(offset, described["name"])


def _encode_datetime(_encoder: Any, value: datetime.datetime, path: Path) -> Any:
    text = value.replace(tzinfo=None).isoformat()
    return {KIND: "datetime", "iso": text, "fold": value.fold, "tz": _encode_timezone(value.tzinfo, path)}


def _decode_datetime(_decoder: Any, node: Any, _path: Path) -> datetime.datetime:
    value = datetime.datetime.fromisoformat(node["iso"])
    return value.replace(fold=node["fold"], tzinfo=_decode_timezone(node["tz"]))


def _encode_enum(encoder: Any, value: enum.Enum, path: Path) -> Any:
    reference = _class_reference(type(value), path)
    return {KIND: "enum", "class": reference, "name": value.name, "value": encoder.encode(value.value, path)}


def _decode_enum(decoder: Any, node: Any, path: Path) -> Any:
    found = _find_class(node["class"], path)
    # By name: a NaN, or a tensor, is no key to look a member up by. A combination of flags has no member of its own.
    member = found.__members__.get(node["name"]) if node["name"] is not None else None
    return found(decoder.decode(node["value"], path)) if member is None else member


def _encode_namedtuple(encoder: Any, value: Any, path: Path) -> Any:
    fields = {name: encoder.encode(item, (path, name)) for name, item in zip(value._fields, value, strict=True)}
    return {KIND: "namedtuple", "class": _class_reference(type(value), path), "fields": fields}


def _decode_namedtuple(decoder: Any, node: Any, path: Path) -> Any:
    found = _find_class(node["class"], path)
    return found(**{name: decoder.decode(item, (path, name)) for name, item in node["fields"].items()})


def _encode_dataclass(encoder: Any, value: Any, path: Path) -> Any:
    names = [field.name for field in dataclasses.fields(value)]
    # Fields are all that is stored, so they must be all that there is.
    bases = [base for base in type(value).__mro__ if base not in (object, abc.ABC, typing.Generic, typing.Protocol)]
    further = sorted(set(getattr(value, "__dict__", ())) - set(names))
    if further or not all(dataclasses.is_dataclass(base) for base in bases):
        why = (
            f"it has more than its fields: {', '.join(further)}" if further else "it derives from what is no dataclass"
        )
        raise UnsupportedState(joined(path), f"the dataclass {type(value).__qualname__}", why)
    fields = {name: encoder.encode(getattr(value, name), (path, name)) for name in names}
    return {KIND: "dataclass", "class": _class_reference(type(value), path), "fields": fields}


def _decode_dataclass(decoder: Any, node: Any, path: Path) -> Any:
    found = _find_class(node["class"], path)
    # Not through __init__: fields may be computed there, or not be among its parameters.
    value = object.__new__(found)
    for name, item in node["fields"].items():
        object.__setattr__(value, name, decoder.decode(item, (path, name)))
    return value


def _class_reference(kind: type, path: Path) -> str:
    reference = f"{kind.__module__}:{kind.__qualname__}"
    if _imported(reference) is not kind:
        why = f"{reference} cannot be found again by that name: define the class at the top level of a module"
        raise UnsupportedState(joined(path), kind.__qualname__, why)
    return reference


def _find_class(reference: str, path: Path) -> Any:
    """The class a node names, only if the program has imported it already: loading must never run code by name."""
    found = _imported(reference)
    if not isinstance(found, type):
        module = reference.partition(":")[0]
        why = "has not been imported" if module not in sys.modules else "has no such class any more"
        raise MissingClass(joined(path), reference, f"module {module} {why}")
    is_plain = issubclass(found, (enum.Enum, tuple)) or dataclasses.is_dataclass(found)
    if not is_plain:
        raise MissingClass(joined(path), reference, "that is no enum, named tuple or dataclass now")
    return found


def _imported(reference: str) -> object:
    module, _, qualname = reference.partition(":")
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def handler_for(value: object) -> Callable[[Any, Any, Path], Any] | None:
    """The encoder for a value whose exact type is the user's, by what kind of class it is."""
    if isinstance(value, enum.Enum):
        return _encode_enum
    if isinstance(value, tuple) and hasattr(value, "_fields") and type(value).__bases__ == (tuple,):
        return _encode_namedtuple
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, dict, list, tuple)):
        return _encode_dataclass
    if isinstance(value, pathlib.PurePath):
        return lambda encoder, value, path: {KIND: "path", "text": encoder.encode(str(value), path)}
    return None


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
    collections.OrderedDict: lambda encoder, value, path: {
        KIND: "OrderedDict",
        "items": _items(encoder, value, path),
    },
    collections.Counter: lambda encoder, value, path: {
        KIND: "Counter",
        "items": _items(encoder, value, path),
    },
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
}

DECODERS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "int": lambda _decoder, node, _path: int(node["hex"], 16),
    "float": lambda _decoder, node, _path: struct.unpack(">d", bytes.fromhex(node["bits"]))[0],
    "str": lambda _decoder, node, _path: base64.b64decode(node["utf8"]).decode("utf-8", "surrogatepass"),
    "dict": lambda decoder, node, path: dict(_pairs(decoder, node, path)),
    "tuple": lambda decoder, node, path: tuple(decoder.decode(node["items"], path)),
    "set": lambda decoder, node, path: set(decoder.decode(node["items"], path)),
    "frozenset": lambda decoder, node, path: frozenset(decoder.decode(node["items"], path)),
    "deque": lambda decoder, node, path: collections.deque(decoder.decode(node["items"], path), node["maxlen"]),
    "OrderedDict": lambda decoder, node, path: collections.OrderedDict(_pairs(decoder, node, path)),
    "Counter": lambda decoder, node, path: collections.Counter(dict(_pairs(decoder, node, path))),
    "defaultdict": lambda decoder, node, path: collections.defaultdict(
        None if node["factory"] is None else _FACTORIES[node["factory"]], _pairs(decoder, node, path)
    ),
    "range": lambda decoder, node, path: range(*decoder.decode(node["items"], path)),
    "slice": lambda decoder, node, path: slice(*decoder.decode(node["items"], path)),
    "bytes": lambda _decoder, node, _path: base64.b64decode(node["base64"]),
    "bytearray": lambda _decoder, node, _path: bytearray(base64.b64decode(node["base64"])),
    "complex": lambda decoder, node, path: complex(*decoder.decode(node["items"], path)),
    "datetime": _decode_datetime,
    "date": lambda _decoder, node, _path: datetime.date.fromisoformat(node["iso"]),
    "timedelta": lambda _decoder, node, _path: datetime.timedelta(*node["items"]),
    "path": lambda decoder, node, path: pathlib.Path(decoder.decode(node["text"], path)),
    "enum": _decode_enum,
    "namedtuple": _decode_namedtuple,
    "dataclass": _decode_dataclass,
}
