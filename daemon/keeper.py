"""Whoever keeps the run on behalf of a worker: the daemon that started it, or the process itself."""

import logging
import socket
import sys
from typing import Protocol

from trainerd.checkpoint.ownership import RunOwner
from trainerd.daemon.exit_codes import ExitCode
from trainerd.daemon.messages import (
    Begin,
    DaemonMessage,
    Failed,
    Finished,
    Ready,
    Saved,
    SaveFailed,
    Stopped,
    WorkerMessage,
    decode_daemon,
    encode,
)

logger = logging.getLogger("trainerd.worker")


class Keeper(Protocol):
    """Whoever keeps the run on behalf of a worker: a daemon, or the process itself."""

    def begin(self, ready: Ready) -> int:
        """Begin the term in which training may go on from `ready`; return it."""

    def tell(self, message: WorkerMessage) -> None:
        """Take note of `message`."""


class Daemon:
    """The daemon at the other end of a socket."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lines = link.makefile("rb")

    def listen(self) -> DaemonMessage:
        """Wait for the daemon's next message; exit if there is no daemon any more."""
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            sys.exit(ExitCode.BUDGET_USED_UP)
        return decode_daemon(line)

    def begin(self, ready: Ready) -> int:
        """Say that we are ready, and wait until we may train."""
        self.tell(ready)
        answer = self.listen()
        assert isinstance(answer, Begin)
        return answer.term

    def tell(self, message: WorkerMessage) -> None:
        """Send `message`."""
        try:
            self._link.sendall(encode(message))
        except OSError:  # the daemon is dead; the kernel is about to kill us
            sys.exit(ExitCode.BUDGET_USED_UP)


class Ourselves:
    """No daemon: this process owns the run itself."""

    def __init__(self, owner: RunOwner) -> None:
        self._owner = owner

    def begin(self, ready: Ready) -> int:
        """Begin a term."""
        for reason in ready.skipped:
            logger.warning("passed over a newer checkpoint: %s", reason)
        return self._owner.ensure_term(ready.step)

    def tell(self, message: WorkerMessage) -> None:
        """Log what a daemon would show."""
        match message:
            case Saved():
                logger.info("checkpoint of step %d saved in %.2f s", message.step, message.seconds)
            case Finished():
                logger.info("finished at step %d", message.step)
            case Stopped():
                saved = "its state is saved" if message.saved else "its state is NOT saved"
                logger.info("stopped at step %d; %s", message.step, saved)
            case Failed():
                logger.error("%s", message.reason)
            case Ready() | SaveFailed():
                pass
