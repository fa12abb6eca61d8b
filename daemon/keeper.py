"""Whoever keeps the run on behalf of a worker: the daemon that started it, or the process itself."""

import logging
import select
import socket
import sys
from typing import Protocol

from trainerd.checkpoint.ownership import RunOwner
from trainerd.daemon.exit_codes import ExitCode
from trainerd.daemon.messages import (
    Begin,
    DaemonMessage,
    Distrust,
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

    def distrusted(self) -> list[str]:
        """Data files of the run that were found damaged since this was last asked."""


class Daemon:
    """The daemon at the other end of a socket."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._distrusted: list[str] = []
        # Unbuffered, so that select tells whether there is more.
        self._lines = link.makefile("rb", buffering=0)

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
        while isinstance(answer, Distrust):
            self._distrusted.append(answer.path)
            answer = self.listen()
        assert isinstance(answer, Begin)
        return answer.term

    def tell(self, message: WorkerMessage) -> None:
        """Send `message`."""
        try:
            self._link.sendall(encode(message))
        except OSError:  # the daemon is dead; the kernel is about to kill us
            sys.exit(ExitCode.BUDGET_USED_UP)

    def distrusted(self) -> list[str]:
        """Data files that the daemon has found damaged."""
        while select.select([self._link], [], [], 0)[0]:
            message = self.listen()
            assert isinstance(message, Distrust)
            self._distrusted.append(message.path)
        told, self._distrusted = self._distrusted, []
        return told


class Ourselves:
    """No daemon: this process owns the run itself."""

    def __init__(self, owner: RunOwner) -> None:
        self._owner = owner

    def begin(self, ready: Ready) -> int:
        """Begin a term."""
        for reason in ready.skipped:
            logger.warning("passed over a newer checkpoint: %s", reason)
        return self._owner.ensure_term(ready.step)

    def distrusted(self) -> list[str]:
        """Nothing: nobody looks beside us."""
        return []

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
