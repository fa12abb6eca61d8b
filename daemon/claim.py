"""Taking a run: the first thing a daemon does, or a single process that trains without one."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trainerd.checkpoint.reader import newest_step, newest_whole_step
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.terms import RunOwner
from trainerd.daemon.job import Job


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
def claimed(job: Job, *, fresh: bool) -> Iterator[Claim]:
    """Own the job's run until the block ends.

    Raises RunOwned, StorageUnusable, FormatTooNew, NoCheckpoint, UnknownScheme; at most a lock file was then made.
    """
    storage = open_storage(job.dir, job.storage)
    owner = RunOwner.acquire(storage)
    try:
        newest = 0 if fresh else newest_step(storage) or 0
        if newest >= job.max_iter:
            # Nobody will load it, and so nobody else would notice that it is damaged.
            newest = newest_whole_step(storage) or 0
        yield Claim(owner, newest, job.max_iter)
    finally:
        owner.release()
