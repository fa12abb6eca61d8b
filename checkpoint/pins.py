"""What persons want kept, whatever the rules say: one record for each checkpoint, which anybody may add or remove."""

import contextlib
import time

import msgspec

from trainerd.checkpoint import envelope, layout
from trainerd.checkpoint.errors import Damaged, FormatTooNew, NoCheckpoint
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.storage import Storage
from trainerd.checkpoint.versions import WRITTEN_BY


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """The record that somebody pinned a checkpoint. `time` in seconds since 1970, UTC."""

    written_by: str
    step: int
    term: int
    note: str
    time: float


def pin(storage: Storage, name: CheckpointName, note: str = "") -> Pin:
    """Keep a committed checkpoint until `unpin`; return its pin, which is the older one if it had one already.

    NoCheckpoint if it has just been deleted.
    """
    record = Pin(written_by=WRITTEN_BY, step=name.step, term=name.term, note=note, time=time.time())
    path = layout.pin_file(name)
    storage.make_folder(layout.PINS)
    try:
        storage.create(path, envelope.seal(record))
    except FileExistsError:
        there = _read(storage, name)
        if there is not None:
            return there
        storage.replace(path, envelope.seal(record))
    # Only now: whoever prunes looks for pins after this look as well, so one of the two sees the other.
    if storage.size(name.manifest) is None:
        storage.delete(path)
        raise NoCheckpoint(f"{storage.url} has no checkpoint of step {name.step} any more: it was pruned just now.")
    return record


def unpin(storage: Storage, step: int) -> list[CheckpointName]:
    """Remove the pins of a step; return which checkpoints they were of. NoCheckpoint if it has none."""
    pinned = pinned_names(storage)
    names = [name for name in pinned if name.step == step]
    if not names:
        have = f"Pinned are the steps {', '.join(str(name.step) for name in pinned)}" if pinned else "Nothing is"
        raise NoCheckpoint(
            f"{storage.url}: no one has pinned step {step}. {have}. (What a hook of the trainer pins, such as "
            f"BestCheckpointer, it releases by itself.)"
        )
    for name in names:
        storage.delete(layout.pin_file(name))
    return names


def pinned_names(storage: Storage) -> list[CheckpointName]:
    """The checkpoints that somebody pinned, oldest first, judged by names alone: a damaged record pins as well."""
    return sorted(filter(None, map(layout.parse_pin, storage.names(layout.PINS))))


def is_pinned(storage: Storage, name: CheckpointName) -> bool:
    """Whether somebody has pinned a checkpoint, by now."""
    return storage.size(layout.pin_file(name)) is not None


def read_pins(storage: Storage) -> dict[CheckpointName, str]:
    """Each pin in words: its note, or that its record is damaged."""
    return {name: _in_words(_read(storage, name)) for name in pinned_names(storage)}


def _in_words(record: Pin | None) -> str:
    if record is None:
        return "pinned by hand (its record is damaged)"
    return f"pinned by hand: {record.note}" if record.note else "pinned by hand"


def _read(storage: Storage, name: CheckpointName) -> Pin | None:
    """A pin's record; None if it is not what was written, or not yet there."""
    path = layout.pin_file(name)
    with contextlib.suppress(FileNotFoundError, Damaged, FormatTooNew):
        return envelope.unseal(storage.read(path), Pin, f"{storage.url}/{path}")
    return None
