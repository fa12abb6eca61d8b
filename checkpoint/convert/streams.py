"""A stored tensor as a stream of hashed bytes, and as a buffer that a writer takes; never whole in memory, no torch."""

from collections.abc import Callable, Iterator

import xxhash

from trainerd.checkpoint.chunk_reader import file_path
from trainerd.checkpoint.errors import Damaged
from trainerd.checkpoint.manifest import Chunk, Manifest
from trainerd.checkpoint.storage import Storage

BLOCK_BYTES = 16 * 2**20


def stored_blocks(storage: Storage, manifest: Manifest, tensor: str) -> Iterator[bytes]:
    """Yield a tensor's elements in row-major order, in blocks of 16 MiB at most, each of whole elements.

    Damaged if a byte is not what was written; that is known only when the chunk has been read to its end, so what was
    made of the blocks counts for nothing until the iterator is exhausted.
    """
    for chunk in manifest.tensors[tensor].chunks:
        yield from _blocks_of(storage, manifest, tensor, chunk)


def _blocks_of(storage: Storage, manifest: Manifest, tensor: str, chunk: Chunk) -> Iterator[bytes]:
    path = file_path(manifest.name, chunk.file)
    digest = xxhash.xxh3_128()
    end = chunk.offset + chunk.length
    for offset in range(chunk.offset, end, BLOCK_BYTES):
        length = min(BLOCK_BYTES, end - offset)
        try:
            block = storage.read(path, offset, length)
        except FileNotFoundError:
            raise Damaged(str(manifest.name), f"{chunk.file} is missing") from None
        if len(block) != length:
            raise Damaged(str(manifest.name), f"{chunk.file} ends before byte {offset + length}")
        digest.update(block)
        yield block
    if digest.hexdigest() != chunk.xxh3_128:
        raise Damaged(
            str(manifest.name), f"{tensor} in {chunk.file} (bytes {chunk.offset} to {end}) does not match its hash"
        )


class StoredBuffer:
    """A stored tensor as a writer's Buffer: what it gives has been held against its hash.

    It keeps the chunk that it read last until the tensor was given to its end, so that reading on reads nothing twice.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        tensor: str,
        progress: Callable[[int], None] = lambda _count: None,
    ) -> None:
        self._storage = storage
        self._manifest = manifest
        self._tensor = tensor
        self._entry = manifest.tensors[tensor]
        self._progress = progress  # told how many bytes were read
        self._kept = (-1, memoryview(b""))

    @property
    def dtype(self) -> str:
        """Torch's name of the element type."""
        return self._entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return self._entry.shape

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return self._entry.bytes

    def memory(self, start: int = 0, length: int | None = None) -> memoryview:
        """Its elements in row-major order, or `length` bytes of them from byte `start` on. Damaged."""
        end = self.bytes if length is None else start + length
        parts = []
        at = 0
        for index, chunk in enumerate(self._entry.chunks):
            if at < end and start < at + chunk.length:
                parts.append(self._chunk(index)[max(start - at, 0) : end - at])
            at += chunk.length
        if end == self.bytes:
            self._kept = (-1, memoryview(b""))  # or the buffers of a checkpoint would end up holding all of it
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def sample(self) -> str:
        """Nothing: no copy asks whether it has changed."""
        return ""

    def _chunk(self, index: int) -> memoryview:
        if self._kept[0] != index:
            self._kept = (-1, memoryview(b""))  # before the next one is read: never two of them in memory
            chunk = self._entry.chunks[index]
            whole = memoryview(bytearray(chunk.length))
            at = 0
            for block in _blocks_of(self._storage, self._manifest, self._tensor, chunk):
                whole[at : at + len(block)] = block
                at += len(block)
            self._kept = (index, whole)
            self._progress(chunk.length)
        return self._kept[1]
