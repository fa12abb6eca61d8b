"""The keys of a job file and their flags, read off the structs in `job`, and how each kind of value is read."""

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from trainerd.checkpoint.words import bytes_in_words, duration_in_words
from trainerd.daemon import durations
from trainerd.daemon.durations import Bytes, BytesPerHour, Interval, Seconds, Spacing
from trainerd.daemon.job import Job
from trainerd.daemon.job_errors import Place
from trainerd.daemon.near_names import nearest
from trainerd.trainer.mismatch import OnMismatch

Table = type[msgspec.Struct]


class Key(NamedTuple):
    """One key of a job file."""

    table: str  # "" for the top of the file, "checkpoint", "checkpoint.keep"
    name: str
    attribute: str  # its name in the struct
    kind: Any  # str, int, dict, Seconds, Spacing, Interval, Bytes, OnMismatch, a Literal or a table
    default: Any  # msgspec.NODEFAULT: it must be given
    help: str
    least: int | None
    why_least: str

    @property
    def path(self) -> str:
        """Table and name as one dotted name."""
        return f"{self.table}.{self.name}" if self.table else self.name

    @property
    def flag(self) -> str:
        """The flag that overrides it."""
        return "--" + self.path.replace(".", "-").replace("_", "-")

    @property
    def is_table(self) -> bool:
        """Whether it holds further keys."""
        return (
            isinstance(self.kind, type)
            and issubclass(self.kind, msgspec.Struct)
            and not issubclass(self.kind, Interval)
        )

    @property
    def default_text(self) -> str:
        """The default as a person writes it; "" if there is none."""
        if self.default is msgspec.NODEFAULT or self.default is None or self.kind is dict:
            return ""
        if self.is_table:
            items = ((key, getattr(self.default, key.attribute)) for key in keys_of(self.kind, self.path))
            return ", ".join(f"{key.name}={as_text(key.kind, value)}" for key, value in items if value is not None)
        return as_text(self.kind, self.default)


def keys_of(struct: Table = Job, table: str = "") -> Iterator[Key]:
    """The keys of one table, in the order of its struct."""
    for entry in msgspec.structs.fields(struct):
        if typing.get_origin(entry.type) is not Annotated:
            continue
        annotated, meta = typing.get_args(entry.type)
        default = entry.default
        if default is msgspec.NODEFAULT and entry.default_factory is not msgspec.NODEFAULT:
            default = entry.default_factory()
        extra = meta.extra or {}
        least, why = extra.get("least", meta.ge), extra.get("why_least", "")
        kind = _kind(annotated)
        yield Key(table, entry.encode_name, entry.name, kind, default, meta.description, least, why)


def all_keys(struct: Table = Job, table: str = "") -> Iterator[Key]:
    """The keys of a table and of all tables inside it; a table comes before its keys."""
    for key in keys_of(struct, table):
        yield key
        if key.is_table:
            yield from all_keys(key.kind, key.path)


def flag_keys() -> list[Key]:
    """The keys that have a flag of their own: all but the target (an operand), users' tables and whole tables."""
    named = [key for key in all_keys() if key.path != "target" and key.kind is not dict]
    # `checkpoint.keep` is one flag: its keys go into the flag's value.
    return [key for key in named if key.path.count(".") == 1 or (not key.table and not key.is_table)]


def read(key: Key, value: object, place: Place) -> Any:
    """The value of a key as found in a file or (always text) a flag; JobError names the place and what is allowed."""
    if key.kind is str:
        if not isinstance(value, str) or not value.strip():
            raise place.error(value, "expected a text that is not empty.")
        return value
    if key.kind is int:
        return _read_number(key, value, place)
    if key.kind is OnMismatch:
        return _read_policy(value, place)
    if typing.get_origin(key.kind) is Literal:
        return _read_choice(typing.get_args(key.kind), value, place)
    parse, form = {
        Seconds: (durations.parse_duration, durations.DURATION_FORM),
        Spacing: (durations.parse_spacing, durations.SPACING_FORM),
        Interval: (durations.parse_interval, durations.INTERVAL_FORM),
        Bytes: (durations.parse_bytes, durations.BYTES_FORM),
        BytesPerHour: (durations.parse_bytes_per_hour, durations.BYTES_PER_HOUR_FORM),
    }[key.kind]
    if not isinstance(value, str):
        raise place.error(value, f"expected {form}, in quotes.")
    try:
        return parse(value)
    except ValueError as error:
        raise place.error(value, f"{error}.") from None


def as_text(kind: Any, value: Any) -> str:
    """A value of this kind as a person writes it in a flag."""
    in_words = {
        Seconds: duration_in_words,
        Bytes: bytes_in_words,
        BytesPerHour: durations.bytes_per_hour_in_words,
    }
    return in_words.get(kind, str)(value)


def _read_number(key: Key, value: object, place: Place) -> int:
    number = value
    if isinstance(value, str) and not place.file:
        try:
            number = int(value)
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, int) or (key.least is not None and number < key.least):
        least = f", {key.least} or more" if key.least is not None else ""
        why = f" ({key.why_least})" if key.why_least else ""
        raise place.error(value, f"expected a whole number{least}{why}.")
    return number


def _read_choice(choices: tuple[str, ...], value: object, place: Place) -> str:
    if value not in choices:
        near = nearest(value, choices) if isinstance(value, str) else ""
        expected = " or ".join(f'"{choice}"' for choice in choices)
        raise place.error(value, f"expected {expected}." + (f" Did you mean {near}?" if near else ""))
    return str(value)


def _read_policy(value: object, place: Place) -> OnMismatch:
    if not isinstance(value, str | dict):
        raise place.error(value, 'expected "error", "warn", "saved" or "code", or a table of these by item.')
    try:
        return OnMismatch.of(value)
    except ValueError as error:
        raise place.error(value, f"{error}.") from None


def _kind(annotated: Any) -> Any:
    if isinstance(annotated, types.UnionType) or typing.get_origin(annotated) is typing.Union:
        annotated = next(part for part in typing.get_args(annotated) if part is not type(None))
    origin = typing.get_origin(annotated)
    return annotated if origin is Literal else origin or annotated
