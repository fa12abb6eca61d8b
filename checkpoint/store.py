"""The facade: save, load, list, verify and prune the checkpoints of one run."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainerd.checkpoint import codec, listing, pins, reader, terms, trees, verifying
from trainerd.checkpoint.errors import DISK_FULL, CheckpointError, Damaged, NoCheckpoint, StorageUnusable
from trainerd.checkpoint.incremental import Unchanged
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.lazy_state import LazyState
from trainerd.checkpoint.listing import CheckpointInfo
from trainerd.checkpoint.live_tensors import read_tensors
from trainerd.checkpoint.manifest import Manifest
from trainerd.checkpoint.pruning import Pruner
from trainerd.checkpoint.retention import Candidate, Keep
from trainerd.checkpoint.storage import Storage
from trainerd.checkpoint.tensor_values import Leaf
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
        self._pruner = Pruner(storage)
        self._newest: Manifest | None = None  # as far as this object has saved or loaded it, every byte
        self._unchanged = Unchanged()
        self._distrusted: set[str] = set()
        self.term = term

    def check(self, state: object) -> None:
        """Encode and decode the state without writing or copying: UnsupportedState names what would not come back."""
        codec.check_inverse(state)

    def save(
        self, step: int, state: object, *, pinned: Sequence[int] = (), metrics: Mapping[str, float] | None = None
    ) -> Saved:
        """Commit the state of a step, then prune. UnsupportedState, StorageUnusable: earlier checkpoints are untouched.

        TakenOver: another daemon trains here now, so nothing was written.
        Checkpoints of `pinned` steps are kept, whatever the retention rules say, as long as this one is the newest.
        By one of `metrics` a checkpoint may be kept as one of the best; what is not finite never is, and is left out.
        Tensors are read while this runs; nothing may change them until it returns.
        """
        began = time.monotonic()
        name = CheckpointName(step, self._owned_term())
        terms.check_not_taken_over(self._storage, name.term)
        tree, leaves = codec.encode(state)
        finite = {metric: float(value) for metric, value in (metrics or {}).items() if math.isfinite(value)}
        try:
            manifest = self._write(name, tree, leaves, tuple(pinned), finite)
        except StorageUnusable as error:
            if error.errno not in DISK_FULL:
                raise
            # What would go after this save may be all that is in the way; anything more waits for the next save.
            self._prune(upcoming=Candidate(name, time.time(), finite, {}))
            manifest = self._write(name, tree, leaves, tuple(pinned), finite)
        seconds = time.monotonic() - began
        self._newest = manifest
        self._tidy(lambda storage, _term: terms.mark_commit(storage, name))
        self._prune()
        return Saved(name.step, name.term, manifest.bytes, seconds)

    def load(self, step: int | None = None, *, into: object | None = None, fresh: bool = False) -> Loaded | None:
        """The state of the newest checkpoint that is whole to the last byte, or of one step; None: begin anew.

        `into` is a state, or a part of one from its root, whose tensors are filled in place; others come on the CPU.
        NoCheckpoint when there is no such step, or when nothing committed is whole any more; DoesNotFit when `into`
        has other tensors. After any other error the tensors of `into` hold anything.
        """
        if fresh:
            return None
        if step is not None:
            return self._load(reader.read_step(self._storage, step), into, ())
        skipped: list[str] = []
        for manifest in reader.valid_manifests(self._storage, skipped):
            try:
                return self._load(manifest, into, tuple(skipped))
            except Damaged as damage:
                skipped.append(str(damage))
        return None

    def open(self, step: int | None = None) -> LazyState:
        """The newest valid state, or that of a step, without its tensors: each is read and verified when touched.

        NoCheckpoint when there is none, Damaged when that step's manifest or files are; damage inside a file shows when
        it is touched.
        """
        manifest = reader.read_valid(self._storage, step)
        return LazyState(manifest.tree, lambda names: read_tensors(self._storage, manifest, names))

    def list(self) -> Sequence[CheckpointInfo]:
        """Every checkpoint, newest last, judged without reading data."""
        return listing.list_checkpoints(self._storage)

    def verify(self, step: int | None = None) -> Iterator[CheckpointInfo]:
        """Every checkpoint, or one step, with all data held against its hashes. NoCheckpoint for an unknown step."""
        if step is not None and not any(info.step == step for info in self.list()):
            raise NoCheckpoint(f"{self._storage.url} has no checkpoint of step {step}.")
        return verifying.verify_checkpoints(self._storage, step)

    def distrust(self, paths: Iterable[str]) -> None:
        """Never refer to these data files (paths in the run) again: they were found damaged."""
        self._distrusted.update(paths)

    def prune(self, *, dry_run: bool = False) -> Sequence[str]:
        """Delete what the retention rules do not want and the debris of failed saves; return the names that went.

        A dry run deletes nothing, needs no term, and returns the names that would go.
        """
        term = None if dry_run else self._owned_term()
        plan = self._pruner.plan(self._keep) if term is None else self._pruner.prune(self._keep, term=term)
        return [str(name) for name in (*plan.goes, *plan.debris)]

    def pin(self, step: int, note: str = "") -> None:
        """Keep a step's checkpoint, whatever the rules say, until `unpin`. NoCheckpoint if there is none."""
        pins.pin(self._storage, reader.name_of_step(self._storage, step), note)

    def unpin(self, step: int) -> None:
        """Let the rules decide again about a step that was pinned with `pin`. NoCheckpoint if it was not."""
        pins.unpin(self._storage, step)

    def _tidy(self, work: Callable[[Storage, int], object]) -> None:
        # Trouble with other files must not hide how the save itself went.
        try:
            work(self._storage, self._owned_term())
        except CheckpointError as error:
            _logger.warning("after the save: %s", error)

    def _prune(self, upcoming: Candidate | None = None) -> None:
        self._tidy(lambda _storage, term: self._pruner.prune(self._keep, term=term, upcoming=upcoming))

    def _owned_term(self) -> int:
        if self.term is None:
            raise RuntimeError("saving and pruning need a term: RunOwner.acquire(storage).ensure_term(resumed_from)")
        return self.term

    def _write(
        self,
        name: CheckpointName,
        tree: Any,
        leaves: Mapping[str, Leaf],
        pinned: tuple[int, ...],
        metrics: Mapping[str, float],
    ) -> Manifest:
        run = terms.read_run(self._storage)
        try:
            return write_checkpoint(
                self._storage,
                name,
                tree,
                leaves,
                run=run.run if run else "",
                pinned=pinned,
                metrics=metrics,
                keep=self._keep.as_recorded(),
                reused=self._unchanged.find(self._storage, leaves, self._newest, self._distrusted),
                written_by=WRITTEN_BY,
                versions={**versions(), "torch": str(torch.__version__), "cuda": torch.version.cuda or ""},
            )
        except StorageUnusable as error:
            if error.may_have_committed:
                # Its files must be there if the manifest still appears; a later term sweeps them if it does not.
                self._pruner.spare(name)
            else:
                # On a full disk the debris of this attempt may be what stops the next one.
                self._tidy(lambda _storage, term: self._pruner.sweep(term=term))
            raise

    def _load(self, manifest: Manifest, into: object | None, skipped: tuple[str, ...]) -> Loaded:
        reader.verify_headers(self._storage, manifest)
        names = [*manifest.tensors, *trees.tensors_in(manifest.tree)]
        tensors = read_tensors(self._storage, manifest, names, into)
        state = codec.decode(manifest.tree, tensors.__getitem__)
        self._newest = manifest
        return Loaded(manifest.step, manifest.term, state, skipped)
