"""From the rules of a job, `checkpoint.keep`, to those of the store."""

from collections.abc import Iterable

from trainerd.checkpoint.retention import Keep
from trainerd.daemon.durations import Spacing
from trainerd.daemon.job import KeepTable
from trainerd.daemon.job_errors import Place
from trainerd.daemon.job_file import read_rules
from trainerd.daemon.job_keys import all_keys


def keep_of(table: KeepTable) -> Keep:
    """The store's rules."""
    every = table.every or Spacing()
    return Keep(
        last=table.last,
        every_steps=every.steps,
        every_seconds=every.seconds,
        newer_than_seconds=table.newer_than_seconds,
        best=table.best,
        metric=table.metric,
        mode=table.mode,
        bytes=table.bytes,
    )


def read_keep(texts: Iterable[str], flag: str) -> Keep:
    """The rules in a flag's texts; what they do not name has the job file's default. JobError, exit code 2."""
    key = next(key for key in all_keys() if key.path == "checkpoint.keep")
    rules = {inner.attribute: value for text in texts for inner, value in read_rules(key, text, Place(flag)).items()}
    return keep_of(KeepTable(**rules))
