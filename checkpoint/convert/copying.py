"""Copy a run to another place: every byte hashed while it is read, every checkpoint committed last of all its files.

The order makes what lies at the destination at any instant a true, if shorter, account of the run: what says that
something was committed before the tickets, tickets in their order, the run's own record when they are there, and
checkpoints after the lineage that says which of them count.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from trainerd.checkpoint import layout, reader, terms
from trainerd.checkpoint.convert.errors import NotConverted
from trainerd.checkpoint.convert.places import foreign_names
from trainerd.checkpoint.convert.streams import StoredBuffer
from trainerd.checkpoint.errors import Damaged, NoCheckpoint
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.manifest import Manifest, RunRecord
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.pins import pinned_names
from trainerd.checkpoint.storage import Storage
from trainerd.checkpoint.writer import write_checkpoint

Fate = Literal["copied", "there already", "damaged", "gone"]


@dataclass(frozen=True)
class Copied:
    """What became of a checkpoint: `gone` if it was pruned meanwhile; `reason` says what is damaged, and where."""

    step: int
    term: int
    fate: Fate
    bytes: int = 0
    reason: str = ""


def copy_run(
    source: Storage,
    destination: Storage,
    *,
    step: int | None = None,
    progress: Callable[[int, int, int], None] = lambda _step, _done, _size: None,
) -> list[Copied]:
    """Copy every valid checkpoint of a run, or that of one step, newest first, with the run's record and its terms.

    What is at the destination already is left as it is, so an interrupted copy goes on when it is started again, and a
    later one adds what is new; nothing is deleted there but what an interrupted copy left. `progress` is told the
    step, its bytes done and its bytes in all. NotConverted if the destination holds another run, or this one trained
    on; RunOwned if a daemon owns it; NoCheckpoint, RunDamaged, StorageUnusable.
    """
    run = terms.read_run(source)
    if run is None:
        raise NoCheckpoint(f"There is no run at {source.url}, so there is nothing to copy.")
    names = _wanted(source, step)
    _refuse_other(destination, run)
    with _owned(destination):
        _copy_history(source, destination)
        copied = [_copy_checkpoint(source, destination, name, progress) for name in names]
        _copy_pins(source, destination, names)
        return copied


def _wanted(source: Storage, step: int | None) -> list[CheckpointName]:
    if step is not None:
        return [reader.read_step(source, step).name]
    names = [name for name in reader.candidates(source) if source.size(name.manifest) is not None]
    if not names:
        raise NoCheckpoint(f"{source.url} holds no checkpoint that counts, so there is nothing to copy.")
    return names


def _refuse_other(destination: Storage, run: RunRecord) -> None:
    there = terms.read_run(destination)
    if there is not None and there.run != run.run:
        raise NotConverted(
            f"{destination.url} holds another run ({there.run}): name an empty place. Nothing was copied."
        )
    if there is None and (foreign := foreign_names(destination)):
        raise NotConverted(f"{destination.url} holds other files ({foreign}): name an empty place.")


@contextmanager
def _owned(destination: Storage) -> Iterator[None]:
    """Keep daemons away while the copy lasts."""
    owner = RunOwner.acquire(destination)
    try:
        yield
    finally:
        owner.release()


def _copy_history(source: Storage, destination: Storage) -> None:
    tickets = [layout.ticket_file(ticket.term) for ticket in terms.read_tickets(source)]
    known = {layout.ticket_file(ticket.term) for ticket in terms.read_tickets(destination)}
    if not known <= set(tickets):
        raise NotConverted(
            f"{destination.url} was trained on by itself: it has {max(known - set(tickets))}, which {source.url} has "
            f"not. Nothing was copied; name an empty place."
        )
    destination.make_folder(layout.CHECKPOINTS)
    destination.make_folder(layout.TERMS)
    marks = [
        f"{layout.TERMS}/{name}" for name in source.names(layout.TERMS) if layout.parse_commit_mark(name) is not None
    ]
    # Marks first: a destination that has the newest ticket alone would pass for a run that never saved anything.
    # Tickets in their order: a later one without an earlier one would let superseded checkpoints count again.
    for path in [*marks, *tickets, layout.RUN_FILE]:
        _copy_record(source, destination, path, compared=path not in marks)


def _copy_record(source: Storage, destination: Storage, path: str, *, compared: bool) -> None:
    data = source.read(path)
    try:
        destination.create(path, data)
    except FileExistsError:
        if compared and destination.read(path) != data:
            raise NotConverted(
                f"{destination.url}/{path} is not that of {source.url}: the two went different ways. Nothing of it was "
                f"changed; name an empty place."
            ) from None


def _copy_checkpoint(
    source: Storage,
    destination: Storage,
    name: CheckpointName,
    progress: Callable[[int, int, int], None],
) -> Copied:
    if destination.size(name.manifest) is not None:
        return _there_already(destination, name)
    try:
        manifest = reader.read_manifest(source, name)
        # What an interrupted copy left; no manifest names it.
        destination.delete_folder(name.folder)
        _write(source, destination, manifest, progress)
    except Damaged as damage:
        destination.delete_folder(name.folder)
        if source.size(name.manifest) is None:
            return Copied(name.step, name.term, "gone", reason="it was pruned while the copy went on")
        return Copied(name.step, name.term, "damaged", reason=damage.reason)
    return Copied(name.step, name.term, "copied", manifest.bytes)


def _copy_pins(source: Storage, destination: Storage, names: list[CheckpointName]) -> None:
    for name in pinned_names(source):
        if name in names:
            destination.make_folder(layout.PINS)
            _copy_record(source, destination, layout.pin_file(name), compared=False)


def _there_already(destination: Storage, name: CheckpointName) -> Copied:
    try:
        manifest = reader.read_manifest(destination, name)
    except Damaged as damage:
        reason = f"at the destination: {damage.reason}; delete {destination.url}/{name.folder} and copy again"
        return Copied(name.step, name.term, "damaged", reason=reason)
    return Copied(name.step, name.term, "there already", manifest.bytes)


def _write(
    source: Storage, destination: Storage, manifest: Manifest, progress: Callable[[int, int, int], None]
) -> None:
    done = 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        progress(manifest.step, done, manifest.bytes)

    buffers = {tensor: StoredBuffer(source, manifest, tensor, told) for tensor in manifest.tensors}
    write_checkpoint(
        destination,
        manifest.name,
        manifest.tree,
        buffers,
        run=manifest.run,
        written_by=manifest.written_by,
        versions=manifest.versions,
        pinned=manifest.pinned,
        metrics=manifest.metrics,
        keep=manifest.keep,
        time_saved=manifest.time,
    )
