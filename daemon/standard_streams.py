"""Standard streams that were closed when we were started (a service manager, `>&-`) must not be anyone else's file."""

import os
import sys


def occupy_closed_streams() -> None:
    """Open /dev/null in place of each closed one; otherwise the next file opened, the run's lock, would get our output.

    To be called before anything else is opened.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one, since those below are open
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", closefd=False))  # noqa: SIM115 # lives as long as we do
