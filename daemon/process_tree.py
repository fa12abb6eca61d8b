"""A worker's process tree: tied to the daemon's life, and gone to the last process before the next worker starts.

The daemon is a child subreaper: whatever the worker leaves behind, double forks and new sessions included, becomes the
daemon's own descendant and never escapes to init. So "nothing of it is alive" has a simple test: the daemon has no
descendants but those it spares.
"""

import contextlib
import ctypes
import os
import signal
import threading
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Process:
    """One process as /proc shows it; the start time (clock ticks since boot) tells it from a later one of its pid."""

    pid: int
    parent: int
    started: int


def become_subreaper() -> None:
    """Make this process the parent of all orphans among its descendants."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when the thread that started it ends; exit now if `parent` is gone."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Asked only now: a parent that died before the call above would send no signal any more.
    if os.getppid() != parent:
        os._exit(1)


def children_die_with_us() -> None:
    """Tie each process that this one forks from now on (loader processes) to it; what exec starts is not reached."""
    ours = os.getpid()
    tied = False

    def before() -> None:
        nonlocal tied
        # The kernel's death signal follows the *thread* that forked: tied to a short-lived thread, a healthy child
        # would be killed when that thread ends. Nor are grandchildren tied: a double fork would kill them at birth.
        tied = threading.current_thread() is threading.main_thread() and os.getpid() == ours

    def after_in_child() -> None:
        if tied:
            die_with_parent(ours)

    os.register_at_fork(before=before, after_in_child=after_in_child)


def descendants(root: int | None = None) -> list[Process]:
    """Return the descendants of `root` (default: this process) at one moment, zombies too, parents before children."""
    by_parent: dict[int, list[Process]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := _look_up(int(name))) is not None:
            by_parent.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    parents = [os.getpid() if root is None else root]
    while parents:
        family = by_parent.pop(parents.pop(), [])
        found += family
        parents += [process.pid for process in family]
    return found


def signal_all(processes: list[Process], number: signal.Signals) -> None:
    """Send `number` to those of `processes` that are still the same ones."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            _signal_one(process, number)


def kill_and_reap(spare: frozenset[int], worker: int) -> list[Process]:
    """SIGKILL every descendant that is neither in `spare` nor below one of it, reap what has died, return what is left.

    `worker` itself is left as a zombie: its exit status belongs to whoever started it. One pass, which never waits:
    call it until nothing is left, with a bound, since a process can fork while it is looked for, and one that hangs in
    the kernel cannot be killed.
    """
    targets = _without(descendants(), spare)
    signal_all(targets, signal.SIGKILL)
    ours = os.getpid()
    return [p for p in targets if p.pid == worker or p.parent != ours or not _reap(p.pid)]


def reap_orphans(worker: int) -> None:
    """Collect dead orphans that we have inherited while `worker`, whose exit status is still wanted, lives on."""
    while True:
        try:
            # WNOWAIT only looks, so the exit status of a child that is someone's own is never taken from them.
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if dead is None or dead.si_pid == worker or not _reap(dead.si_pid):
            return


def _look_up(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:  # it has ended since the folder was listed
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # a program's name may hold blanks and parentheses
    return Process(pid, int(fields[1]), int(fields[19]))


def _signal_one(process: Process, number: signal.Signals) -> None:
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        raise
    except OSError:  # a kernel or sandbox without pidfd; a reused pid is then only unlikely
        os.kill(process.pid, number)
        return
    try:
        # Looked up again after the pidfd holds it: a pid that was given to someone else meanwhile is left alone.
        now = _look_up(process.pid)
        if now is not None and now.started == process.started:
            signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)


def _reap(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _without(processes: list[Process], spare: frozenset[int]) -> list[Process]:
    spared = set(spare)
    kept = []
    for process in processes:
        if process.pid in spared or process.parent in spared:
            spared.add(process.pid)
        else:
            kept.append(process)
    return kept
