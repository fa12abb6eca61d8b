"""Killing whole trees of real processes, from a daemon that is a child of the test."""

import subprocess
import sys
from pathlib import Path

from support.runs import eventually, is_alive

# Each case runs in a process of its own, since a subreaper adopts orphans for life.
DAEMON = """
import os, signal, subprocess, sys, time
from trainerd.daemon.process_tree import *

def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)

def tree(script):
    worker = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    return worker

become_subreaper()
FOLDER = {folder!r}
"""

FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def note(name): open(os.path.join(%r, name), "w").write(str(os.getpid()))
def sleep(): time.sleep(600)
if os.fork() == 0:
    note("child"); sleep()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        note("orphan in its own session"); sleep()
    os._exit(0)
if os.fork() == 0:
    note("stopped"); os.kill(os.getpid(), signal.SIGSTOP); sleep()
note("worker")
sleep()
"""


def run_daemon(folder: Path, script: str) -> str:
    command = [sys.executable, "-c", DAEMON.format(folder=str(folder)) + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_of_a_tree_survives(tmp_path: Path) -> None:
    """Children, orphans in sessions of their own and stopped processes are killed and reaped; what is spared lives."""
    script = f"""
spared = subprocess.Popen(["sleep", "600"])
worker = tree({FAMILY % str(tmp_path)!r})
until(lambda: len(os.listdir(FOLDER)) == 4)
until(lambda: all(open(os.path.join(FOLDER, name)).read() for name in os.listdir(FOLDER)))
assert len(descendants()) >= 5
until(lambda: not kill_and_reap(frozenset([spared.pid]), worker.pid) or worker.poll())
until(lambda: not kill_and_reap(frozenset([spared.pid]), worker.pid))
assert worker.wait() == -signal.SIGKILL
assert [process.pid for process in descendants()] == [spared.pid]
assert spared.poll() is None
spared.kill(); spared.wait()
"""
    run_daemon(tmp_path, script)
    for path in tmp_path.iterdir():
        assert not is_alive(int(path.read_text())), path.name


def test_reaping_orphans_never_takes_the_workers_exit_status(tmp_path: Path) -> None:
    """A dead orphan is collected; the status of the worker is still there for whoever started it."""
    script = '''
release = os.path.join(FOLDER, "release")
orphan = f"while not os.path.exists({release!r}): time.sleep(0.005)"
worker = tree(f"""import os, time
if os.fork() == 0:
    if os.fork() == 0:
        {orphan}
    os._exit(0)
os.wait()
time.sleep(600)
""")
until(lambda: {process.parent for process in descendants()} == {os.getpid()} and len(descendants()) == 2)
open(release, "w").close()
until(lambda: (reap_orphans(worker.pid), len(descendants()) == 1)[1])
worker.send_signal(signal.SIGUSR1)
until(lambda: os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
reap_orphans(worker.pid)
assert worker.wait() == -signal.SIGUSR1
'''
    run_daemon(tmp_path, script)


def test_a_worker_and_its_forked_children_die_with_the_daemon(tmp_path: Path) -> None:
    """SIGKILL of the daemon takes the worker and what it has forked along; a thread's child is left to its parent."""
    worker = """
import os, sys, threading, time
from trainerd.daemon.process_tree import children_die_with_us, die_with_parent
die_with_parent(int(sys.argv[1]))
children_die_with_us()
def fork(name):
    if os.fork() == 0:
        open(os.path.join(sys.argv[2], name), "w").write(str(os.getpid()))
        time.sleep(600)
thread = threading.Thread(target=fork, args=("child of a thread that has ended",))
thread.start(); thread.join()
fork("child")
open(os.path.join(sys.argv[2], "worker"), "w").write(str(os.getpid()))
time.sleep(600)
"""
    script = f"""
subprocess.Popen([sys.executable, "-W", "ignore", "-c", {worker!r}, str(os.getpid()), FOLDER])
time.sleep(600)
"""
    command = [sys.executable, "-c", DAEMON.format(folder=str(tmp_path)) + script]
    daemon = subprocess.Popen(command)

    def pids() -> dict[str, int]:
        return {path.name: int(path.read_text() or 0) for path in tmp_path.iterdir()}

    eventually("whole family", lambda: len(pids()) == 3 and all(pids().values()))
    family = pids()
    stray = family.pop("child of a thread that has ended")
    assert is_alive(stray)
    daemon.kill()
    daemon.wait()
    eventually("their death", lambda: not any(map(is_alive, family.values())), say=lambda: str(family))
    subprocess.run(["kill", "-KILL", str(stray)], check=True)
