"""Nodes for the user's plain classes: enums, named tuples and dataclasses, found again only if already imported."""

import abc
import dataclasses
import enum
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from trainerd.checkpoint.errors import MissingClass, UnsupportedState
from trainerd.checkpoint.trees import KIND, Path, joined


def _encode_enum(encoder: Any, value: enum.Enum, path: Path) -> Any:
    reference = _class_reference(type(value), path)
    return {KIND: "enum", "class": reference, "name": value.name, "value": encoder.encode(value.value, path)}


def _decode_enum(decoder: Any, node: Any, path: Path) -> Any:
    found = _find_class(node["class"], path, lambda kind: issubclass(kind, enum.Enum), "enum")
    # By name: a NaN, or a tensor, is no key to look a member up by. A combination of flags has no member of its own.
    member = found.__members__.get(node["name"]) if node["name"] is not None else None
    if member is None and found.__members__:  # without members the call would make a new class
        member = found(decoder.decode(node["value"], path))
    if member is None:
        raise ValueError(f"{node['class']} has no such member now")
    return member


def _encode_namedtuple(encoder: Any, value: Any, path: Path) -> Any:
    fields = {name: encoder.encode(item, (path, name)) for name, item in zip(value._fields, value, strict=True)}
    return {KIND: "namedtuple", "class": _class_reference(type(value), path), "fields": fields}


def _decode_namedtuple(decoder: Any, node: Any, path: Path) -> Any:
    found = _find_class(node["class"], path, _is_namedtuple, "named tuple")
    return tuple.__new__(found, _fields(decoder, node, path, found._fields).values())


def _fields(decoder: Any, node: Any, path: Path, names: Iterable[str]) -> dict[str, Any]:
    """The fields in the order of the class. ValueError unless they are exactly those that the class has now."""
    saved, present = set(node["fields"]), set(names)
    if saved != present:
        further = [f"the field {name} is new" for name in sorted(present - saved)]
        further += [f"the field {name} is gone" for name in sorted(saved - present)]
        raise ValueError(f"{node['class']} is another class now: {', '.join(further)}")
    return {name: decoder.decode(node["fields"][name], (path, name)) for name in names}


def _is_namedtuple(kind: type) -> bool:
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields")


def _encode_dataclass(encoder: Any, value: Any, path: Path) -> Any:
    names = [field.name for field in dataclasses.fields(value)]
    missing = [name for name in names if not hasattr(value, name)]
    # Fields are all that is stored, so they must be all that there is.
    further = sorted((set(getattr(value, "__dict__", ())) | _slots(type(value))) - set(names))
    bases = [base for base in type(value).__mro__ if base not in (object, abc.ABC, typing.Generic, typing.Protocol)]
    why = ""
    if missing:
        why = f"it has no value for {', '.join(missing)}"
    elif further:
        why = f"it has more than its fields: {', '.join(further)}"
    elif not all(dataclasses.is_dataclass(base) for base in bases):
        why = "it derives from what is no dataclass"
    if why:
        raise UnsupportedState(joined(path), f"the dataclass {type(value).__qualname__}", why)
    fields = {name: encoder.encode(getattr(value, name), (path, name)) for name in names}
    return {KIND: "dataclass", "class": _class_reference(type(value), path), "fields": fields}


def _slots(kind: type) -> set[str]:
    slots = (base.__dict__.get("__slots__", ()) for base in kind.__mro__)
    names = {name for named in slots for name in ([named] if isinstance(named, str) else named)}
    return names - {"__dict__", "__weakref__"}


def _decode_dataclass(decoder: Any, node: Any, path: Path) -> Any:
    found = _find_class(node["class"], path, dataclasses.is_dataclass, "dataclass")
    names = [field.name for field in dataclasses.fields(found)]
    # Not through __init__: fields may be computed there, or not be among its parameters.
    value = object.__new__(found)
    for name, item in _fields(decoder, node, path, names).items():
        object.__setattr__(value, name, item)
    return value


def _class_reference(kind: type, path: Path) -> str:
    reference = f"{kind.__module__}:{kind.__qualname__}"
    if _imported(reference) is not kind:
        why = f"{reference} cannot be found again by that name: define the class at the top level of a module"
        raise UnsupportedState(joined(path), kind.__qualname__, why)
    return reference


def _find_class(reference: str, path: Path, is_plain: Callable[[type], bool], what: str) -> Any:
    """The class a node names, only if the program has imported it already: loading must never run code by name."""
    found = _imported(reference)
    if not isinstance(found, type):
        module = reference.partition(":")[0]
        why = "has not been imported" if module not in sys.modules else "has no such class any more"
        raise MissingClass(joined(path), reference, f"module {module} {why}")
    if not is_plain(found):
        raise MissingClass(joined(path), reference, f"that is no {what} now")
    return found


def _imported(reference: str) -> object:
    module, _, qualname = reference.partition(":")
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        if not isinstance(found, (types.ModuleType, type)):
            return None
        # Not getattr: the __getattr__ of a lazy module would import, which is to run, whatever the name says.
        found = object.__getattribute__(found, "__dict__").get(part)
    return found


def handler_for(value: object) -> Callable[[Any, Any, Path], Any] | None:
    """The encoder for a value whose exact type is the user's, by what kind of class it is."""
    if isinstance(value, enum.Enum):
        return _encode_enum
    if isinstance(value, tuple) and _is_namedtuple(type(value)):
        return _encode_namedtuple
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, dict, list, tuple)):
        return _encode_dataclass
    return None


DECODERS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "enum": _decode_enum,
    "namedtuple": _decode_namedtuple,
    "dataclass": _decode_dataclass,
}
