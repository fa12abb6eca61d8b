"""Signs of life, where no kernel knows who owns a run: `terms/alive.json`, written anew every few seconds.

Advisory only. It spares a second daemon the start and its user the wait; which of two daemons owns the run is decided
by the tickets, and no clock of another machine is ever compared with ours.
"""

import contextlib
import datetime
import logging
import os
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import psutil

from trainerd.checkpoint import envelope, layout
from trainerd.checkpoint.errors import CheckpointError, Damaged, FormatTooNew, RunOwned
from trainerd.checkpoint.storage import Storage
from trainerd.checkpoint.terms import next_free_term
from trainerd.checkpoint.versions import WRITTEN_BY

BEAT_SECONDS = 5.0
WATCHED_INTERVALS = 3.25  # a beat may come late, and reading takes time as well
LOOKS_PER_INTERVAL = 4
LAST_WORD_SECONDS = 5.0  # for the word that the owner has ended; a storage that hangs must not keep it from ending

_TAKE_OVER = (
    "If that process is stuck or out of reach, --take-over takes the run from it: what it saves after that does not "
    "count."
)

_logger = logging.getLogger("trainerd.checkpoint")


class SignOfLife(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `alive.json`. `time` and `started` (of the process) in seconds since 1970, UTC: for people only.

    `machine` says where the pid means anything: a boot of a kernel and a namespace of pids, "" if that is unknown;
    `ticks` is the process's start in clock ticks of that boot, which tells it from a later one of the same pid.
    """

    written_by: str
    host: str
    machine: str
    pid: int
    ticks: int
    started: float
    nonce: str
    beat: int
    interval_seconds: float
    time: float
    released: bool

    @property
    def owner(self) -> str:
        """Its process, in words."""
        return f"process {self.pid} on {self.host}"

    def has_died(self) -> bool:
        """Whether its process is certain to be dead; only its own machine can tell."""
        if not self.machine or (self.host, self.machine) != (socket.gethostname(), _machine()):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass  # another user's
        found = _state_and_ticks(self.pid)
        return found is not None and (found[0] in "ZX" or found[1] != self.ticks)


def first_sign(nonce: str, interval_seconds: float) -> SignOfLife:
    """The sign of this process, before its first beat."""
    found = _state_and_ticks(os.getpid())
    return SignOfLife(
        written_by=WRITTEN_BY,
        host=socket.gethostname(),
        machine=_machine() if found else "",
        pid=os.getpid(),
        ticks=found[1] if found else 0,
        started=psutil.Process().create_time(),
        nonce=nonce,
        beat=0,
        interval_seconds=interval_seconds,
        time=time.time(),
        released=False,
    )


def next_term_when_free(storage: Storage, *, take_over: bool, sleep: Callable[[float], object]) -> int:
    """Wait until nobody who lives owns the run, unless it is to be taken; return the number of the next ticket.

    RunOwned when its owner shows signs of life. What `sleep` raises ends the wait.
    """
    while True:
        # Asked before the sign of life: whoever begins a term after that, unseen, must make ours fail.
        next_term = next_free_term(storage)
        seen = _read(storage)
        sign = _parse(storage, seen)
        if _is_free(seen, sign):
            return next_term
        owner = sign.owner if sign else "a process that is not known (terms/alive.json is damaged)"
        if take_over:
            text = "%s: taken from %s, as --take-over asks; what that one saves from now on will not count"
            _logger.warning(text, storage.url, owner)
            return next_term
        interval_seconds = sign.interval_seconds if sign else BEAT_SECONDS
        watched_seconds = WATCHED_INTERVALS * interval_seconds
        text = "%s: %s may own this run: watching for %.0f s whether it is alive"
        _logger.info(text, storage.url, owner, watched_seconds)
        if not _changes(storage, seen, interval_seconds, sleep):
            text = "%s: %s gave no sign of life for %.0f s and is taken for dead; what it may still save will not count"
            _logger.warning(text, storage.url, owner, watched_seconds)
            return next_term
        _refuse_unless_free(storage, sign)


class Pulse:
    """Writes our sign of life at every interval, from a thread of its own, as long as the run is ours.

    `is_ours` is asked before each beat. A beat that fails is told once and tried again: it never ends a training.
    """

    def __init__(self, storage: Storage, sign: SignOfLife, is_ours: Callable[[], bool]) -> None:
        self._storage = storage
        self._sign = sign
        self._is_ours = is_ours
        self._stopping = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._beat_on, name="trainerd-alive", daemon=True)

    def start(self) -> None:
        """Write the first sign, then go on in the thread. StorageUnusable."""
        self._storage.make_folder(layout.TERMS)
        self._write(released=False)
        self._thread.start()

    def stop(self) -> None:
        """Leave word that the owner has ended, unless another one has come, if the storage answers in time."""
        self._stopping.set()
        self._thread.join(LAST_WORD_SECONDS)

    def _beat_on(self) -> None:
        while not self._stopping.wait(self._sign.interval_seconds):
            try:
                if not self._is_ours():
                    return
                self._write(released=False)
                self._failing = False
            except CheckpointError as error:
                if not self._failing:
                    text = "no sign of life was written, so that another daemon may take this one for dead: %s"
                    _logger.warning(text, error)
                self._failing = True
        with contextlib.suppress(CheckpointError):
            if self._is_ours() and self._is_the_last():
                self._write(released=True)

    def _is_the_last(self) -> bool:
        sign = _parse(self._storage, _read(self._storage))
        return sign is not None and sign.nonce == self._sign.nonce

    def _write(self, *, released: bool) -> None:
        beat = self._sign.beat + 1
        self._sign = msgspec.structs.replace(self._sign, beat=beat, time=time.time(), released=released)
        self._storage.replace(layout.ALIVE_FILE, envelope.seal(self._sign))


def _is_free(seen: bytes | None, sign: SignOfLife | None) -> bool:
    # A damaged file may be half of what a living owner is writing, so it is watched like any other.
    return seen is None or (sign is not None and (sign.released or sign.has_died()))


def _changes(storage: Storage, seen: bytes | None, interval_seconds: float, sleep: Callable[[float], object]) -> bool:
    """Whether the file changes while it is watched.

    Looks are counted, not seconds: after a pause of this whole machine an owner on it gets its time to beat as well.
    """
    for _ in range(round(WATCHED_INTERVALS * LOOKS_PER_INTERVAL)):
        sleep(interval_seconds / LOOKS_PER_INTERVAL)
        if _read(storage) != seen:
            return True
    return False


def _refuse_unless_free(storage: Storage, last: SignOfLife | None) -> None:
    seen = _read(storage)
    sign = _parse(storage, seen)
    if not _is_free(seen, sign):
        owner = sign or last
        host, pid, started = (owner.host, owner.pid, _iso(owner.started)) if owner else (None, None, None)
        raise RunOwned(storage.url, host, pid, started, _TAKE_OVER)


def _read(storage: Storage) -> bytes | None:
    try:
        return storage.read(layout.ALIVE_FILE)
    except FileNotFoundError:
        return None


def _parse(storage: Storage, seen: bytes | None) -> SignOfLife | None:
    with contextlib.suppress(Damaged, FormatTooNew):
        return envelope.unseal(seen or b"", SignOfLife, f"{storage.url}/{layout.ALIVE_FILE}")
    return None


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state_and_ticks(pid: int) -> tuple[str, int] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name stands in parentheses and may hold anything, parentheses too.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[19])
