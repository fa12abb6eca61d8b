"""Read what is stored, slowly and again and again, so that damage is found while the state is still alive elsewhere."""

import logging
import threading
from collections.abc import Callable

import xxhash

from trainerd.checkpoint.chunk_reader import ChunkRead, reads_of
from trainerd.checkpoint.errors import CheckpointError, Damaged, NotCommitted
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.reader import candidates, read_manifest
from trainerd.checkpoint.storage import Storage

_BLOCK_BYTES = 2**20
_BETWEEN_ROUNDS_SECONDS = 5.0
_BETWEEN_ROUNDS_OF_OBJECTS_SECONDS = 60.0  # each round lists the run and reads its manifests, which is billed there

_logger = logging.getLogger("trainerd.checkpoint")


def pause_seconds(read_bytes: int, bytes_per_hour: int) -> float:
    """How long to wait after so many bytes, so that an hour has no more than its budget."""
    return read_bytes * 3600 / bytes_per_hour


class Scrubber:
    """Holds the checkpoints that count against their hashes, newest first, within a budget of bytes an hour.

    `found` is called once for each damaged data file, by the scrubber's thread, with its path in the run and what is
    wrong. Checkpoints that go meanwhile are passed over; a storage that fails is tried again in the next round.
    """

    def __init__(self, storage: Storage, bytes_per_hour: int, found: Callable[[str, str], None]) -> None:
        self._storage = storage
        self._bytes_per_hour = bytes_per_hour
        self._found = found
        self._reported: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainerd-scrub", daemon=True)

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Read no further block; do not wait for the one that is being read."""
        self._stopping.set()

    def _run(self) -> None:
        on_disk = self._storage.guarantees.folders
        rest_seconds = _BETWEEN_ROUNDS_SECONDS if on_disk else _BETWEEN_ROUNDS_OF_OBJECTS_SECONDS
        while not self._stopping.is_set():
            try:
                self._round()
            except CheckpointError as error:
                _logger.warning("the stored checkpoints could not be read for scrubbing: %s", error)
            self._stopping.wait(rest_seconds)

    def _round(self) -> None:
        looked_at: set[tuple[str, int]] = set()
        for name in candidates(self._storage):
            try:
                manifest = read_manifest(self._storage, name)
            except NotCommitted:
                continue
            except Damaged as damage:
                self._report(name.manifest, str(damage))
                continue
            for read in reads_of(manifest, dict.fromkeys(manifest.tensors)):
                key = (read.path, read.chunk.offset)
                if key in looked_at:
                    continue
                looked_at.add(key)
                if not self._is_whole(read):
                    if self._storage.size(name.manifest) is None:
                        break  # pruned meanwhile
                    self._report(read.path, _in_words(read, name))
                if self._stopping.is_set():
                    return

    def _is_whole(self, read: ChunkRead) -> bool:
        digest = xxhash.xxh3_128()
        end = read.chunk.offset + read.chunk.length
        for offset in range(read.chunk.offset, end, _BLOCK_BYTES):
            length = min(_BLOCK_BYTES, end - offset)
            try:
                block = self._storage.read(read.path, offset, length)
            except FileNotFoundError:
                return False
            digest.update(block)
            if self._stopping.wait(pause_seconds(length, self._bytes_per_hour)):
                return True
        return digest.hexdigest() == read.chunk.xxh3_128

    def _report(self, path: str, text: str) -> None:
        if path not in self._reported:
            self._reported.add(path)
            self._found(path, text)


def _in_words(read: ChunkRead, name: CheckpointName) -> str:
    return (
        f"{read.path} is damaged: {read.tensor}, which step {name.step} needs, does not match its hash. The next "
        f"checkpoint will not build on that file; `trainerd verify` tells what else it concerns, `trainerd repair` "
        f"moves damaged checkpoints aside."
    )
