"""The daemon: holds a trainer in a worker process and brings it back after any death. Never imports torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainerd.daemon.exit_codes import ExitCode as ExitCode
    from trainerd.daemon.job import Job as Job
    from trainerd.daemon.job_errors import JobError as JobError

_HOME = {
    "ExitCode": "trainerd.daemon.exit_codes",
    "Job": "trainerd.daemon.job",
    "JobError": "trainerd.daemon.job_errors",
}

__all__ = ["ExitCode", "Job", "JobError"]  # resolved by __getattr__


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
