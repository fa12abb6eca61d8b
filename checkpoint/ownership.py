"""Who owns a run: one daemon, from `acquire` to `release`, and the terms it begins.

The tickets decide, for whoever creates a ticket first has that term. A lock of the kernel (local disks) or signs of
life (everywhere else) only keep a second daemon from trying.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Self

from trainerd.checkpoint import envelope, layout
from trainerd.checkpoint.alive import BEAT_SECONDS, Pulse, first_sign, next_term_when_free
from trainerd.checkpoint.errors import Damaged, RunDamaged, TakenOver
from trainerd.checkpoint.life_lock import lock_for_life
from trainerd.checkpoint.manifest import RunRecord
from trainerd.checkpoint.storage import Storage
from trainerd.checkpoint.terms import (
    Ticket,
    heir_of,
    newest_committed_step,
    next_free_term,
    read_run,
    read_ticket,
    read_tickets,
    taken_over,
)
from trainerd.checkpoint.versions import WRITTEN_BY


class RunOwner:
    """One process's ownership of a run.

    `term` is the present one, None before the first. `lost` tells that another daemon has begun a later term, as found
    out by a thread of ours; `on_lost` is called by that thread, once, right after. Then stop at once, without saving.
    """

    def __init__(self, storage: Storage, next_term: int) -> None:
        self.term: int | None = None
        self.lost: TakenOver | None = None
        self.on_lost: Callable[[], object] | None = None
        self._storage = storage
        # Fixed now: whoever comes first to this number has the run, whatever either of us does until then.
        self._next_term = next_term
        self._nonce = secrets.token_hex(16)
        self._let_go: Callable[[], object] = lambda: None

    @classmethod
    def acquire(
        cls,
        storage: Storage,
        *,
        take_over: bool = False,
        to_repair: bool = False,
        beat_seconds: float = BEAT_SECONDS,
        sleep: Callable[[float], object] = time.sleep,
    ) -> Self:
        """Own the run, making its folder if need be. RunOwned, StorageUnusable, FormatTooNew, RunDamaged.

        On a local disk at once or not at all. Elsewhere a former owner that has not said that it ended is watched for
        some seconds (`sleep` waits, and what it raises ends the wait); `take_over` takes the run from it unwatched.
        A damaged run is owned only `to_repair` it.
        """
        if not to_repair:
            read_run(storage)
        if storage.guarantees.life_lock:
            return cls._lock(storage, take_over)
        next_term = next_term_when_free(storage, take_over=take_over, sleep=sleep)
        from trainerd.checkpoint.probe import probed

        owner = cls(probed(storage), next_term)
        pulse = Pulse(storage, first_sign(owner._nonce, beat_seconds), owner._look)
        owner._let_go = pulse.stop
        storage.make_folder("")
        pulse.start()
        return owner

    @classmethod
    def _lock(cls, storage: Storage, take_over: bool) -> Self:
        storage.make_folder("")
        root: str = storage.root  # type: ignore[attr-defined] # only a local disk has a lock for life
        lock = lock_for_life(storage.url, root, take_over=take_over)
        try:
            owner = cls(storage, next_free_term(storage))
        except BaseException:
            lock.release()
            raise
        owner._let_go = lock.release
        return owner

    def ensure_term(self, resumed_from: int) -> int:
        """The term in which training may go on from a step: the present one, or a new one after every step back.

        Writes `run.json` and the ticket when a new term begins. TakenOver if another daemon began one first.
        """
        tickets = read_tickets(self._storage)
        for ticket in tickets:
            if ticket.term >= self._next_term and ticket.nonce != self._nonce:
                raise self._lose(ticket)
        newest = newest_committed_step(self._storage, tickets)
        if self.term is None or (newest is not None and newest > resumed_from):
            self._begin_term(resumed_from)
        assert self.term is not None
        return self.term

    def release(self) -> None:
        """Give the run up."""
        self._let_go()

    def _begin_term(self, resumed_from: int) -> None:
        _ensure_run_record(self._storage)
        # Together with the first ticket: from then on a missing folder means that a disk is not there.
        self._storage.make_folder(layout.CHECKPOINTS)
        self._storage.make_folder(layout.TERMS)
        while not self._has_term(resumed_from):
            self._next_term += 1
        self.term = self._next_term
        self._next_term += 1

    def _has_term(self, resumed_from: int) -> bool:
        """Create the next ticket; false if an earlier try of ours made it after all, for another step."""
        ticket = Ticket(
            written_by=WRITTEN_BY,
            term=self._next_term,
            resumed_from=resumed_from,
            host=socket.gethostname(),
            pid=os.getpid(),
            nonce=self._nonce,
            time=time.time(),
        )
        try:
            self._storage.create(layout.ticket_file(ticket.term), envelope.seal(ticket))
        except FileExistsError:
            there = read_ticket(self._storage, ticket.term)
            if there.nonce != self._nonce:
                raise self._lose(there) from None
            return there.resumed_from == resumed_from
        return True

    def _look(self) -> bool:
        """Whether no other daemon has begun a later term."""
        ticket = heir_of(self._storage, self._next_term - 1)
        if ticket is not None and ticket.nonce != self._nonce and self.lost is None:
            self._lose(ticket)
            if self.on_lost is not None:
                self.on_lost()
        return self.lost is None

    def _lose(self, ticket: Ticket) -> TakenOver:
        self.lost = taken_over(self._storage, ticket)
        return self.lost


def _ensure_run_record(storage: Storage) -> None:
    if read_run(storage) is None:
        record = RunRecord(written_by=WRITTEN_BY, run=secrets.token_hex(8), time=time.time())
        try:
            storage.create(layout.RUN_FILE, envelope.seal(record))
        except FileExistsError:
            if read_run(storage) is None:
                raise RunDamaged(Damaged(f"{storage.url}/{layout.RUN_FILE}", "it is no file")) from None
