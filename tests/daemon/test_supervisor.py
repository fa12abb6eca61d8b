"""Whole runs: the daemon, its workers, real signals."""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from support.runs import TINY, Run, eventually, final_state, finish, is_alive, write_target
from support.states import assert_same

STEPS = 20


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    text = finish(Run(write_target(folder), folder / "run", max_iter=STEPS))
    assert "starting from step 0" in text
    assert re.search(r"^trainerd: finished at step 20 \(4 checkpoints, 0 restarts, .*\)$", text, re.MULTILINE)
    return folder / "run"


def listing(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "lock"}


def test_a_finished_run_is_not_trained_again(undisturbed: Path) -> None:
    """At max_iter, or beyond it, the daemon says so, ends with 0 and changes nothing."""
    before = listing(undisturbed)
    target = f"{undisturbed.parent}/train.py:build_trainer"
    for max_iter in (STEPS, STEPS - 7):
        text = finish(Run(target, undisturbed, max_iter=max_iter))
        assert f"already trained to step {STEPS}" in text
        assert "worker" not in text
    assert listing(undisturbed) == before


def test_deaths_of_worker_and_daemon_and_a_stop_leave_no_trace_in_the_state(undisturbed: Path, tmp_path: Path) -> None:
    """After SIGKILL of the worker, an exception, SIGKILL of the daemon, SIGTERM, the last state is bit-identical."""
    target, folder = write_target(tmp_path), tmp_path / "run"
    with Run(target, folder, max_iter=STEPS, sleep=0.05, raise_once_at=[8], loaders=1) as run:
        run.wait_for_step(5)
        first = run.wait_for_worker(1)
        os.kill(first, signal.SIGKILL)
        run.wait_for(r"the worker died at step \d+: it was killed by SIGKILL")
        run.wait_for(r"resumed from step \d+ \(storage, grade bitwise\)")
        run.wait_for_step(10)
        assert "ValueError: only once" in run.text
        assert run.text.count("Traceback") == 1
        last = run.workers[-1]
        run.send(signal.SIGKILL)
        eventually("death of the worker with its daemon", lambda: not is_alive(last))
    with Run(target, folder, max_iter=STEPS, hold_at=18) as run:
        run.wait_for("holding step")
        run.send(signal.SIGTERM)
        (tmp_path / "step.go").touch()
        assert run.wait() == 75, run.text
        assert "its state is saved" in run.text
    finish(Run(target, folder, max_iter=STEPS))
    assert_same(final_state(folder), final_state(undisturbed))


def test_further_signals_do_not_break_the_save(tmp_path: Path) -> None:
    """SIGTERM, then SIGINT, SIGHUP and SIGTERM again while the state is saved and after: saved once, exit 75."""
    slow = TINY.replace("return trainer\n", SLOW_STATE + "    return trainer\n")
    target, folder = write_target(tmp_path, slow), tmp_path / "run"
    with Run(target, folder, max_iter=10**6, every="1000000 steps") as run:
        run.wait_for("starting from step 0")
        run.send(signal.SIGTERM)
        run.wait_for("holding save")
        worker = run.workers[-1]
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            run.send(number)
            os.kill(worker, number)
        (tmp_path / "save.go").touch()
        while run.process.poll() is None:
            run.send(signal.SIGTERM)
        assert run.process.returncode == 75, run.text
        assert len(list((folder / "checkpoints").iterdir())) == 1
        assert run.text.count("finishing the step and saving") == 1


SLOW_STATE = """
    take = trainer.state_dict
    def state_dict():
        if trainer.step:
            hold("save")
        return take()
    trainer.state_dict = state_dict
"""


@pytest.mark.parametrize("to_worker", [False, True], ids=["daemon", "worker"])
def test_a_stop_during_the_start_up_ends_at_once(tmp_path: Path, to_worker: bool) -> None:
    """While the trainer is built nothing can be lost: exit 75 without waiting for it, and nothing is written."""
    target, folder = write_target(tmp_path), tmp_path / "run"
    with Run(target, folder, hold_build=True) as run:
        run.wait_for("holding build")
        os.kill(run.workers[0] if to_worker else run.pid, signal.SIGINT)
        assert run.wait(10) == 75, run.text
        assert not is_alive(run.workers[0])
        assert os.listdir(folder) == ["lock"]


def test_a_step_that_outlasts_the_grace_is_reported_as_not_saved(tmp_path: Path) -> None:
    """Exit 76 when completed steps could not be saved within the grace, and the worker is gone."""
    target, folder = write_target(tmp_path), tmp_path / "run"
    with Run(target, folder, "--preemption-grace", "0.3 s", every="5 steps", hold_at=8) as run:
        run.wait_for("holding step")
        run.send(signal.SIGTERM)
        assert run.wait(20) == 76, run.text
        assert not is_alive(run.workers[0])
        assert "the newest saved step is 5" in run.text


