"""Ownership kept by the kernel: a lock on a file of the run, freed by its holder's death, however it dies."""

import datetime
import os
import socket

import filelock
import msgspec
import psutil

from trainerd.checkpoint import layout
from trainerd.checkpoint.errors import RunOwned, StorageUnusable

_LIVING = (
    "On a local disk --take-over cannot take a run from a living process: end that one first; after `kill -KILL` the "
    "next daemon starts at once, and nothing that was saved is lost."
)


class Holder(msgspec.Struct, frozen=True):
    """Who holds the lock, as a second daemon is told."""

    host: str
    pid: int
    started: str


def lock_for_life(url: str, root: str, *, take_over: bool) -> filelock.BaseFileLock:
    """Lock the run in the folder `root`, which is there. RunOwned names the holder, at once; StorageUnusable."""
    path = os.path.join(root, layout.LOCK_FILE)
    lock = filelock.FileLock(path, timeout=0, thread_local=False)
    try:
        holder = _read_holder(path)
        lock.acquire()
        _write_holder(path)
    except filelock.Timeout:
        # Older releases of filelock empty the file when they try, so the holder was read before.
        holder = _read_holder(path) or holder
        host, pid, started = (holder.host, holder.pid, holder.started) if holder else (None, None, None)
        raise RunOwned(url, host, pid, started, _LIVING if take_over else "") from None
    except OSError as error:
        raise StorageUnusable("lock", path, error) from error
    return lock


def _write_holder(path: str) -> None:
    """Advisory, for the message to a second daemon only; the lock itself is what holds."""
    started = datetime.datetime.fromtimestamp(psutil.Process().create_time(), datetime.UTC)
    holder = Holder(socket.gethostname(), os.getpid(), started.isoformat(timespec="seconds"))
    with open(path, "r+b") as file:
        file.truncate()
        file.write(msgspec.json.encode(holder))


def _read_holder(path: str) -> Holder | None:
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(4096), type=Holder)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
