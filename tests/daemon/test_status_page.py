"""The page that worker and daemon share."""

import math
import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from trainerd.daemon.status_page import PHASE_BYTES, StatusPage

CHILD = """
import os, signal, sys
from trainerd.daemon.status_page import StatusPage
page = StatusPage(int(sys.argv[1]))
page.mark("evaluation", 2**40)
page.publish_loss(-0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_worker_marked_is_readable_after_it_was_killed() -> None:
    """Phase, step, loss and time of the last mark survive SIGKILL."""
    page = StatusPage.create(step=3)
    before = page.read()
    assert (before.phase, before.step, math.isnan(before.loss), page.stop_requested) == ("start", 3, True, False)
    child = subprocess.run([sys.executable, "-c", CHILD, str(page.fd)], pass_fds=[page.fd], check=False)
    assert child.returncode == -9
    after = page.read()
    assert (after.phase, after.step, after.loss) == ("evaluation", 2**40, -0.5)
    assert after.marked_at > before.marked_at
    page.close()


def test_a_stop_asked_for_on_one_side_is_seen_on_the_other() -> None:
    """And by marks it is not undone."""
    page = StatusPage.create()
    other = StatusPage(os.dup(page.fd))
    other.request_stop()
    page.mark("step", 1)
    page.publish_loss(1.0)
    assert page.stop_requested
    assert other.stop_requested
    page.close()
    other.close()


@given(name=st.text())
def test_no_phase_name_harms_the_page(name: str) -> None:
    """Names are cut to PHASE_BYTES; the step beside them stays right."""
    page = StatusPage.create()
    page.mark(name, 5)
    status = page.read()
    assert status.step == 5
    if len(name.encode()) <= PHASE_BYTES and not name.endswith("\0"):
        assert status.phase == name
    page.close()
