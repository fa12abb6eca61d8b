"""Delete what retention does not want and what failed attempts left: manifest first, then files."""

import logging
import time

from trainerd.checkpoint import layout
from trainerd.checkpoint.chunk_reader import file_path
from trainerd.checkpoint.errors import CheckpointError, StorageUnusable
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.manifest import parse_manifest
from trainerd.checkpoint.reader import candidates, read_manifest
from trainerd.checkpoint.retention import Keep, Kept, reasons
from trainerd.checkpoint.storage import Storage
from trainerd.checkpoint.terms import committed, newest_term

_logger = logging.getLogger("trainerd.checkpoint")


def prune(storage: Storage, keep: Keep, *, term: int) -> list[CheckpointName]:
    """Apply retention to the valid checkpoints on the lineage and sweep debris; return what went.

    Damaged and superseded checkpoints stay: a person may still want them. Call it with no save in progress. Nothing
    goes once a later term has begun.
    """
    if newest_term(storage) > term:
        return []
    valid, pinned = _valid(storage)
    wanted = reasons(list(valid), keep, time.time(), pinned=pinned)
    gone = [name for kept, name in valid.items() if not wanted[kept]]
    for name in gone:
        # Without its manifest it counts no more: a crash from here on leaves debris, never a half checkpoint.
        storage.delete(name.manifest)
    swept = sweep(storage, term)
    return gone + [name for name in swept if name not in gone]


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
    needed = _referred_to(storage) if debris else set()
    for name in debris:
        if any(f"{name.folder}/{file}" in needed for file in storage.names(name.folder)):
            continue
        try:
            storage.delete_folder(name.folder)
        except StorageUnusable as error:
            # Something of another's in it must not keep the rest from being swept.
            _logger.warning("what a failed save left could not be removed: %s", error)
        else:
            gone.append(name)
    return gone


def _referred_to(storage: Storage) -> set[str]:
    """Files that some checkpoint needs, its own or another's. Damaged if one cannot say what it needs."""
    return {
        file_path(name, file)
        for name in committed(storage)
        for file in parse_manifest(storage.read(name.manifest), name).files
    }
