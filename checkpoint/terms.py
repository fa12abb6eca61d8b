"""Who owns a run, and which checkpoints the owners' history lets count.

Lineage rule: a checkpoint of step s and term t counts only if s <= `resumed_from` of every later ticket. So what a
half-dead former owner still writes after a take-over never counts; no clock and no lock service take part.
"""

import contextlib
import datetime
import errno
import os
import secrets
import socket
import time
from collections.abc import Iterable

import filelock
import msgspec
import psutil

from trainerd.checkpoint import envelope, layout
from trainerd.checkpoint.envelope import Body
from trainerd.checkpoint.errors import Damaged, RunDamaged, RunOwned, StorageUnusable
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.manifest import Count, Label, RunRecord, Seconds
from trainerd.checkpoint.storage import Storage
from trainerd.checkpoint.versions import WRITTEN_BY

_RECORD_BYTES = 2**20


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The record by which a daemon begins its term; written once, never changed. `time` in seconds since 1970, UTC."""

    written_by: Label
    term: Count
    resumed_from: Count
    host: Label
    pid: Count
    nonce: str
    time: Seconds


class CommitMark(msgspec.Struct, frozen=True, kw_only=True):
    """The record that a checkpoint was once committed in a term: an emptied folder is then no fresh start."""

    written_by: Label
    term: Count
    step: Count
    time: Seconds


class Holder(msgspec.Struct, frozen=True):
    """Who holds the lock, as a second daemon is told."""

    host: str
    pid: int
    started: str


def read_tickets(storage: Storage, known: Iterable[Ticket] = ()) -> list[Ticket]:
    """All tickets of a run, by term. RunDamaged if one is not what was written: without it the lineage is unknown.

    They never change, so those that are `known` are not read again.
    """
    by_term = {ticket.term: ticket for ticket in known}
    return [by_term.get(term) or _read_ticket(storage, term) for term in _ticket_terms(storage)]


def newest_term(storage: Storage) -> int:
    """The newest ticket's term; 0 before the first."""
    return max(_ticket_terms(storage), default=0)


def _ticket_terms(storage: Storage) -> list[int]:
    return sorted(term for name in storage.names(layout.TERMS) if (term := layout.parse_ticket(name)) is not None)


def _read_ticket(storage: Storage, term: int) -> Ticket:
    path = layout.ticket_file(term)
    try:
        ticket = _read_record(storage, path, Ticket)
    except FileNotFoundError:
        raise RunDamaged(Damaged(f"{storage.url}/{path}", "it is listed, but cannot be read")) from None
    if ticket.term != term:
        raise RunDamaged(Damaged(f"{storage.url}/{path}", f"it is the ticket of term {ticket.term}"))
    return ticket


def _read_record(storage: Storage, path: str, body_type: type[Body]) -> Body:
    """A small sealed file on which the run depends. FileNotFoundError if it is not there."""
    size = storage.size(path)
    if size is None:
        raise FileNotFoundError(path)
    if size > _RECORD_BYTES:
        raise RunDamaged(Damaged(f"{storage.url}/{path}", f"it has {size} bytes, and none is written with that many"))
    try:
        return envelope.unseal(storage.read(path), body_type, f"{storage.url}/{path}")
    except Damaged as damage:
        raise RunDamaged(damage) from None


def counts(name: CheckpointName, tickets: Iterable[Ticket]) -> bool:
    """Whether a checkpoint is on the lineage."""
    return all(name.step <= ticket.resumed_from for ticket in tickets if ticket.term > name.term)


def mark_commit(storage: Storage, name: CheckpointName) -> None:
    """Record durably that a term has committed a checkpoint; once for each term."""
    path = layout.commit_mark(name.term)
    if storage.size(path) is None:
        mark = CommitMark(written_by=WRITTEN_BY, term=name.term, step=name.step, time=time.time())
        with contextlib.suppress(FileExistsError):
            storage.create(path, envelope.seal(mark))


def committed_once(storage: Storage) -> str:
    """Say what was once committed on the present lineage, whether it can still be seen or not; "" if nothing was."""
    tickets = read_tickets(storage)
    if not tickets:
        return ""
    newest = tickets[-1]
    if newest.resumed_from:
        return f"Term {newest.term} resumed from step {newest.resumed_from}"
    try:
        mark = _read_record(storage, layout.commit_mark(newest.term), CommitMark)
    except FileNotFoundError:
        return ""
    return f"Term {newest.term} committed step {mark.step}"


def committed(storage: Storage) -> list[CheckpointName]:
    """Checkpoints that have a manifest, valid or not, on the lineage or off it; oldest first."""
    return [name for name in named(storage) if storage.size(name.manifest) is not None]


