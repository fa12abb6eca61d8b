"""Read chunks in parallel, every byte held against its hash: into memory that is there, or to check them only."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import xxhash

from trainerd.checkpoint import layout
from trainerd.checkpoint.errors import Damaged
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.manifest import Chunk, Manifest
from trainerd.checkpoint.storage import Storage


class ChunkRead(NamedTuple):
    """One chunk to read: where it lies, and where its bytes belong; None checks them only."""

    path: str
    tensor: str
    chunk: Chunk
    memory: memoryview | None


def file_path(name: CheckpointName, file: str) -> str:
    """Where a data file of a manifest lies, relative to the run; it may belong to an earlier checkpoint."""
    return f"{layout.CHECKPOINTS}/{file}" if "/" in file else f"{name.folder}/{file}"


def file_lengths(storage: Storage, manifest: Manifest) -> dict[str, int]:
    """Bytes of the files that lie in a manifest's folders, by their paths; each folder is listed once."""
    folders = {file_path(manifest.name, file).rpartition("/")[0] for file in manifest.files}
    return {f"{folder}/{name}": size for folder in folders for name, size in storage.sizes(folder).items()}


def reads_of(manifest: Manifest, memories: Mapping[str, memoryview | None]) -> Iterator[ChunkRead]:
    """The reads that fill each tensor's memory (row-major, the tensor's bytes)."""
    for tensor, memory in memories.items():
        start = 0
        for chunk in manifest.tensors[tensor].chunks:
            part = None if memory is None else memory[start : start + chunk.length]
            yield ChunkRead(file_path(manifest.name, chunk.file), tensor, chunk, part)
            start += chunk.length


def read_chunks(
    storage: Storage, name: CheckpointName, reads: Iterable[ChunkRead], progress: Callable[[int], None] | None = None
) -> None:
    """Do the reads, some at a time; `progress` is told the bytes of each part done. Damaged at the first wrong byte."""
    with ThreadPoolExecutor(storage.guarantees.parallel, thread_name_prefix="trainerd-load") as pool:
        running = [pool.submit(_read_run, storage, name, run) for run in _runs(reads, storage.guarantees.read_bytes)]
        try:
            for future in running:
                done = future.result()
                if progress is not None:
                    progress(done)
        finally:
            pool.shutdown(cancel_futures=True)


def _runs(reads: Iterable[ChunkRead], read_bytes: int) -> Iterator[list[ChunkRead]]:
    """Chunks that lie side by side and are small, together; each other one alone."""
    run: list[ChunkRead] = []
    length = 0
    for read in sorted(reads, key=lambda read: (read.path, read.chunk.offset)):
        adjoining = run and run[-1].path == read.path and _end(run[-1].chunk) == read.chunk.offset
        if run and not (adjoining and length + read.chunk.length <= read_bytes):
            yield run
            run, length = [], 0
        run.append(read)
        length += read.chunk.length
    if run:
        yield run


def _read_run(storage: Storage, name: CheckpointName, run: list[ChunkRead]) -> int:
    if len(run) == 1:
        _read_alone(storage, name, run[0])
        return run[0].chunk.length
    first = run[0]
    span = memoryview(bytearray(_end(run[-1].chunk) - first.chunk.offset))
    there = _fill(storage, first.path, first.chunk.offset, span)
    for read in run:
        start = read.chunk.offset - first.chunk.offset
        part = span[start : start + read.chunk.length]
        if start + read.chunk.length > there or xxhash.xxh3_128_hexdigest(part) != read.chunk.xxh3_128:
            raise Damaged(str(name), _mismatch(read))
        if read.memory is not None:
            read.memory[:] = part
    return len(span)


def _read_alone(storage: Storage, name: CheckpointName, read: ChunkRead) -> None:
    digest = xxhash.xxh3_128()
    block_bytes = storage.guarantees.read_bytes
    spare = memoryview(bytearray(min(block_bytes, read.chunk.length))) if read.memory is None else None
    for start in range(0, read.chunk.length, block_bytes):
        length = min(block_bytes, read.chunk.length - start)
        block = spare[:length] if spare is not None else read.memory[start : start + length]  # type: ignore[index]
        if _fill(storage, read.path, read.chunk.offset + start, block) != length:
            raise Damaged(str(name), _mismatch(read))
        digest.update(block)
    if digest.hexdigest() != read.chunk.xxh3_128:
        raise Damaged(str(name), _mismatch(read))


def _fill(storage: Storage, path: str, offset: int, buffer: memoryview) -> int:
    try:
        return storage.read_into(path, offset, buffer)
    except FileNotFoundError:
        return 0


def _end(chunk: Chunk) -> int:
    return chunk.offset + chunk.length


def _mismatch(read: ChunkRead) -> str:
    where = f"bytes {read.chunk.offset} to {_end(read.chunk)}"
    return f"{read.tensor} in {read.chunk.file} ({where}) does not match its hash"
