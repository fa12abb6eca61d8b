"""Write one checkpoint: data files under names never used before, then the manifest, which commits it.

Works on a tree and named buffers, so that it needs no torch.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import xxhash

from trainerd.checkpoint import layout
from trainerd.checkpoint.errors import StorageUnusable
from trainerd.checkpoint.file_plan import Buffer, Piece, header_of, plan_files
from trainerd.checkpoint.incremental import NOTHING, Reused
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry, parse_manifest, seal_manifest
from trainerd.checkpoint.storage import Storage

# Hashed and handed on in parts that stay in a core's cache in between.
_PART_BYTES = 2**20


def write_checkpoint(
    storage: Storage,
    name: CheckpointName,
    tree: Any,
    buffers: Mapping[str, Buffer],
    *,
    run: str,
    written_by: str,
    versions: dict[str, str],
    pinned: tuple[int, ...] = (),
    metrics: Mapping[str, float] = MappingProxyType({}),
    keep: Mapping[str, Any] = MappingProxyType({}),
    reused: Reused = NOTHING,
    rank: int = 0,
    file_bytes: int | None = None,
    time_saved: float | None = None,
) -> Manifest:
    """Write and commit a checkpoint; when this returns, it is durable. StorageUnusable leaves only debris behind.

    Tensors that are `reused` lie in earlier checkpoints of the run already and are not written again. `time_saved` is
    what a copy takes over from the original; now when left out.
    """
    storage.make_folder(name.folder)
    changed = {tensor: buffer for tensor, buffer in buffers.items() if tensor not in reused.tensors}
    files, chunks = _write_files(
        storage, name, changed, rank=rank, file_bytes=file_bytes or storage.guarantees.file_bytes
    )
    written = {
        tensor: TensorEntry(dtype=buffer.dtype, shape=buffer.shape, chunks=tuple(chunks.get(tensor, ())))
        for tensor, buffer in changed.items()
    }
    manifest = Manifest(
        written_by=written_by,
        run=run,
        step=name.step,
        term=name.term,
        time=time.time() if time_saved is None else time_saved,
        world_size=1,
        pinned=pinned,
        metrics=dict(metrics),
        keep=dict(keep),
        versions=versions,
        files={**reused.files, **files},
        tensors={tensor: reused.tensors.get(tensor) or written[tensor] for tensor in buffers},
        tree=tree,
    )
    try:
        storage.create(name.manifest, seal_manifest(manifest))
    except FileExistsError:
        # An earlier attempt at this step of this term, by us, had committed it although it was told to have failed.
        return parse_manifest(storage.read(name.manifest), name)
    except StorageUnusable as error:
        error.may_have_committed = True
        raise
    return manifest


def _write_files(
    storage: Storage, name: CheckpointName, buffers: Mapping[str, Buffer], *, rank: int, file_bytes: int
) -> tuple[dict[str, FileEntry], dict[str, list[Chunk]]]:
    """Write the buffers, some files at a time; return the files, and each tensor's chunks in order."""
    first = _first_free_number(storage, name, rank)
    plan = [
        (layout.data_file(rank, number), pieces) for number, pieces in enumerate(plan_files(buffers, file_bytes), first)
    ]
    files: dict[str, FileEntry] = {}
    chunks: dict[str, list[Chunk]] = {}
    with ThreadPoolExecutor(storage.guarantees.parallel, thread_name_prefix="trainerd-save") as pool:
        writing = [pool.submit(_write_file, storage, name, file, pieces) for file, pieces in plan]
        try:
            for (file, pieces), future in zip(plan, writing, strict=True):
                files[file], written = future.result()
                for piece, chunk in zip(pieces, written, strict=True):
                    chunks.setdefault(piece.name, []).append(chunk)
        finally:
            # After a failure nothing more is begun, and what was begun has ended before anybody tidies up.
            pool.shutdown(cancel_futures=True)
    return files, chunks


def _write_file(
    storage: Storage, name: CheckpointName, file: str, pieces: list[Piece]
) -> tuple[FileEntry, list[Chunk]]:
    header = header_of(pieces)
    hashes: list[str] = []
    total = len(header) + sum(piece.length for piece in pieces)
    storage.write(f"{name.folder}/{file}", _parts(header, pieces, hashes), total)
    chunks = []
    offset = len(header)
    for piece, digest in zip(pieces, hashes, strict=True):
        chunks.append(
            Chunk(file=file, offset=offset, length=piece.length, at=piece.at, shape=piece.shape, xxh3_128=digest)
        )
        offset += piece.length
    entry = FileEntry(bytes=total, header_bytes=len(header), header_xxh3_128=xxhash.xxh3_128_hexdigest(header))
    return entry, chunks


def _parts(header: bytes, pieces: Iterable[Piece], hashes: list[str]) -> Iterator[bytes | memoryview]:
    """The file's bytes; each piece's hash is appended when the last of its parts has been taken."""
    yield header
    for piece in pieces:
        memory = piece.buffer.memory(piece.start, piece.length)
        digest = xxhash.xxh3_128()
        for start in range(0, piece.length, _PART_BYTES):
            part = memory[start : start + _PART_BYTES]
            digest.update(part)
            yield part
        hashes.append(digest.hexdigest())


def _first_free_number(storage: Storage, name: CheckpointName, rank: int) -> int:
    """Names are never used twice: an earlier attempt at this step may have left files that somebody still reads."""
    numbers = [
        found[1] for file in storage.names(name.folder) if (found := layout.parse_data_file(file)) and found[0] == rank
    ]
    return max(numbers, default=-1) + 1
