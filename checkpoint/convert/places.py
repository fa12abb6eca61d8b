"""What lies in a folder that is to become a run, or a copy of one."""

from trainerd.checkpoint import layout
from trainerd.checkpoint.storage import Storage

_OURS = {layout.RUN_FILE, layout.LOCK_FILE, layout.TERMS, layout.CHECKPOINTS}


def foreign_names(storage: Storage) -> str:
    """Name the first of those that no run has, "" if there are none; what a crash left of our own is ours."""
    foreign = [name for name in storage.names("") if name not in _OURS and not name.endswith(layout.TEMPORARY_SUFFIX)]
    return ", ".join(foreign[:3])