def test_a_step_that_outlasts_the_grace_loses_nothing_right_after_a_checkpoint(tmp_path: Path) -> None:
    """Exit 75 when no completed step is missing from the newest checkpoint."""
    target, folder = write_target(tmp_path), tmp_path / "run"
    with Run(target, folder, "--preemption-grace", "0.3 s", every="5 steps", hold_at=6) as run:
        run.wait_for("holding step")
        run.send(signal.SIGTERM)
        assert run.wait(20) == 75, run.text


def test_a_signal_to_the_worker_alone_stops_the_run(tmp_path: Path) -> None:
    """SIGTERM to the worker does what it does to the daemon: save, exit 75."""
    target, folder = write_target(tmp_path), tmp_path / "run"
    with Run(target, folder, max_iter=10**6, every="1000000 steps", sleep=0.01, loaders=1) as run:
        run.wait_for("starting from step 0")
        os.kill(run.workers[0], signal.SIGTERM)
        assert run.wait() == 75, run.text
    assert final_state(folder)["step"] > 0


def test_the_same_exception_twice_without_progress_is_not_tried_again(tmp_path: Path) -> None:
    """Exit 93, the user's traceback shown once per failure, the place named."""
    with Run(write_target(tmp_path), tmp_path / "run", raise_at=7) as run:
        assert run.wait() == 93, run.text
    assert len(run.workers) == 2
    assert run.text.count("Traceback") == 2
    assert re.search(r"ValueError at train.py:\d+, step 6", run.text)


def test_an_exception_after_progress_is_tried_again(tmp_path: Path) -> None:
    """One failure that does not come back costs a restart, nothing else."""
    text = finish(Run(write_target(tmp_path), tmp_path / "run", raise_once_at=[7]))
    assert "restarting in 0.0 s (restart 1 of 5)" in text
    assert "resumed from step 5 (storage, grade bitwise)" in text


def test_a_used_up_budget_ends_the_run(tmp_path: Path) -> None:
    """Workers that vanish without a word are restarted max_restarts times, then exit 1."""
    target = write_target(tmp_path, "import os\nos._exit(0)\n")
    with Run(target, tmp_path / "run", "--restart-max-restarts", "2") as run:
        assert run.wait() == 1, run.text
    assert len(run.workers) == 3
    assert "it exited with status 0, without a word, before the training was finished" in run.text


def test_a_second_daemon_is_refused_with_the_owner_named(tmp_path: Path) -> None:
    """Exit 79 with host, pid and start time of the first, which goes on."""
    target, folder = write_target(tmp_path), tmp_path / "run"
    with Run(target, folder, hold_build=True) as first:
        first.wait_for("holding build")
        with Run(target, folder) as second:
            assert second.wait() == 79, second.text
        assert re.search(rf"owned by process {first.pid} on {os.uname().nodename}, running since \d{{4}}-", second.text)
        assert "worker" not in second.text.replace(target, "")
        assert first.process.poll() is None


LEFT_BEHIND = """

def EXTRA(hook, step):
    if step == 7 and not (FOLDER / "child").exists():
        script = "import os, time; os.setsid(); pid = os.fork(); pid and os._exit(0); "
        script += f"open({str(FOLDER / 'child')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
        subprocess.run([sys.executable, "-c", script])
        while not (FOLDER / "child").exists() or not (FOLDER / "child").read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSEGV)
    if step == 10:
        pid = int((FOLDER / "child").read_text())
        print("left behind:", pathlib.Path(f"/proc/{pid}").exists(), flush=True)
"""


def test_nothing_of_a_dead_worker_is_alive_beside_the_next(tmp_path: Path) -> None:
    """A grandchild in a session of its own, its parent gone, is dead and reaped before the next worker trains."""
    target = write_target(tmp_path, TINY.replace("def build_trainer", LEFT_BEHIND + "\n\ndef build_trainer"))
    text = finish(Run(target, tmp_path / "run"))
    assert "it was killed by SIGSEGV" in text
    assert "left behind: False" in text


def test_fresh_leaves_old_checkpoints_aside_and_resumes_its_own(undisturbed: Path, tmp_path: Path) -> None:
    """With `--fresh` each worker starts at step 0 until the run has a checkpoint of its own, and later there."""
    target, folder = write_target(tmp_path), tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    text = finish(Run(target, folder, "--fresh", max_iter=STEPS, raise_once_at=[3, 7]))
    assert text.count("starting from step 0") == 2
    assert text.count("resumed from step 5 (storage, grade bitwise)") == 1
    assert_same(final_state(folder), final_state(undisturbed))


def test_a_damaged_last_checkpoint_is_not_taken_for_a_finished_run(undisturbed: Path, tmp_path: Path) -> None:
    """Its hashes are checked before the daemon says that nothing is left to do; what it costs is trained again."""
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    (data,) = (folder / f"checkpoints/step-{STEPS:09d}.t1").glob("*.safetensors")
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    text = finish(Run(write_target(tmp_path), folder, max_iter=STEPS))
    assert "passed over a newer checkpoint" in text
    assert_same(final_state(folder), final_state(undisturbed))
