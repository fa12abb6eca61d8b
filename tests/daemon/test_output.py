"""What leaves the daemon: lines kept whole, a bounded queue, and the words of the progress line."""

import math
import os
import re
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from trainerd.daemon.output import LineGate
from trainerd.daemon.progress import Rate, View, plain_line, short_time
from trainerd.daemon.states import WorkerState

VIEW = View(WorkerState.TRAINING, "step", 1200, 2.34121, 1150, 97.0, 2, 10_000)


@given(chunks=st.lists(st.binary(max_size=20)))
def test_no_byte_is_changed_or_lost_and_lines_stay_whole(chunks: list[bytes]) -> None:
    """Whatever the cuts of the pipe, what passes ends at a line's end, and all of it passes."""
    gate = LineGate()
    passed = [gate.feed(chunk) for chunk in chunks]
    assert all(piece.endswith((b"\n", b"\r")) for piece in passed if piece)
    assert b"".join(passed) + gate.flush() == b"".join(chunks)


def test_a_line_without_end_does_not_grow_in_memory() -> None:
    """Beyond HELD_BYTES it passes in pieces."""
    gate = LineGate()
    for _ in range(100):
        gate.feed(b"x" * 65536)
        assert len(gate._held) <= LineGate.HELD_BYTES + 65536


def test_what_nobody_reads_is_dropped_and_counted() -> None:
    """The queue is bounded; a reader that comes back is told how many bytes are missing; our own lines are there."""
    script = """
import sys
from trainerd.daemon.output import QUEUE_BYTES, STDOUT, Output
output = Output()
for _ in range(2 * QUEUE_BYTES // 2**20):
    output.pass_through(STDOUT, b"z" * (2**20 - 1) + b"\\n")
output.say("still here")
sys.stdin.readline()
output.close()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdin is not None
    assert process.stdout is not None
    head = os.read(process.stdout.fileno(), 1)
    process.stdin.write(b"\n")
    process.stdin.flush()
    printed = (head + process.stdout.read()).decode()
    assert process.wait(20) == 0
    process.stdin.close()
    process.stdout.close()
    assert "trainerd: still here\n" in printed
    dropped = re.search(r"^trainerd: (\d+) bytes of the worker's output were dropped", printed, re.MULTILINE)
    assert dropped is not None
    assert printed.count("z") + printed.count("z\n") + int(dropped[1]) == 2 * 16 * 2**20


def test_a_line_of_progress_says_what_a_person_asks() -> None:
    """Step, share, rate, loss, time left, newest checkpoint with its age, restarts."""
    assert plain_line(VIEW, 35.12, now=100.0) == (
        "step 1200/10000 (12.0%)  35.1 it/s  loss 2.341  ETA 4 min 10 s  checkpoint 1150 (3 s ago)  restarts 2"
    )


def test_what_is_not_known_is_left_out() -> None:
    """Before the first loss, rate and checkpoint, and with the phase named when it is no ordinary one."""
    view = View(WorkerState.TRAINING, "evaluation", 0, math.nan, 0, None, 0, 10)
    assert plain_line(view, 0.0, now=0.0) == "step 0/10 (0.0%)  evaluation  no checkpoint yet"


def test_a_rate_forgets_the_worker_before() -> None:
    """Steps that are repeated after a restart do not count backwards."""
    rate = Rate()
    for second in range(60):
        rate.observe(second * 10, float(second))
    assert rate.per_second == 10
    rate.restart(100, 60.0)
    rate.observe(120, 61.0)
    assert rate.per_second == 20


def test_times_are_read_at_a_glance() -> None:
    """Two units at most."""
    assert [short_time(s) for s in (-1, 0.9, 59, 250, 3900)] == ["0 s", "0 s", "59 s", "4 min 10 s", "1 h 05 min"]
