"""The terms of a run, and which checkpoints their history lets count.

Lineage rule: a checkpoint of step s and term t counts only if s <= `resumed_from` of every later ticket. So what a
half-dead former owner still writes after a take-over never counts; no clock and no lock service take part.
"""

import contextlib
import errno
import time
from collections.abc import Iterable

import msgspec

from trainerd.checkpoint import envelope, layout
from trainerd.checkpoint.envelope import Body
from trainerd.checkpoint.errors import Damaged, RunDamaged, StorageUnusable, TakenOver
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


def read_tickets(storage: Storage, known: Iterable[Ticket] = ()) -> list[Ticket]:
    """All tickets of a run, by term. RunDamaged if one is not what was written: without it the lineage is unknown.

    They never change, so those that are `known` are not read again.
    """
    by_term = {ticket.term: ticket for ticket in known}
    return [by_term.get(term) or read_ticket(storage, term) for term in ticket_terms(storage)]


def newest_term(storage: Storage) -> int:
    """The newest ticket's term; 0 before the first."""
    return max(ticket_terms(storage), default=0)


def ticket_terms(storage: Storage) -> list[int]:
    """The terms that have a ticket, whole or not; oldest first."""
    return sorted(term for name in storage.names(layout.TERMS) if (term := layout.parse_ticket(name)) is not None)


def read_ticket(storage: Storage, term: int) -> Ticket:
    """The ticket of a term that has one; RunDamaged."""
    path = layout.ticket_file(term)
    try:
        ticket = _read_record(storage, path, Ticket)
    except FileNotFoundError:
        raise RunDamaged(Damaged(f"{storage.url}/{path}", "it is listed, but cannot be read")) from None
    if ticket.term != term:
        raise RunDamaged(Damaged(f"{storage.url}/{path}", f"it is the ticket of term {ticket.term}"))
    return ticket


def next_free_term(storage: Storage) -> int:
    """The number of the next ticket."""
    # Not only above the tickets: should these be lost, a name that was given out must not be given out again.
    return max([newest_term(storage), *(name.term for name in named(storage))]) + 1


def heir_of(storage: Storage, term: int) -> Ticket | None:
    """The ticket that followed a term, for whoever trains in that one; None as long as there is none."""
    return read_ticket(storage, term + 1) if storage.size(layout.ticket_file(term + 1)) is not None else None


def check_not_taken_over(storage: Storage, term: int) -> None:
    """Raise TakenOver if a later term has begun. Between this and what follows one may begin: the lineage decides."""
    if not storage.guarantees.life_lock and (heir := heir_of(storage, term)) is not None:
        raise taken_over(storage, heir)


def taken_over(storage: Storage, heir: Ticket) -> TakenOver:
    """The error that names the new owner."""
    return TakenOver(storage.url, heir.host, heir.pid, heir.time, heir.term, heir.resumed_from)


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


def newest_committed_step(storage: Storage, tickets: Iterable[Ticket]) -> int | None:
    """Of the checkpoints on the lineage, valid or not; newest first, so that the older ones are not looked at."""
    tickets = list(tickets)
    on_lineage = (name for name in reversed(named(storage)) if counts(name, tickets))
    return next((name.step for name in on_lineage if storage.size(name.manifest) is not None), None)


def named(storage: Storage) -> list[CheckpointName]:
    """Folders that have a checkpoint's name, committed or not; oldest first. StorageUnusable if a run lacks theirs."""
    if not storage.is_folder(layout.CHECKPOINTS) and ticket_terms(storage):
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
