"""What goes into which data file: pieces of buffers, and the safetensors header before them. Pure."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from trainerd.checkpoint import dtypes

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

    def memory(self, start: int, length: int) -> memoryview:
        """Bytes of the elements in row-major order; `start` and `length` are whole elements."""

    def sample(self) -> str:
        """A few bytes in hexadecimal, from the same places each time: if these differ, the elements differ."""


@dataclass(frozen=True)
class Piece:
    """A contiguous, row-major part of a buffer."""

    name: str
    buffer: Buffer
    at: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    length: int


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


def header_of(pieces: list[Piece]) -> bytes:
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
