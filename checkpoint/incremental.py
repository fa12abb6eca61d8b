"""Which tensors an earlier checkpoint holds already, so that they are referred to and not written again."""

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import xxhash

from trainerd.checkpoint.chunk_reader import file_lengths, file_path
from trainerd.checkpoint.file_plan import Buffer
from trainerd.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry
from trainerd.checkpoint.storage import Storage


@dataclass(frozen=True)
class Reused:
    """Entries of tensors that lie in earlier checkpoints, and of the files that hold them, as a manifest has them."""

    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)


NOTHING = Reused()


class Unchanged:
    """Compares the tensors of one save with those of the checkpoint before it.

    A sample of each buffer is remembered, for that tells most changes without hashing everything twice: once to know
    whether to write, once while writing. Only a full hash makes two tensors equal.
    """

    def __init__(self) -> None:
        self._samples: dict[str, str] = {}

    def find(
        self, storage: Storage, buffers: Mapping[str, Buffer], previous: Manifest | None, avoid: Collection[str] = ()
    ) -> Reused:
        """The buffers that are in `previous` to the last byte; files in `avoid` (paths in the run) are not built on."""
        samples = {name: buffer.sample() for name, buffer in buffers.items()}
        last, self._samples = self._samples, samples
        if previous is None:
            return NOTHING
        whole = _whole_files(storage, previous) - set(avoid)
        candidates = [
            name
            for name, buffer in buffers.items()
            if buffer.bytes
            and last.get(name, samples[name]) == samples[name]
            and (entry := previous.tensors.get(name)) is not None
            and (entry.dtype, entry.shape) == (buffer.dtype, buffer.shape)
            and all(file_path(previous.name, chunk.file) in whole for chunk in entry.chunks)
        ]
        with ThreadPoolExecutor(2, thread_name_prefix="trainerd-hash") as pool:
            same = pool.map(lambda name: _is_same(buffers[name], previous.tensors[name]), candidates)
            tensors = {
                name: _seen_from_elsewhere(previous, previous.tensors[name])
                for name, equal in zip(candidates, same, strict=True)
                if equal
            }
        needed = {chunk.file for entry in tensors.values() for chunk in entry.chunks}
        entries = {_foreign_key(previous, file): entry for file, entry in previous.files.items()}
        return Reused(tensors, {file: entry for file, entry in entries.items() if file in needed})


def _whole_files(storage: Storage, manifest: Manifest) -> set[str]:
    """Paths of the manifest's files that are still there in their full length."""
    paths = {file_path(manifest.name, file): entry.bytes for file, entry in manifest.files.items()}
    lengths = file_lengths(storage, manifest)
    return {path for path, size in paths.items() if lengths.get(path) == size}


def _is_same(buffer: Buffer, entry: TensorEntry) -> bool:
    start = 0
    for chunk in entry.chunks:
        if xxhash.xxh3_128_hexdigest(buffer.memory(start, chunk.length)) != chunk.xxh3_128:
            return False
        start += chunk.length
    return True


def _seen_from_elsewhere(manifest: Manifest, entry: TensorEntry) -> TensorEntry:
    chunks: list[Chunk] = [
        msgspec.structs.replace(chunk, file=_foreign_key(manifest, chunk.file)) for chunk in entry.chunks
    ]
    return msgspec.structs.replace(entry, chunks=tuple(chunks))


def _foreign_key(manifest: Manifest, file: str) -> str:
    """How another checkpoint names a file of this manifest; one that was foreign already keeps its name."""
    return file if "/" in file else f"{manifest.name}/{file}"
