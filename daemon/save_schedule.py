"""When a checkpoint is due. Pure: the time is passed in."""

from dataclasses import dataclass, replace

from trainerd.daemon.durations import Interval

AUTO_SHARE = 0.01  # of the time, at most, goes into saving
AUTO_SHORTEST_SECONDS = 5.0
AUTO_LONGEST_SECONDS = 600.0  # no more than this may be lost, even where saving then costs more than AUTO_SHARE
AUTO_FIRST_SECONDS = 10.0  # before any save was measured
RETRY_SECONDS = 10.0  # after a save that failed, unless the interval itself is shorter


@dataclass(frozen=True)
class SaveRecord:
    """The saves so far, as one worker knows them: times are monotonic, `save_seconds` None until one was measured."""

    saved_step: int
    tried_at: float
    save_seconds: float | None = None
    failed: bool = False

    def succeeded(self, step: int, save_seconds: float, now: float) -> "SaveRecord":
        """Return the record after a save of `step` that took `save_seconds` and ended at `now`."""
        return SaveRecord(step, now, save_seconds)

    def failed_at(self, now: float) -> "SaveRecord":
        """Return the record after a save that failed at `now`."""
        return replace(self, tried_at=now, failed=True)


def is_due(every: Interval, record: SaveRecord, step: int, now: float) -> bool:
    """Return whether the state after `step` should be saved now.

    A step interval is due at its multiples, whatever step the run was resumed from; a time interval counts from the
    end of the last save. A failed save is tried again after RETRY_SECONDS or at the next regular time, whichever comes
    first.
    """
    if step == record.saved_step:
        return False
    waited_seconds = now - record.tried_at
    if record.failed and waited_seconds >= min(RETRY_SECONDS, interval_seconds(every, record)):
        return True
    if every.steps is not None:
        return step % every.steps == 0
    return waited_seconds >= interval_seconds(every, record)


def interval_seconds(every: Interval, record: SaveRecord) -> float:
    """Return the time between two saves; for a step interval it only bounds the wait after a failed one."""
    if every.seconds is not None:
        return every.seconds
    if every.steps is not None:
        return RETRY_SECONDS
    if record.save_seconds is None:
        return AUTO_FIRST_SECONDS
    return min(max(record.save_seconds / AUTO_SHARE, AUTO_SHORTEST_SECONDS), AUTO_LONGEST_SECONDS)
