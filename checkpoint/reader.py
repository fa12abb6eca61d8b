"""Find, check and read checkpoints without torch: believe hashes, never presence or names."""

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from trainerd.checkpoint.chunk_reader import file_lengths, file_path
from trainerd.checkpoint.errors import Damaged, NoCheckpoint, NotCommitted, StorageUnusable
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.manifest import (
    MANIFEST_BYTES,
    Manifest,
    RunRecord,
    TensorEntry,
    parse_manifest,
)
from trainerd.checkpoint.storage import Storage
from trainerd.checkpoint.terms import committed, committed_once, counts, named, read_run, read_tickets
from trainerd.checkpoint.trees import KIND, find


@dataclass(frozen=True)
class StoredTree:
    """The tree of a checkpoint, with each tensor reference told its type and shape."""

    manifest: Manifest
    tree: Any

    @property
    def step(self) -> int:
        """The checkpoint's step."""
        return self.manifest.step

    @property
    def term(self) -> int:
        """The checkpoint's term."""
        return self.manifest.term

    def at(self, path: str) -> Any:
        """The part of the tree at a path such as `hooks.EMA`. KeyError(rest of the path, names that are there)."""
        return find(self.tree, path)


def read_tree(storage: Storage, step: int | None = None) -> StoredTree:
    """The tree of the newest valid checkpoint, or of one step. NoCheckpoint, or Damaged if that step is."""
    manifest = read_valid(storage, step)
    return StoredTree(manifest, _described(manifest.tree, manifest.tensors))


def newest_step(storage: Storage) -> int | None:
    """Step of the newest valid checkpoint on the lineage; None when the run is to start fresh.

    NoCheckpoint when nothing is valid though something was committed: that is never a fresh start.
    """
    manifest = read_newest(storage)
    return None if manifest is None else manifest.step


def read_newest(storage: Storage) -> Manifest | None:
    """Manifest of the newest valid checkpoint on the lineage, judged without reading data; else as `newest_step`."""
    skipped: list[str] = []
    for manifest in valid_manifests(storage, skipped):
        return manifest
    return None


def read_valid(storage: Storage, step: int | None) -> Manifest:
    """Manifest of the newest valid checkpoint, or of one step. NoCheckpoint, or Damaged if that step is."""
    manifest = read_newest(storage) if step is None else read_step(storage, step)
    if manifest is None:
        raise NoCheckpoint(f"No checkpoint has been committed in {storage.url} yet.")
    return manifest


def read_step(storage: Storage, step: int) -> Manifest:
    """Manifest of a step's checkpoint, on the lineage if there is a choice. NoCheckpoint names the steps there are."""
    return read_manifest(storage, name_of_step(storage, step))


def name_of_step(storage: Storage, step: int) -> CheckpointName:
    """A step's checkpoint, on the lineage if there is a choice. NoCheckpoint names the steps there are."""
    tickets = read_tickets(storage)
    names = [name for name in named(storage) if name.step == step and storage.size(name.manifest) is not None]
    if not names:
        steps = sorted({name.step for name in committed(storage)})
        have = f"It has the steps {_abbreviated(steps)}" if steps else "It has no checkpoint at all"
        raise NoCheckpoint(
            f"{storage.url} has no checkpoint of step {step}. {have}; `trainerd list {storage.url}` shows them."
        )
    return max(names, key=lambda name: (counts(name, tickets), name.term))


def candidates(storage: Storage) -> Iterator[CheckpointName]:
    """What a resume may take, best first: on the lineage, committed or not, which only reading the manifest tells."""
    tickets = read_tickets(storage)
    return (name for name in reversed(named(storage)) if counts(name, tickets))


def valid_manifests(storage: Storage, skipped: list[str]) -> Iterator[Manifest]:
    """Manifests that a resume may take, best first, each read when it is asked for; `skipped` gets why others not.

    NoCheckpoint when none is left though something that counts was once committed: that is never a fresh start.
    """
    # Asked before the listing, so that what is committed in between is no contradiction.
    once = committed_once(storage)
    for name in candidates(storage):
        try:
            yield read_manifest(storage, name)
        except NotCommitted:
            continue
        except Damaged as damage:
            skipped.append(str(damage))
    if not skipped and not once:
        return
    found = " ".join(skipped) or f"{once}, but no checkpoint is there any more."
    raise NoCheckpoint(
        f"{storage.url} was trained before, but none of its checkpoints can be used. {found} Nothing was "
        f"changed. Bring the files back from a copy, or start again at step 0 with `trainerd run --fresh`."
    )


def read_manifest(storage: Storage, name: CheckpointName, run: RunRecord | None = None) -> Manifest:
    """A checkpoint's manifest, its files present and of the right length. NotCommitted, Damaged, FormatTooNew.

    Whoever reads many hands the run's record in, or it is read each time.
    """
    manifest = parse_manifest(manifest_bytes(storage, name), name)
    run = run or read_run(storage)
    if run is not None and run.run != manifest.run:
        raise Damaged(str(name), f"it belongs to another run ({manifest.run}), this one is {run.run}")
    lengths = file_lengths(storage, manifest)
    for file, entry in manifest.files.items():
        size = lengths.get(file_path(name, file))
        if size != entry.bytes:
            if storage.size(name.manifest) is None:
                # Pruned while we looked.
                raise NotCommitted(str(name))
            there = "is missing" if size is None else f"has {size} bytes instead of {entry.bytes}"
            raise Damaged(str(name), f"{file} {there}")
    return manifest


def manifest_bytes(storage: Storage, name: CheckpointName) -> bytes:
    """A manifest's file, unless it is longer than any that is written. FileNotFoundError, Damaged."""
    size = storage.size(name.manifest)
    if size is not None and size > MANIFEST_BYTES:
        raise Damaged(str(name), f"its manifest has {size} bytes, and none is written with more than {MANIFEST_BYTES}")
    try:
        return storage.read(name.manifest)
    except FileNotFoundError:
        raise NotCommitted(str(name)) from None
    except StorageUnusable as error:
        # A file in the place of its folder, or a folder in the place of its manifest: foreign, and not in the way.
        if error.errno not in {errno.ENOTDIR, errno.EISDIR}:
            raise
        raise NotCommitted(str(name)) from None


def verify_headers(storage: Storage, manifest: Manifest) -> None:
    """Hold the header of every data file against its hash. Damaged if one differs."""
    for file, entry in manifest.files.items():
        header = storage.read(file_path(manifest.name, file), 0, entry.header_bytes)
        if xxhash.xxh3_128_hexdigest(header) != entry.header_xxh3_128:
            raise Damaged(str(manifest.name), f"the header of {file} does not match its hash")


def _described(node: Any, tensors: dict[str, TensorEntry]) -> Any:
    """The tree with dtype and shape beside every reference to a tensor."""
    if isinstance(node, list):
        return [_described(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    described = {key: _described(item, tensors) for key, item in node.items()}
    if KIND in node and isinstance(node.get("tensor"), str) and node["tensor"] in tensors:
        entry = tensors[node["tensor"]]
        # An ndarray node tells its own element type and shape; its bytes are stored flat.
        described = {**described, "bytes": entry.bytes}
        described.setdefault("dtype", entry.dtype)
        described.setdefault("shape", list(entry.shape))
    return described


def _abbreviated(steps: list[int]) -> str:
    shown = [str(step) for step in steps] if len(steps) <= 8 else [*map(str, steps[:3]), "...", *map(str, steps[-3:])]
    return ", ".join(shown)
