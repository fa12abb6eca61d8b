"""Processes that load data: they survive signals meant for the trainer, and never the trainer itself."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.utils.data  # noqa: TC002 - its exit functions must be registered before ours, to run after it

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PR_SET_PDEATHSIG = 1  # linux/prctl.h
JOIN_SECONDS = 5.0

# A scheduler signals every process of a job at once, and Ctrl-C the whole terminal. The trainer answers by
# finishing its step, for which it needs its loader processes.
NOT_MEANT_FOR_US = (signal.SIGINT, signal.SIGUSR2)
HELD_BACK_AT_START = (signal.SIGTERM, *NOT_MEANT_FOR_US)

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclass
class ProcessStart:
    """The `worker_init_fn` of our loader processes; calls the user's own afterwards."""

    user_init: Callable[[int], None] | None
    creator_pid: int = 0
    tied_to_creator: bool = False

    def prepare(self, start_method: str) -> None:
        """Note, in the creating process, what the new ones must know about it."""
        self.creator_pid = os.getpid()
        # The kernel sends the death signal when the creating *thread* ends, not the process.
        self.tied_to_creator = threading.current_thread() is threading.main_thread()
        if start_method == "forkserver":
            self.creator_pid = 0  # the server creates them; it ends with this process, and they with it

    def __call__(self, worker_id: int) -> None:
        """Set the new process up."""
        if self.tied_to_creator and _libc is not None:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if self.creator_pid and os.getppid() != self.creator_pid:
                os._exit(1)  # it died before the call above could tie us to it
        for signum in NOT_MEANT_FOR_US:
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_MEANT_FOR_US)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # a fork server does not pass ours on
        threading.Thread(target=_answer_sigterm, name="sigterm", daemon=True).start()
        if self.user_init is not None:
            self.user_init(worker_id)


def _answer_sigterm() -> None:
    """End this process on a SIGTERM from the trainer (DataLoader's last resort), and on nobody else's.

    SIGTERM stays blocked and is taken from the queue here, since only there is its sender known. A process
    that holds the interpreter lock for good never gets here: `LoaderProcesses.close` kills it.
    """
    trainer = multiprocessing.parent_process()
    while True:
        info = signal.sigwaitinfo([signal.SIGTERM])
        if trainer is None or info.si_pid == trainer.pid:
            os._exit(0)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Leave signals pending: new processes inherit the mask, so none of them dies before it is set up."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK_AT_START)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LoaderProcesses:
    """Starts DataLoader's iterators, and ends their processes within bounded time."""

    def __init__(self) -> None:
        self._iterator: Any = None
        self._owner_pid = os.getpid()
        _open.add(self)

    def start(self, loader: torch.utils.data.DataLoader[Any], process_start: ProcessStart) -> Iterator[Any]:
        """Return a new iterator; persistent processes of the one before are used again."""
        if loader.num_workers == 0:
            return iter(loader)
        context = loader.multiprocessing_context or multiprocessing
        process_start.prepare(context.get_start_method())
        with _signals_held_back():
            self._iterator = iter(loader)
        return self._iterator  # type: ignore[no-any-return]

    def close(self) -> None:
        """End all processes: asked first, and one that is stuck killed after ten seconds."""
        iterator, self._iterator = self._iterator, None
        if iterator is None or os.getpid() != self._owner_pid:
            return
        iterator._shutdown_workers()
        for process in iterator._workers:
            if process.is_alive():
                process.kill()
            process.join(JOIN_SECONDS)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()


_open: weakref.WeakSet[LoaderProcesses] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close before multiprocessing's own exit function, which waits for every child without a limit."""
    for processes in list(_open):
        processes.close()
