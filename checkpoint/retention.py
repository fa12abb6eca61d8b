"""Which checkpoints to keep: pure decisions over what a listing says."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Keep:
    """A checkpoint is kept if any rule wants it.

    The `last` newest ones, steps divisible by `every_steps`, those younger than `newer_than_seconds`.
    """

    last: int = 3
    every_steps: int | None = None
    newer_than_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"keep.last is {self.last}: at least the newest checkpoint has to stay")
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(f"keep.every is {self.every_steps} steps: give 1 or more")


@dataclass(frozen=True)
class Kept:
    """A valid checkpoint on the lineage, as retention sees it. `time` in unix seconds."""

    step: int
    term: int
    time: float


def reasons(
    checkpoints: Sequence[Kept], keep: Keep, now: float, *, pinned: Collection[int] = ()
) -> dict[Kept, tuple[str, ...]]:
    """Why each checkpoint is kept, as the job file would say it; none means that it may go. The newest never may.

    `pinned` are steps that the newest checkpoint wants kept.
    """
    newest_first = sorted(checkpoints, key=lambda checkpoint: (checkpoint.step, checkpoint.term), reverse=True)
    return {checkpoint: _reasons(checkpoint, rank, keep, now, pinned) for rank, checkpoint in enumerate(newest_first)}


def _reasons(checkpoint: Kept, rank: int, keep: Keep, now: float, pinned: Collection[int]) -> tuple[str, ...]:
    found = []
    if rank == 0:
        found.append("newest")
    if checkpoint.step in pinned:
        found.append("pinned")
    if rank < keep.last:
        found.append(f"last {keep.last}")
    if keep.every_steps is not None and checkpoint.step % keep.every_steps == 0:
        found.append(f"every {keep.every_steps} steps")
    if keep.newer_than_seconds is not None and now - checkpoint.time < keep.newer_than_seconds:
        found.append(f"newer than {keep.newer_than_seconds:g} s")
    return tuple(found)
