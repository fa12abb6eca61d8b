"""A training that is killed at random moments ends bit for bit like one that was not."""

import contextlib
import os
import random
import signal
import time

import pytest
from support.runs import Run, eventually, final_state, finish, is_alive, write_target
from support.states import assert_same

from trainerd.checkpoint.reader import newest_step
from trainerd.checkpoint.storage import open_storage

# `make campaign` asks for more; a failure is repeated with the seed that it printed.
KILLS = int(os.environ.get("TRAINERD_KILLS", "50"))
SEED = int(os.environ.get("TRAINERD_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
FLAGS = ("--restart-max-restarts", "100000", "--preemption-grace", "60 s")


def strike(run, victim, number):
    """Send a signal to the worker, the daemon, or both within the same moment."""
    workers = run.workers[-1:]
    for pid in {"worker": workers, "daemon": [run.pid], "both": [*workers, run.pid]}[victim]:
        with contextlib.suppress(ProcessLookupError):  # it had just died of something else: a random moment too
            os.kill(pid, number)


@pytest.mark.timeout(300 + 10 * KILLS)
def test_kills_at_random_moments_leave_no_trace_in_the_final_state(tmp_path):
    """Worker, daemon and both, SIGKILL and SIGTERM, during start-up, loading, training, saving and stopping."""
    print(f"repeat with TRAINERD_SEED={SEED} TRAINERD_KILLS={KILLS}")
    rng = random.Random(SEED)
    target = write_target(tmp_path)
    config = {"sleep": 0.02, "loaders": 1}

    def start(max_iter=10**9):
        return Run(target, tmp_path / "killed", *FLAGS, max_iter=max_iter, every="3 steps", **config)

    run, log = start(), []
    while len(log) < KILLS:
        victim, number = rng.choice(["worker", "daemon", "both"]), rng.choice([signal.SIGKILL, signal.SIGTERM])
        time.sleep(rng.uniform(0.0, 5.0))  # the moment itself: no event is waited for here
        if run.process.poll() is None:
            strike(run, victim, number)
            log.append(f"{signal.Signals(number).name} {victim}")
        if victim == "worker" and run.process.poll() is None:
            continue  # the daemon lives and starts another, or ends in its own time if the worker passed the signal on
        # A signal in the daemon's first milliseconds, before it can catch any, ends it as it ends every program.
        assert run.wait() in {75, -signal.SIGKILL, -signal.SIGTERM}, run.text
        for pid in run.workers:
            eventually(f"end of worker {pid}", lambda pid=pid: not is_alive(pid), 10)
        run = start()
    print(f"{len(log)} kills: {', '.join(log)}")
    strike(run, "both", signal.SIGKILL)
    run.wait()

    last = newest_step(open_storage(str(tmp_path / "killed"))) + 10
    finish(start(max_iter=last))
    finish(Run(target, tmp_path / "undisturbed", max_iter=last, every="1000 steps"))
    assert_same(final_state(tmp_path / "killed"), final_state(tmp_path / "undisturbed"))