def named(storage: Storage) -> list[CheckpointName]:
    """Folders that have a checkpoint's name, committed or not; oldest first. StorageUnusable if a run lacks theirs."""
    if not storage.is_folder(layout.CHECKPOINTS) and storage.names(layout.TERMS):
        # It was made before the first ticket, so it is not empty but away.
        number = errno.ENOTDIR if storage.size(layout.CHECKPOINTS) is not None else errno.ENOENT
        raise StorageUnusable("list", f"{storage.url}/{layout.CHECKPOINTS}", OSError(number, "no folder"))
    return sorted(filter(None, map(layout.parse_checkpoint, storage.names(layout.CHECKPOINTS))))


def read_run(storage: Storage) -> RunRecord | None:
    """The run's own record; None before its first term. FormatTooNew or RunDamaged if it cannot be used."""
    try:
        return _read_record(storage, layout.RUN_FILE, RunRecord)
    except FileNotFoundError:
        return None


class RunOwner:
    """One daemon's ownership of a run: the lock for life, and the terms it begins."""

    def __init__(self, storage: Storage, lock: filelock.BaseFileLock) -> None:
        self._storage = storage
        self._lock = lock
        self.term: int | None = None

    @classmethod
    def acquire(cls, storage: Storage) -> "RunOwner":
        """Lock the run, making its folder if need be. RunOwned, StorageUnusable, FormatTooNew, RunDamaged."""
        read_run(storage)
        storage.make_folder("")
        path = os.path.join(storage.root, layout.LOCK_FILE)  # type: ignore[attr-defined] # a local storage
        lock = filelock.FileLock(path, timeout=0, thread_local=False)
        try:
            holder = _read_holder(path)
            lock.acquire()
            _write_holder(path)
        except filelock.Timeout:
            # Older releases of filelock empty the file when they try, so the holder was read before.
            holder = _read_holder(path) or holder
            raise RunOwned(storage.url, *(msgspec.structs.astuple(holder) if holder else (None, None, None))) from None
        except OSError as error:
            raise StorageUnusable("lock", path, error) from error
        return cls(storage, lock)

    def ensure_term(self, resumed_from: int) -> int:
        """The term in which training may go on from a step: the present one, or a new one after every step back.

        Writes `run.json` and the ticket when a new term begins. RunOwned if another daemon began it first.
        """
        tickets = read_tickets(self._storage)
        newest = _newest_committed_step(self._storage, tickets)
        if self.term is None or (newest is not None and newest > resumed_from):
            self.term = _begin_term(self._storage, tickets, resumed_from)
        return self.term

    def release(self) -> None:
        """Give the lock up."""
        self._lock.release()


def _newest_committed_step(storage: Storage, tickets: list[Ticket]) -> int | None:
    """Of the checkpoints on the lineage, valid or not; newest first, so that the older ones are not looked at."""
    on_lineage = (name for name in reversed(named(storage)) if counts(name, tickets))
    return next((name.step for name in on_lineage if storage.size(name.manifest) is not None), None)


def _begin_term(storage: Storage, tickets: list[Ticket], resumed_from: int) -> int:
    _ensure_run_record(storage)
    # Together with the first ticket: from then on a missing folder means that a disk is not there.
    storage.make_folder(layout.CHECKPOINTS)
    storage.make_folder(layout.TERMS)
    # Not only above the tickets: should these be lost, a name that was given out must not be given out again.
    taken = [name.term for name in named(storage)]
    term = max([ticket.term for ticket in tickets] + taken, default=0) + 1
    ticket = Ticket(
        written_by=WRITTEN_BY,
        term=term,
        resumed_from=resumed_from,
        host=socket.gethostname(),
        pid=os.getpid(),
        nonce=secrets.token_hex(16),
        time=time.time(),
    )
    try:
        storage.create(layout.ticket_file(term), envelope.seal(ticket))
    except FileExistsError:
        # A storage that retried a lost answer reports its own success as a conflict: the nonce tells.
        winner = _read_ticket(storage, term)
        if winner.nonce != ticket.nonce:
            started = datetime.datetime.fromtimestamp(winner.time, datetime.UTC).isoformat(timespec="seconds")
            raise RunOwned(storage.url, winner.host, winner.pid, started) from None
    return term


def _ensure_run_record(storage: Storage) -> None:
    if read_run(storage) is None:
        record = RunRecord(written_by=WRITTEN_BY, run=secrets.token_hex(8), time=time.time())
        try:
            storage.create(layout.RUN_FILE, envelope.seal(record))
        except FileExistsError:
            if read_run(storage) is None:
                raise RunDamaged(Damaged(f"{storage.url}/{layout.RUN_FILE}", "it is no file")) from None


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
