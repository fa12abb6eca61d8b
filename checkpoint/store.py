"""The facade: save, load, list, verify and prune the checkpoints of one run."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainerd.checkpoint import codec, pruning, reader, terms
from trainerd.checkpoint.errors import CheckpointError, Damaged, NoCheckpoint, StorageUnusable
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.manifest import Manifest
from trainerd.checkpoint.reader import CheckpointInfo
from trainerd.checkpoint.retention import Keep
from trainerd.checkpoint.storage import Storage
from trainerd.checkpoint.tensor_values import empty, memory_view
from trainerd.checkpoint.versions import WRITTEN_BY, versions
from trainerd.checkpoint.writer import write_checkpoint

_logger = logging.getLogger("trainerd.checkpoint")


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint: bytes of its tensors, seconds from call to commit."""

    step: int
    term: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Loaded:
    """A state as it was saved, and why newer checkpoints were passed over."""

    step: int
    term: int
    state: Any
    skipped: tuple[str, ...]


class CheckpointStore:
    """The checkpoints of one run. Saving takes a term, which `RunOwner.ensure_term` gives to the run's one owner."""

    def __init__(self, storage: Storage, *, term: int | None = None, keep: Keep | None = None) -> None:
        self._storage = storage
        self._keep = keep or Keep()
        self.term = term

    def check(self, state: object) -> None:
        """Encode and decode the state without writing or copying: UnsupportedState names what would not come back."""
        codec.check_inverse(state)

    def save(self, step: int, state: object, *, pinned: Sequence[int] = ()) -> Saved:
        """Commit the state of a step, then prune. UnsupportedState, StorageUnusable: earlier checkpoints are untouched.

        Checkpoints of `pinned` steps are kept, whatever the retention rules say, as long as this one is the newest.
        Tensors are read while this runs; nothing may change them until it returns.
        """
        began = time.monotonic()
        name = CheckpointName(step, self._owned_term())
        tree, leaves = codec.encode(state)
        run = terms.read_run(self._storage)
        try:
            manifest = write_checkpoint(
                self._storage,
                name,
                tree,
                leaves,
                run=run.run if run else "",
                pinned=tuple(pinned),
                written_by=WRITTEN_BY,
                versions={**versions(), "torch": str(torch.__version__), "cuda": torch.version.cuda or ""},
            )
        except StorageUnusable:
            self._tidy(pruning.sweep)  # on a full disk the debris of this attempt may be what stops the next one
            raise
        seconds = time.monotonic() - began
        self._tidy(lambda storage, _term: terms.mark_commit(storage, name))
        self._tidy(lambda storage, term: pruning.prune(storage, self._keep, term=term))
        return Saved(name.step, name.term, manifest.bytes, seconds)

    def load(self, step: int | None = None, *, fresh: bool = False) -> Loaded | None:
        """The state of the newest checkpoint that is whole to the last byte, or of one step; None: begin anew.

        NoCheckpoint when there is no such step, or when nothing committed is whole any more. Tensors come on the CPU.
        """
        if fresh:
            return None
        if step is not None:
            manifest = reader.read_step(self._storage, step)
            return Loaded(manifest.step, manifest.term, self._read_state(manifest), ())
        skipped: list[str] = []
        for name in reader.candidates(self._storage):
            try:
                manifest = reader.read_manifest(self._storage, name)
                state = self._read_state(manifest)
            except Damaged as damage:
                skipped.append(str(damage))
                continue
            return Loaded(manifest.step, manifest.term, state, tuple(skipped))
        reader.refuse_fresh_start(self._storage, skipped)
        return None

    def list(self) -> Sequence[CheckpointInfo]:
        """Every checkpoint, newest last, judged without reading data."""
        return reader.list_checkpoints(self._storage)

    def verify(self, step: int | None = None) -> Iterator[CheckpointInfo]:
        """Every checkpoint, or one step, with all data held against its hashes. NoCheckpoint for an unknown step."""
        if step is not None and not any(info.step == step for info in self.list()):
            raise NoCheckpoint(f"{self._storage.url} has no checkpoint of step {step}.")
        return reader.verify_checkpoints(self._storage, step)

    def prune(self) -> Sequence[str]:
        """Delete what the retention rules do not want and the debris of failed saves; return the names that went."""
        return [str(name) for name in pruning.prune(self._storage, self._keep, term=self._owned_term())]

    def _tidy(self, work: Callable[[Storage, int], object]) -> None:
        # Trouble with other files must not hide how the save itself went.
        try:
            work(self._storage, self._owned_term())
        except CheckpointError as error:
            _logger.warning("after the save: %s", error)

    def _owned_term(self) -> int:
        if self.term is None:
            raise RuntimeError("saving and pruning need a term: RunOwner.acquire(storage).ensure_term(resumed_from)")
        return self.term

    def _read_state(self, manifest: Manifest) -> Any:
        reader.verify_headers(self._storage, manifest)

        def read_tensor(name: str) -> torch.Tensor:
            entry = manifest.tensors.get(name)
            if entry is None:
                raise Damaged(str(manifest.name), f"its tree refers to a tensor {name!r} that it does not hold")
            tensor = empty(entry.dtype, entry.shape)
            reader.read_tensor_into(self._storage, manifest, name, memory_view(tensor))
            return tensor

        return codec.decode(manifest.tree, read_tensor)
