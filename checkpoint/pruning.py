"""Delete what retention does not want and what failed attempts left: manifest first, then files."""

import logging
import time

from trainerd.checkpoint import layout
from trainerd.checkpoint.errors import CheckpointError, StorageUnusable
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.reader import candidates, read_manifest
from trainerd.checkpoint.retention import Keep, Kept, reasons
from trainerd.checkpoint.storage import Storage

_logger = logging.getLogger("trainerd.checkpoint")


def prune(storage: Storage, keep: Keep, *, term: int) -> list[CheckpointName]:
    """Apply retention to the valid checkpoints on the lineage and sweep debris; return what went.

    Damaged and superseded checkpoints stay: a person may still want them. Call it with no save in progress.
    """
    valid, pinned = _valid(storage)
    wanted = reasons(list(valid), keep, time.time(), pinned=pinned)
    gone = [name for kept, name in valid.items() if not wanted[kept]]
    for name in gone:
        _delete(storage, name)
    return gone + sweep(storage, term)


def _valid(storage: Storage) -> tuple[dict[Kept, CheckpointName], tuple[int, ...]]:
    """Return the valid checkpoints, and the steps that the newest of them pins."""
    valid: dict[Kept, CheckpointName] = {}
    pinned: tuple[int, ...] = ()
    for name in candidates(storage):
        try:
            manifest = read_manifest(storage, name)
        except CheckpointError:
            continue
        pinned = pinned if valid else manifest.pinned
        valid[Kept(name.step, name.term, manifest.time)] = name
    return valid, pinned


def sweep(storage: Storage, term: int) -> list[CheckpointName]:
    """Delete what failed saves left: no manifest names it. That of later terms is somebody else's save in progress."""
    debris = [
        name
        for found in storage.names(layout.CHECKPOINTS)
        if (name := layout.parse_checkpoint(found)) and name.term <= term and storage.size(name.manifest) is None
    ]
    gone = []
    for name in debris:
        try:
            storage.delete_folder(name.folder)
        except StorageUnusable as error:
            # Something of another's in it must not keep the rest from being swept.
            _logger.warning("what a failed save left could not be removed: %s", error)
        else:
            gone.append(name)
    return gone


def _delete(storage: Storage, name: CheckpointName) -> None:
    # Without its manifest it counts no more, so a crash from here on leaves debris, never a half checkpoint.
    storage.delete(name.manifest)
    storage.delete_folder(name.folder)
