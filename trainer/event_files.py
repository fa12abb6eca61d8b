"""TensorBoard's event files in a folder: which are ours, and what a resumed training takes out of them.

A file is a sequence of records: length (uint64), its checksum (uint32), an Event message, its checksum (uint32), little
endian; https://github.com/tensorflow/tensorboard/blob/master/tensorboard/summary/writer/record_writer.py.
"""

import logging
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from trainerd.checkpoint import durable
from trainerd.trainer.metric_rows import set_aside

logger = logging.getLogger(__name__)

MARK = ".trainerd"
_KIND = "tfevents"
_START = 1  # SessionLog.START
_BEFORE_DATA = 12
_AFTER_DATA = 4


def marked(folder: str) -> list[str]:
    """Return the paths of our files in the order in which TensorBoard reads them."""
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if _KIND in name and name.endswith(MARK)]


def newest_second(folder: str) -> int:
    """Return the latest time (seconds since 1970) in the names of our files; 0 without any."""
    seconds = [path.rpartition(f"{_KIND}.")[2].partition(".")[0] for path in marked(folder)]
    return max((int(text) for text in seconds if text.isdecimal()), default=0)


def sync(path: str) -> None:
    """Flush a file and its name to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    durable.sync_folder(os.path.dirname(path))


def cut(folder: str, step: int, written: Mapping[str, int]) -> None:
    """Cut off what was written after a state: from the first record on that `written`, the state's, does not know.

    A record counts as unknown if it has a scalar of a later iteration than the one given for its name, or anything
    else of iteration `step` or later. Torn ends go as well. What is cut off is kept beside the files.
    """
    for path in reversed(marked(folder)):
        began_at = _cut_file(path, step, written)
        # What lies before was cut when that file was begun.
        if began_at is not None and began_at <= step:
            return


def _cut_file(path: str, step: int, written: Mapping[str, int]) -> int | None:
    began_at, end = None, 0
    for following, event in _records(path):
        if event.HasField("session_log") and event.session_log.status == _START:
            began_at = event.step
        elif _is_late(event, step, written):
            break
        end = following
    if end < os.path.getsize(path):
        _cut_off(path, end)
    return began_at


def _is_late(event: Any, step: int, written: Mapping[str, int]) -> bool:
    for value in event.summary.value:
        if value.HasField("simple_value"):
            if value.tag not in written or event.step > written[value.tag]:
                return True
        elif event.step >= step:
            return True
    return False


def _records(path: str) -> Iterator[tuple[int, Any]]:
    """Yield the whole records from the beginning, each with the offset at which it ends."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

    size, end = os.path.getsize(path), 0
    with open(path, "rb") as file:
        while len(head := file.read(_BEFORE_DATA)) == _BEFORE_DATA:
            (length,) = struct.unpack_from("<Q", head)
            end += _BEFORE_DATA + length + _AFTER_DATA
            if end > size:
                return
            try:
                event = Event.FromString(file.read(length))
            except DecodeError:
                return
            yield end, event
            file.seek(_AFTER_DATA, os.SEEK_CUR)


def _cut_off(path: str, end: int) -> None:
    folder, name = os.path.split(path)
    aside = os.path.join(folder, name.replace(_KIND, "superseded"))
    with open(path, "rb+") as file:
        file.seek(end)
        set_aside(aside, file.read())
        file.truncate(end)
        os.fsync(file.fileno())
    logger.info("%s: what an earlier attempt wrote from byte %d on moved to %s", path, end, aside)
