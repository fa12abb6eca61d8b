"""Bring a run into order: adopt what is proven whole, move the rest aside, delete nothing.

A plan is made first, by looking at every byte; each step of it can be done again after a crash in its midst.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from trainerd.checkpoint import envelope, layout, pins
from trainerd.checkpoint.chunk_reader import file_path
from trainerd.checkpoint.errors import CheckpointError, Damaged, FormatTooNew, NotCommitted, RunDamaged
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.manifest import ManifestHead, RunRecord, parse_head, parse_manifest
from trainerd.checkpoint.reader import manifest_bytes
from trainerd.checkpoint.storage import Storage
from trainerd.checkpoint.terms import (
    CommitMark,
    Ticket,
    counts,
    named,
    read_run,
    read_ticket,
    read_tickets,
    ticket_terms,
)
from trainerd.checkpoint.verifying import Verifier
from trainerd.checkpoint.versions import WRITTEN_BY


class CannotRepair(CheckpointError):
    """Something is damaged that only a person can put right; nothing was changed."""


@dataclass(frozen=True)
class Step:
    """One thing to put right: what is done to what, why, and how."""

    action: str
    what: str
    why: str
    do: Callable[[Storage], None]


def plan_records(storage: Storage, *, resumed_from: Mapping[int, int] | None = None) -> list[Step]:
    """What has to be done to the small records on which all checkpoints depend; it comes before these are looked at.

    `resumed_from` gives, for the term of a damaged ticket, the step that it resumed from: nothing else can tell.
    CannotRepair if a person has to decide. Nothing is changed yet.
    """
    aside = _aside()
    return [
        *_run_record(storage, aside),
        *_tickets(storage, aside, resumed_from or {}),
        *_marks(storage, aside),
        *_pins(storage, aside),
    ]


def plan_checkpoints(storage: Storage, progress: Callable[[int], None] | None = None) -> list[Step]:
    """What has to be done to checkpoints; every byte is read for it, nothing is changed yet. RunDamaged.

    `progress` is told the bytes of each part that was read.
    """
    return list(_checkpoints(storage, _aside(), progress))


def _aside() -> str:
    return f"{layout.ASIDE}/{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"


def _run_record(storage: Storage, aside: str) -> Iterator[Step]:
    try:
        read_run(storage)
    except RunDamaged as damage:
        ids = Counter(head.run for name in named(storage) if (head := _head(storage, name)) is not None)
        if len(ids) != 1:
            found = ", ".join(f"{run} ({count})" for run, count in ids.items()) or "there is none"
            raise CannotRepair(
                f"{damage} Its id would be that of the manifests, but they do not tell one: {found}. Bring the file "
                f"back from a copy."
            ) from None
        record = RunRecord(written_by=WRITTEN_BY, run=next(iter(ids)), time=time.time())
        yield _rewritten(layout.RUN_FILE, record, aside, "rebuilt from the id that all manifests carry")


def _tickets(storage: Storage, aside: str, resumed_from: Mapping[int, int]) -> Iterator[Step]:
    for term in ticket_terms(storage):
        try:
            read_ticket(storage, term)
        except RunDamaged as damage:
            if term not in resumed_from:
                raise CannotRepair(
                    f"{damage} Nothing but the ticket tells from which step term {term} resumed, and with it which "
                    f"checkpoints count. If you know it, say so: --resumed-from {term}=STEP (the log of that start has "
                    f"the line `resumed from step STEP`, or `starting from step 0`)."
                ) from None
            ticket = Ticket(
                written_by=WRITTEN_BY,
                term=term,
                resumed_from=resumed_from[term],
                host="",
                pid=0,
                nonce="repaired",
                time=time.time(),
            )
            why = f"written anew: resumed from step {resumed_from[term]}, as you say"
            yield _rewritten(layout.ticket_file(term), ticket, aside, why)


def _marks(storage: Storage, aside: str) -> Iterator[Step]:
    for name in storage.names(layout.TERMS):
        term = layout.parse_commit_mark(name)
        path = f"{layout.TERMS}/{name}"
        if term is not None and _is_damaged(storage, path, CommitMark):
            # That there is one says what it has to say: something was once committed. Its step is for people.
            step = max((name.step for name in named(storage) if name.term == term), default=0)
            mark = CommitMark(written_by=WRITTEN_BY, term=term, step=step, time=time.time())
            yield _rewritten(path, mark, aside, "rebuilt from its name")


def _pins(storage: Storage, aside: str) -> Iterator[Step]:
    for name in pins.pinned_names(storage):
        path = layout.pin_file(name)
        if _is_damaged(storage, path, pins.Pin):
            note = "its note was lost by damage"
            record = pins.Pin(written_by=WRITTEN_BY, step=name.step, term=name.term, note=note, time=time.time())
            yield _rewritten(path, record, aside, "rebuilt from its name")


def _checkpoints(storage: Storage, aside: str, progress: Callable[[int], None] | None) -> Iterator[Step]:
    verifier = Verifier(storage, progress)
    broken: dict[CheckpointName, str] = {}
    needed: set[str] = set()
    for name in named(storage):
        try:
            manifest = verifier.verify(name)
        except FormatTooNew:
            continue  # only a newer version can judge it
        except Damaged as damage:
            if (adoption := _adoption(storage, name, aside, verifier, needed)) is not None:
                yield adoption
            elif not isinstance(damage, NotCommitted):  # debris is left to the next prune
                broken[name] = damage.reason
        else:
            needed |= {file_path(name, file) for file in manifest.files}
    for name, reason in broken.items():
        yield Step("moved aside", str(name), reason, _put_aside(name, aside, needed))


def _adoption(storage: Storage, name: CheckpointName, aside: str, verifier: Verifier, needed: set[str]) -> Step | None:
    """Commit what a save had written whole when it died before the commit: its manifest has a temporary name yet."""
    tickets = read_tickets(storage)
    if name.term not in {ticket.term for ticket in tickets} or not counts(name, tickets):
        return None
    for file in storage.names(name.folder):
        if not (file.startswith(layout.MANIFEST) and file.endswith(layout.TEMPORARY_SUFFIX)):
            continue
        data = storage.read(f"{name.folder}/{file}")
        try:
            manifest = parse_manifest(data, name)
            verifier.verify_data(manifest)
        except (Damaged, FormatTooNew):
            continue
        needed |= {file_path(name, file) for file in manifest.files}
        return Step("adopted", str(name), "all of it is whole but the commit", _commit(name, data, aside))
    return None


def _commit(name: CheckpointName, data: bytes, aside: str) -> Callable[[Storage], None]:
    def commit(storage: Storage) -> None:
        if storage.size(name.manifest) is not None:
            _move(storage, name.manifest, f"{aside}/{name.manifest}")
        storage.create(name.manifest, data)

    return commit


def _put_aside(name: CheckpointName, aside: str, needed: set[str]) -> Callable[[Storage], None]:
    """Move a checkpoint's files away, but for those that whole checkpoints refer to."""

    def put_aside(storage: Storage) -> None:
        # The manifest last: without it, what is left after a crash would pass for debris and be swept.
        for file in sorted(storage.names(name.folder), key=lambda file: file == layout.MANIFEST):
            path = f"{name.folder}/{file}"
            if path not in needed:
                _move(storage, path, f"{aside}/{path}")
        if not storage.names(name.folder):
            storage.delete_folder(name.folder)

    return put_aside


def _rewritten(path: str, record: object, aside: str, why: str) -> Step:
    def rewrite(storage: Storage) -> None:
        data = storage.read(path)
        storage.make_folder(f"{aside}/{path}".rpartition("/")[0])
        storage.create(f"{aside}/{path}", data)
        # In place: without it for a moment, the run would look as if it had never been.
        storage.replace(path, envelope.seal(record))

    return Step("rebuilt", path, f"{why}; the damaged one is kept in {aside}", rewrite)


def _move(storage: Storage, path: str, to: str) -> None:
    storage.make_folder(to.rpartition("/")[0])
    storage.move(path, to)


def _is_damaged(storage: Storage, path: str, kind: type) -> bool:
    try:
        envelope.unseal(storage.read(path), kind, path)
    except Damaged:
        return True
    except (FileNotFoundError, FormatTooNew):
        return False
    return False


def _head(storage: Storage, name: CheckpointName) -> ManifestHead | None:
    try:
        return parse_head(manifest_bytes(storage, name), name)
    except (Damaged, FormatTooNew):
        return None
