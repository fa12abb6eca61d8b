"""Write one checkpoint: data files under names never used before, then the manifest, which commits it.

Works on a tree and named buffers, so that it needs no torch.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import xxhash

from trainerd.checkpoint import dtypes, envelope, layout
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry, parse_manifest
from trainerd.checkpoint.storage import Storage

FILE_BYTES = 512 * 2**20
"""A data file's chunks add up to this at most."""

# safetensors readers want data to start at a multiple of 8; 64 also suits vector loads from a memory map.
_ALIGNMENT = 64


class Buffer(Protocol):
    """A tensor to be written."""

    @property
    def dtype(self) -> str:
        """Element type, by torch's name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""

    def memory(self) -> memoryview:
        """The elements in row-major order."""


@dataclass(frozen=True)
class Piece:
    """A contiguous, row-major part of a buffer."""

    name: str
    buffer: Buffer
    at: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    length: int


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
    rank: int = 0,
    file_bytes: int = FILE_BYTES,
    time_saved: float | None = None,
) -> Manifest:
    """Write and commit a checkpoint; when this returns, it is durable. StorageUnusable leaves only debris behind.

    `time_saved` is what a copy takes over from the original; now when left out.
    """
    storage.make_folder(name.folder)
    number = _first_free_number(storage, name, rank)
    files: dict[str, FileEntry] = {}
    chunks: dict[str, list[Chunk]] = {tensor: [] for tensor in buffers}
    for number, pieces in enumerate(plan_files(buffers, file_bytes), number):  # noqa: B020 (it goes on counting)
        file = layout.data_file(rank, number)
        files[file], written = _write_file(storage, f"{name.folder}/{file}", file, pieces)
        for piece, chunk in zip(pieces, written, strict=True):
            chunks[piece.name].append(chunk)
    manifest = Manifest(
        written_by=written_by,
        run=run,
        step=name.step,
        term=name.term,
        time=time.time() if time_saved is None else time_saved,
        world_size=1,
        pinned=pinned,
        versions=versions,
        files=files,
        tensors={
            tensor: TensorEntry(dtype=buffer.dtype, shape=buffer.shape, chunks=tuple(chunks[tensor]))
            for tensor, buffer in buffers.items()
        },
        tree=tree,
    )
    try:
        storage.create(name.manifest, envelope.seal(manifest))
    except FileExistsError:
        # An earlier attempt at this step of this term, by us, had committed it although it was told to have failed.
        return parse_manifest(storage.read(name.manifest), name)
    return manifest


def plan_files(buffers: Mapping[str, Buffer], file_bytes: int) -> Iterator[list[Piece]]:
    """Spread the buffers over files of at most `file_bytes`; wide types first, so that every tensor is aligned."""
    pieces: list[Piece] = []
    room = file_bytes
    by_width = sorted(buffers.items(), key=lambda item: -dtypes.item_bytes(item[1].dtype))
    for name, buffer in by_width:
        for piece in _split(name, buffer, file_bytes):
            if pieces and piece.length > room:
                yield pieces
                pieces, room = [], file_bytes
            pieces.append(piece)
            room -= piece.length
    if pieces:
        yield pieces


def _split(name: str, buffer: Buffer, limit: int) -> Iterator[Piece]:
    """The buffer in one piece, or cut along its outermost dimensions into row-major runs within the limit."""
    item = dtypes.item_bytes(buffer.dtype)
    start = 0
    for at, shape in _cut((), buffer.shape, max(1, limit // item)):
        length = math.prod(shape) * item
        yield Piece(name, buffer, at, shape, start, length)
        start += length


def _cut(at: tuple[int, ...], rest: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Positions and shapes of the runs of at most `most` elements below a prefix of single indices."""
    ones = (1,) * len(at)
    if math.prod(rest) <= most:
        yield at + (0,) * len(rest), ones + rest
        return
    row = math.prod(rest[1:])
    if row > most:
        for index in range(rest[0]):
            yield from _cut((*at, index), rest[1:], most)
        return
    rows = most // row
    for first in range(0, rest[0], rows):
        count = min(rows, rest[0] - first)
        yield (*at, first, *(0,) * len(rest[1:])), (*ones, count, *rest[1:])


def _write_file(storage: Storage, path: str, file: str, pieces: list[Piece]) -> tuple[FileEntry, list[Chunk]]:
    header = _header(pieces)
    hashes: list[str] = []
    total = len(header) + sum(piece.length for piece in pieces)
    storage.write(path, _parts(header, pieces, hashes), total)
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
    yield header
    whole: memoryview | None = None
    current: Buffer | None = None
    for piece in pieces:
        if piece.buffer is not current:
            current, whole = piece.buffer, piece.buffer.memory()
        assert whole is not None
        part = whole[piece.start : piece.start + piece.length]
        hashes.append(xxhash.xxh3_128_hexdigest(part))
        yield part


def _header(pieces: list[Piece]) -> bytes:
    """The safetensors header: 8 bytes of length, then JSON, padded with spaces."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for piece in pieces:
        whole = piece.length == piece.buffer.bytes
        name = piece.name if whole else f"{piece.name}[{','.join(map(str, piece.at))}]"
        tag = dtypes.safetensors_tag(piece.buffer.dtype)
        shape = list(piece.shape) if tag else [piece.length]
        entries[name] = {
            "dtype": tag or "U8",
            "shape": shape,
            "data_offsets": [offset, offset + piece.length],
        }
        offset += piece.length
    text = msgspec.json.encode(entries)
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _first_free_number(storage: Storage, name: CheckpointName, rank: int) -> int:
    """Names are never used twice: an earlier attempt at this step may have left files that somebody still reads."""
    numbers = [
        found[1] for file in storage.names(name.folder) if (found := layout.parse_data_file(file)) and found[0] == rank
    ]
    return max(numbers, default=-1) + 1
