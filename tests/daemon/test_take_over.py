"""Two daemons and one run on a real S3 server: real processes, real signals, one owner."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import msgspec
import pytest
from support.runs import TINY, Run, eventually, is_alive, write_target
from support.states import assert_same

from trainerd.checkpoint import alive, envelope
from trainerd.checkpoint.listing import list_checkpoints
from trainerd.checkpoint.reader import newest_step
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore
from trainerd.checkpoint.terms import read_tickets

QUICK = """
import sys
from functools import partial
from trainerd.checkpoint.ownership import RunOwner
RunOwner.acquire = partial(RunOwner.acquire, beat_seconds=0.5)
from trainerd.daemon.cli import main
sys.exit(main())
"""

# A worker that stops itself, and its daemon, right before it commits a checkpoint of step 6: a machine that freezes.
FREEZE = """
from trainerd.checkpoint import writer

seal = writer.seal_manifest


def freezing_seal(manifest):
    if manifest.step == 6 and not (FOLDER / "frozen").exists():
        (FOLDER / "frozen").touch()
        os.kill(os.getppid(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
    return seal(manifest)


writer.seal_manifest = freezing_seal


def build_trainer"""


class QuickRun(Run):
    """A run whose daemon gives signs of life twice a second."""

    program = (sys.executable, "-P", "-c", QUICK)


@pytest.fixture
def place(servers):
    return servers.place("s3")


@pytest.fixture
def storage(place):
    return open_storage(place.url, place.options)


@pytest.fixture
def start(place, tmp_path):
    """Starts runs on the server; whatever is left of them in the end is killed."""
    runs = []

    def start_one(source=TINY, *flags, **config):
        target = write_target(tmp_path, source, name=f"train{len(runs)}.py")
        env = {"FSSPEC_S3": json.dumps(place.options)}
        runs.append(QuickRun(target, place.url, *flags, env=env, every="2 steps", **config))
        return runs[-1]

    yield start_one
    for run in runs:
        for pid in [run.pid, *run.workers]:
            if is_alive(pid):
                os.kill(pid, signal.SIGCONT)
        run.__exit__()


def wait_for_checkpoint(storage, step):
    return eventually(f"checkpoint of step {step}", lambda: (n := newest_step(storage)) and n >= step and n)


def state_letter(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def final_state(storage):
    state = CheckpointStore(storage).load().state
    del state["events"]["histories"]["data_time"], state["events"]["latest"]["data_time"]
    return state


def test_a_frozen_machine_that_wakes_up_after_a_take_over_ends_and_changes_nothing(start, storage, tmp_path):
    """Its daemon ends with 79 and names its heir; the checkpoint that it was just committing does not count."""
    zombie = start(TINY.replace("def build_trainer", FREEZE), max_iter=20)
    worker = zombie.wait_for_worker()
    eventually("stop", lambda: (tmp_path / "frozen").exists() and state_letter(worker) == "T", say=lambda: zombie.text)
    assert state_letter(zombie.pid) == "T"
    assert newest_step(storage) == 4

    heir = start(max_iter=20, hold_at=5)
    heir.wait_for(r"watching for 2 s whether it is alive")
    heir.wait_for(r"is taken for dead; what it may still save will not count")
    heir.wait_for("resumed from step 4")
    os.kill(worker, signal.SIGCONT)
    eventually("the zombie's checkpoint", lambda: storage.size("checkpoints/step-000000006.t1/manifest.json"))
    assert {info.name: info.state for info in list_checkpoints(storage)}["step-000000006.t1"] == "superseded"
    os.kill(zombie.pid, signal.SIGCONT)
    assert zombie.wait() == 79, zombie.text
    assert (
        f"was taken over by process {heir.pid} on {os.uname().nodename}, which began term 2 from step 4" in zombie.text
    )
    assert "Traceback" not in zombie.text
    assert not is_alive(worker)

    (tmp_path / "step.go").touch()
    assert heir.wait() == 0, heir.text
    states = {info.name: info.state for info in list_checkpoints(storage)}
    assert states["step-000000006.t1"] in ("superseded", "damaged")
    assert states["step-000000020.t2"] == "valid"
    assert [ticket.resumed_from for ticket in read_tickets(storage)] == [0, 4]
    undisturbed = Run(write_target(tmp_path), tmp_path / "undisturbed", max_iter=20)
    with undisturbed:
        assert undisturbed.wait() == 0, undisturbed.text
    assert_same(final_state(storage), final_state(open_storage(str(tmp_path / "undisturbed"))))


@pytest.mark.parametrize("how", [(), ("--no-daemon",)], ids=["daemon", "no daemon"])
def test_take_over_ends_a_living_owner_and_tells_it_who_has_the_run(start, storage, how):
    """It trains in steps that never end by themselves; within some beats it ends with 79, unsaved."""
    first = start(TINY, *how, max_iter=10**6, sleep=0.05)
    wait_for_checkpoint(storage, 4)
    refused = start(max_iter=10**6)
    assert refused.wait() == 79, refused.text
    assert f"is owned by process {first.pid} on {os.uname().nodename}, running since " in refused.text
    assert "--take-over takes the run from it" in refused.text

    second = start(TINY, "--take-over", max_iter=10**6, sleep=0.05)
    second.wait_for(f"taken from process {first.pid} on {os.uname().nodename}, as --take-over asks")
    assert first.wait() == 79, first.text
    told = re.search(r"was taken over by process (\d+) on \S+, which began term 2 from step (\d+)", first.text)
    assert int(told[1]) == second.pid
    assert first.text.count("was taken over") == 1
    assert "Traceback" not in first.text
    resumed_from = int(told[2])
    wait_for_checkpoint(storage, resumed_from + 4)
    second.send(signal.SIGTERM)
    assert second.wait() == 75, second.text
    newest = max((info for info in list_checkpoints(storage) if info.state == "valid"), key=lambda info: info.step)
    assert newest.term == 2


def test_an_owner_in_the_middle_of_a_pause_hears_that_the_run_was_taken(start, storage):
    """While no worker lives, a take-over ends the pause before the next one."""
    first = start(TINY, "--restart-backoff", "60 s", max_iter=20, raise_at=3)
    first.wait_for(r"restarting in \d")
    second = start(TINY, "--take-over", max_iter=20)
    assert second.wait() == 0, second.text
    assert first.wait() == 79, first.text
    assert len(first.workers) == 1


def test_a_daemon_that_was_killed_is_followed_at_once_on_its_machine(start, storage):
    """No watching: its process is certain to be gone."""
    first = start(max_iter=10**6, sleep=0.05)
    wait_for_checkpoint(storage, 4)
    first.send(signal.SIGKILL)
    first.wait()
    second = start(max_iter=10**6, sleep=0.05)
    second.wait_for("resumed from step")
    assert "watching" not in second.text


def test_a_daemon_is_refused_while_another_builds_its_trainer(start, storage):
    """Before the first ticket there are signs of life."""
    first = start(hold_build=True)
    first.wait_for("holding build")
    assert read_tickets(storage) == []
    second = start()
    assert second.wait() == 79, second.text
    assert "worker" not in second.text.replace("build_trainer", "")
    assert first.process.poll() is None


def test_two_daemons_that_start_at_once_end_as_one(start, storage):
    """The other ends with 79, whether it saw a sign of life or lost the first ticket."""
    pair = [start(max_iter=12), start(max_iter=12)]
    codes = [run.wait() for run in pair]
    assert sorted(codes) == [0, 79], [run.text for run in pair]
    assert [ticket.term for ticket in read_tickets(storage)] == [1]
    assert pair[codes.index(0)].pid == read_tickets(storage)[0].pid


@pytest.mark.parametrize("how", [(), ("--no-daemon",)], ids=["daemon", "no daemon"])
def test_a_stop_ends_the_watch_for_a_former_owner(start, storage, how):
    """Exit 75 at once; nothing was trained, nothing is changed."""
    sign = msgspec.structs.replace(alive.first_sign("nonce", 600.0), host="elsewhere")
    storage.replace("terms/alive.json", envelope.seal(sign))
    run = start(TINY, *how)
    run.wait_for(r"process \d+ on elsewhere may own this run: watching for 1950 s")
    run.send(signal.SIGTERM)
    assert run.wait(30) == 75, run.text
    assert storage.names("") == ["terms"]


@pytest.mark.parametrize("how", [(), ("--no-daemon",)], ids=["daemon", "no daemon"])
def test_the_memory_of_a_process_is_no_place_for_a_run(tmp_path, how):
    """The worker's memory is gone with it: refused before anything is trained, with the way out."""
    with Run(write_target(tmp_path), "memory://run", *how) as run:
        assert run.wait() == 78, run.text
    assert "no other process would ever see a checkpoint there" in run.text
