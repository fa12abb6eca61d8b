"""Starting a worker process, and holding what the daemon has of it: its pipes, its socket, its status page, its end."""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from trainerd.daemon.job import Job
from trainerd.daemon.messages import Begin, DaemonMessage, Distrust, Start, WorkerMessage, decode_worker, encode
from trainerd.daemon.output import STDERR, STDOUT, LineGate, Output
from trainerd.daemon.process_tree import Process, descendants, kill_and_reap, reap_orphans, signal_all
from trainerd.daemon.signals import hold_stop_signals
from trainerd.daemon.status_page import StatusPage

PIPE_BYTES = 2**20  # so that a worker that prints much seldom waits for us to be scheduled
READ_BYTES = 2**16
TERM_SECONDS = 1.0  # from SIGTERM to SIGKILL when a worker's time is up
KILL_SECONDS = 20.0  # for the kernel to end what was killed; what is left then cannot be killed at all


class Worker:
    """One worker process and all that it starts; `on_news` is called whenever there is something to look at."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        link: socket.socket,
        page: StatusPage,
        output: Output,
        spare: frozenset[int],
    ) -> None:
        self.pid = process.pid
        self.page = page
        self._process = process
        self._link = link
        self._output = output
        self._spare = spare
        self._received = bytearray()
        self._gates = {STDOUT: LineGate(), STDERR: LineGate()}
        self._pipes = {STDOUT: process.stdout, STDERR: process.stderr}
        self._pidfd: int | None = None

    def attend(self, on_news: Callable[[], None]) -> None:
        """Read the pipes and the socket from the running event loop; must be called once."""
        loop = asyncio.get_running_loop()
        for fd, pipe in self._pipes.items():
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            loop.add_reader(pipe.fileno(), self._forward, fd)
        self._link.setblocking(False)
        loop.add_reader(self._link.fileno(), self._receive, on_news)
        with contextlib.suppress(OSError):  # without pidfd the loop's next tick sees the exit
            self._pidfd = os.pidfd_open(self.pid)
            loop.add_reader(self._pidfd, self._exited, on_news)

    @property
    def exit_status(self) -> int | None:
        """None while it lives; the exit status, or the negative number of the signal that killed it."""
        return self._process.poll()

    def messages(self) -> list[WorkerMessage]:
        """Return, once each, the messages that have come; lines that are none of ours are told to the user."""
        end = self._received.rfind(b"\n") + 1
        lines, self._received = self._received[:end].splitlines(), self._received[end:]
        messages: list[WorkerMessage] = []
        for line in lines:
            try:
                messages.append(decode_worker(bytes(line)))
            except msgspec.DecodeError:
                self._output.say(f"the worker sent what is no message: {bytes(line[:200])!r}")
        return messages

    def begin(self, term: int) -> None:
        """Tell the worker to train."""
        self._send(Begin(term))

    def distrust(self, path: str) -> None:
        """Tell the worker that a data file of the run is damaged."""
        self._send(Distrust(path))

    def reap_orphans(self) -> None:
        """Collect processes that the worker has left behind dead."""
        reap_orphans(self.pid)

    async def end(self, *, gently: bool) -> list[Process]:
        """See to it that nothing of the worker is alive; return what cannot be killed. `gently`: SIGTERM first."""
        if gently:
            signal_all([*descendants(self.pid), *(p for p in descendants() if p.pid == self.pid)], signal.SIGTERM)
            await self._until_gone(TERM_SECONDS)
        deadline = time.monotonic() + KILL_SECONDS
        while left := kill_and_reap(self._spare, self.pid):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.01)
            self._process.poll()
        self._let_go()
        return left

    async def _until_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.exit_status is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _send(self, message: DaemonMessage) -> None:
        with contextlib.suppress(OSError):  # a worker that died meanwhile; its exit is news of its own
            self._link.sendall(encode(message))

    def _receive(self, on_news: Callable[[], None]) -> None:
        if not self._read_link():
            asyncio.get_running_loop().remove_reader(self._link.fileno())
        on_news()

    def _read_link(self) -> bool:
        try:
            chunk = self._link.recv(READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._received += chunk
        return bool(chunk)

    def _forward(self, fd: int) -> None:
        if not self._read_pipe(fd):
            pipe = self._pipes[fd]
            assert pipe is not None
            asyncio.get_running_loop().remove_reader(pipe.fileno())

    def _read_pipe(self, fd: int) -> bool:
        pipe = self._pipes[fd]
        assert pipe is not None
        try:
            chunk = os.read(pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return False
        if whole := self._gates[fd].feed(chunk):
            self._output.pass_through(fd, whole)
        return bool(chunk)

    def _exited(self, on_news: Callable[[], None]) -> None:
        assert self._pidfd is not None
        asyncio.get_running_loop().remove_reader(self._pidfd)
        on_news()

    def _let_go(self) -> None:
        """Take what the dead have left in socket and pipes; close all but the page, which is still to be read."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._link.fileno())
        before = -1
        while len(self._received) != before:
            before = len(self._received)
            self._read_link()
        self._link.close()
        for fd, pipe in self._pipes.items():
            assert pipe is not None
            loop.remove_reader(pipe.fileno())
            while self._read_pipe(fd):
                pass
            if rest := self._gates[fd].flush():
                self._output.pass_through(fd, rest)
            pipe.close()
        if self._pidfd is not None:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)


def launch(job: Job, *, fresh: bool, step: int, output: Output) -> Worker:
    """Start a worker for `job`, told to leave checkpoints aside if `fresh`; `step` is shown until it has loaded.

    OSError when no process can be started. Main thread only: the kernel kills the worker when the thread that started
    it ends.
    """
    spare = frozenset(process.pid for process in descendants())
    page = StatusPage.create(step)
    link, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "trainerd.daemon.worker"]
    arguments = [str(theirs.fileno()), str(page.fd), str(os.getpid())]
    mask = hold_stop_signals()
    try:
        process = subprocess.Popen(
            command + arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(), page.fd),
            # A session of its own: Ctrl-C in a terminal goes to its foreground group, and we ask the worker ourselves.
            start_new_session=True,
            # Unbuffered, or the last lines before a SIGKILL would be lost.
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    except OSError:
        link.close()
        page.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        with contextlib.suppress(OSError):  # a user's allowance for pipes may be used up
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    worker = Worker(process, link, page, output, spare)
    worker._send(Start(job.to_json().decode(), fresh))
    return worker
