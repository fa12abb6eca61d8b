"""Taking a run: the first thing a daemon does, or a single process that trains without one."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.reader import newest_step
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.verifying import newest_whole_step
from trainerd.daemon.exit_codes import ExitCode
from trainerd.daemon.job import Job
from trainerd.daemon.job_errors import JobError

HEED_SECONDS = 0.1  # from a signal to its effect, while we wait


@dataclass(frozen=True)
class Claim:
    """A run that is ours; `newest_step` is the newest checkpoint's step, 0 if the run starts from the beginning."""

    owner: RunOwner
    newest_step: int
    max_iter: int

    @property
    def nothing_to_do(self) -> str:
        """Why nothing is left to train; "" if something is."""
        if self.newest_step < self.max_iter:
            return ""
        return (
            f"already trained to step {self.newest_step}, and max_iter is {self.max_iter}: nothing to do, nothing "
            f"changed. A larger --max-iter trains on; --fresh starts again from step 0"
        )


@contextmanager
def claimed(job: Job, *, fresh: bool, take_over: bool, stop_asked: Callable[[], bool]) -> Iterator[Claim]:
    """Own the job's run until the block ends; `stop_asked` ends the wait for signs of life of its former owner.

    Raises JobError, RunOwned, StorageUnusable, FormatTooNew, NoCheckpoint, UnknownScheme; no more than a lock file or
    a sign of life was then made.
    """
    storage = open_storage(job.dir, job.storage)
    if not storage.guarantees.shared:
        raise JobError(
            f"{job.dir} is {storage.guarantees.backend}: no other process would ever see a checkpoint there, and it "
            f"is gone when this one ends. Give a folder or a URL that lasts as --dir."
        )

    def sleep(seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if stop_asked():
                raise JobError("stopped before the run was taken; nothing was changed", ExitCode.PREEMPTED_SAVED)
            time.sleep(min(left, HEED_SECONDS))

    owner = RunOwner.acquire(storage, take_over=take_over, sleep=sleep)
    try:
        newest = 0 if fresh else newest_step(storage) or 0
        if newest >= job.max_iter:
            # Nobody will load it, and so nobody else would notice that it is damaged.
            newest = newest_whole_step(storage) or 0
        yield Claim(owner, newest, job.max_iter)
    finally:
        owner.release()
