"""The exit codes of trainerd: one table for the daemon, the worker, the documents and whoever restarts us."""

from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """What a process of trainerd says when it ends; `meaning` and `restart` are the words of docs/commands.md."""

    meaning: str
    restart: str

    def __new__(cls, value: int, meaning: str, restart: str) -> Self:
        """An int that carries its line of the table."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        member.restart = restart
        return member

    FINISHED = 0, "finished, or stopped on request after saving", "no"
    BUDGET_USED_UP = 1, "restart budget used up; `diff --exit-code` found differences", "by hand"
    WRONG_USAGE = 2, "wrong use of the command line", "no"
    DAMAGE_FOUND = 65, "`verify` or `copy` found damage", "no"
    STORAGE_UNUSABLE = 74, "storage unusable (permission, full, unreachable), after retries", "yes, later"
    PREEMPTED_SAVED = 75, "preempted, state saved", "yes"
    PREEMPTED_UNSAVED = 76, "preempted, newest state **not** saved in time", "yes"
    BAD_HOST = 77, "this host is bad", "yes, elsewhere"
    BAD_JOB = 78, "bad job file, target or state that cannot be saved or loaded", "no"
    RUN_OWNED = 79, "another live daemon owns the run", "no"
    SAME_FAILURE = 93, "fails the same way without progress", "no"
    INTERRUPTED = 130, "a command other than `run` was interrupted from the keyboard", "no"
    READER_GONE = 141, "whoever read the output of `run` or of a help text has gone", "no"


def exit_code_of(error: Exception) -> ExitCode | None:
    """The exit code of an error whose text is meant for the user; None: any other error, a fault of the program."""
    from trainerd.checkpoint.errors import CheckpointError, RunOwned, StorageUnusable
    from trainerd.daemon.job_errors import JobError

    if isinstance(error, JobError):
        return error.exit_code
    if isinstance(error, RunOwned):
        return ExitCode.RUN_OWNED
    if isinstance(error, StorageUnusable):
        return ExitCode.STORAGE_UNUSABLE
    if isinstance(error, CheckpointError):
        return ExitCode.BAD_JOB
    return None
