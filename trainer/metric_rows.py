"""The lines of a metrics file: which of them a resumed training keeps."""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from trainerd.checkpoint import durable

logger = logging.getLogger(__name__)

Row = dict[str, Any]
SUPERSEDED = ".superseded"


def row(iteration: int, scalars: Mapping[str, float]) -> Row:
    """Return what a line says: the iteration first, whatever the scalars are called."""
    return {"iteration": iteration, **{name: value for name, value in scalars.items() if name != "iteration"}}


def newest(rows: Iterable[Row]) -> dict[str, int]:
    """Return by name the latest iteration that has a value."""
    found: dict[str, int] = {}
    for each in rows:
        for name in _names(each):
            found[name] = max(found.get(name, each["iteration"]), each["iteration"])
    return found


def cut(path: str, step: int, written: Mapping[str, int] | None) -> list[Row]:
    """Move rows that were written too late, and a torn last line, to `<path>.superseded`; return the rows that stay.

    Too late is what `written` does not know: a row with a value of a later iteration than the one given for its name.
    Without `written` it is every row from iteration `step` on. Whole or not at all, and durable; a crash in between
    leaves rows in both files, so that the next call moves them once more.
    """
    if not os.path.isfile(path):
        return []
    with open(path, "rb") as file:
        *lines, last = file.read().split(b"\n")
    kept, rows, late = [], [], []
    for line in lines if not last else [*lines, last]:
        parsed = _parsed(line)
        if parsed is not None and not _is_late(parsed, step, written):
            rows.append(parsed)
            kept.append(line)
        elif parsed is not None or line is last:
            late.append(line)
        else:
            kept.append(line)
    if late:
        set_aside(path + SUPERSEDED, _joined(late))
        logger.info("%s: %d lines of an earlier attempt moved to %s", path, len(late), path + SUPERSEDED)
    if late or last:
        durable.replace(path, _joined(kept))
    return rows


def set_aside(path: str, data: bytes) -> None:
    """Append to a file, durably."""
    with open(path, "ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    durable.sync_folder(os.path.dirname(path) or ".")


def _joined(lines: Iterable[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _parsed(line: bytes) -> Row | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and type(value.get("iteration")) is int else None


def _names(row: Row) -> list[str]:
    return [name for name in row if name != "iteration"]


def _is_late(row: Row, step: int, written: Mapping[str, int] | None) -> bool:
    if written is None:
        return bool(row["iteration"] >= step)
    return any(name not in written or row["iteration"] > written[name] for name in _names(row))
