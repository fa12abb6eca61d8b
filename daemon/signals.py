"""Signals that mean "stop": the handler only sets a flag or wakes a loop."""

import math
import multiprocessing.util
import os
import signal
import threading
import time
from collections.abc import Callable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# How long a forked child waits for the news that a signal was meant for the whole job, not only for it.
_JOB_WIDE_WITHIN_SECONDS = 0.2


class Stop:
    """The request to stop: made once, by the first signal; those after it change nothing."""

    def __init__(self) -> None:
        self.reason = ""
        self.asked_at = math.inf
        self.on_ask: Callable[[], object] | None = None

    @property
    def asked(self) -> bool:
        """Whether it was made."""
        return self.reason != ""

    def ask(self, reason: str) -> None:
        """Make it, because of `reason` (a signal's name); safe in a signal handler."""
        if not self.asked:
            self.asked_at = time.monotonic()
            self.reason = reason
            if self.on_ask is not None:
                self.on_ask()


def catch_stop_signals(on_stop: Callable[[str], None]) -> None:
    """Call `on_stop` with a signal's name whenever one of STOP_SIGNALS arrives; main thread only.

    A closed terminal (SIGHUP) is a stop like the others, unless `nohup` had it ignored.
    """

    def handle(number: int, _frame: object) -> None:
        on_stop(signal.Signals(number).name)

    for number in STOP_SIGNALS:
        if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue
        signal.signal(number, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def ignore_stop_signals() -> None:
    """For the way out: the exit code is decided, and a second signal must not replace it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def hold_stop_signals() -> set[signal.Signals]:
    """Leave stop signals pending; return the mask to restore. A child started meanwhile inherits that."""
    return {signal.Signals(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)}


def keep_stop_signals_from_children(stop_requested: Callable[[], bool]) -> None:
    """Give processes that are forked from now on their own answer to stop signals, in place of our handlers.

    Inherited, our handlers would stop the whole run when a loader process is terminated. A signal to the whole job (a
    scheduler's; `stop_requested` says so within moments) leaves them alive: the step in progress needs their data. A
    SIGTERM to one of them alone, or from its parent, ends it as always.
    """

    def in_any_child() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def in_multiprocessing_child(_: object) -> None:
        # Blocked and taken from the queue by a thread: torch's loader processes install a handler in C that would end
        # them, and only the queue tells the sender.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_answer_sigterm, args=[stop_requested], name="sigterm", daemon=True).start()

    os.register_at_fork(after_in_child=in_any_child)
    # Kept alive by the line above; multiprocessing itself holds it only weakly.
    multiprocessing.util.register_after_fork(in_any_child, in_multiprocessing_child)


def _answer_sigterm(stop_requested: Callable[[], bool]) -> None:
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    while True:
        sender = signal.sigwaitinfo([signal.SIGTERM]).si_pid
        if sender != parent and _becomes_true(stop_requested, _JOB_WIDE_WITHIN_SECONDS):
            continue
        # To this thread, the only one that does not block it; whoever installed a handler gets it called.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _becomes_true(condition: Callable[[], bool], within_seconds: float) -> bool:
    deadline = time.monotonic() + within_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
