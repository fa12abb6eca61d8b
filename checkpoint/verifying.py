"""Hold what is stored against its hashes, every byte."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from trainerd.checkpoint.chunk_reader import ChunkRead, read_chunks, reads_of
from trainerd.checkpoint.errors import Damaged
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.listing import CheckpointInfo, list_checkpoints
from trainerd.checkpoint.manifest import Manifest
from trainerd.checkpoint.reader import read_manifest, valid_manifests, verify_headers
from trainerd.checkpoint.storage import Storage
from trainerd.checkpoint.terms import read_run

Progress = Callable[[int, int], None]
"""Told the bytes that are verified, and the bytes in all."""


class Verifier:
    """Verifies checkpoints of one run; data that several share are read once."""

    def __init__(self, storage: Storage, progress: Callable[[int], None] | None = None) -> None:
        self._storage = storage
        self._progress = progress
        self._proven: set[tuple[object, ...]] = set()

    def verify(self, name: CheckpointName) -> Manifest:
        """The checkpoint's manifest, if every byte of the checkpoint is as it was written. Damaged, FormatTooNew."""
        manifest = read_manifest(self._storage, name)
        self.verify_data(manifest)
        return manifest

    def verify_data(self, manifest: Manifest) -> None:
        """Hold the data that a manifest names against the hashes in it. Damaged."""
        verify_headers(self._storage, manifest)
        reads = list(reads_of(manifest, dict.fromkeys(manifest.tensors)))
        new = [read for read in reads if _key(read) not in self._proven]
        read_chunks(self._storage, manifest.name, new, self._progress)
        self._proven.update(map(_key, new))


def verify_checkpoints(
    storage: Storage, step: int | None = None, progress: Progress | None = None
) -> Iterator[CheckpointInfo]:
    """As `list_checkpoints`, or one step of it, with every byte of data read and held against its hash.

    RunDamaged if a file is damaged on which all of them depend.
    """
    read_run(storage)
    infos = [info for info in list_checkpoints(storage) if step is None or info.step == step]
    total = sum({path: size for info in infos for path, size in info.files.items()}.values())
    done = 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    verifier = Verifier(storage, told)
    for info in infos:
        yield _verified(verifier, info) if info.state in ("valid", "superseded") else info


def newest_whole_step(storage: Storage) -> int | None:
    """As `newest_step`, with every byte of data held against its hash."""
    skipped: list[str] = []
    verifier = Verifier(storage)
    for manifest in valid_manifests(storage, skipped):
        try:
            return verifier.verify(manifest.name).step
        except Damaged as damage:
            skipped.append(str(damage))
    return None


def _verified(verifier: Verifier, info: CheckpointInfo) -> CheckpointInfo:
    try:
        verifier.verify(CheckpointName(info.step, info.term))
    except Damaged as damage:
        return replace(info, state="damaged", reason=damage.reason, kept_because=())
    return info


def _key(read: ChunkRead) -> tuple[object, ...]:
    return read.path, read.chunk.offset, read.chunk.length, read.chunk.xxh3_128
