"""What a worker does with its storage, its signals and its exit, seen from outside."""

import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from support.runs import TINY, TRAINERD, Run, final_state, write_target

# The folder of checkpoints makes way for a file: every save fails, as on a disk that went away.
BREAK = """
def EXTRA(hook, step):
    checkpoints = pathlib.Path(hook.config["run"]) / "checkpoints"
    if step == hook.config["break_at"]:
        checkpoints.rename(checkpoints.with_name("aside"))
        checkpoints.touch()
    if step == hook.config.get("mend_at"):
        checkpoints.unlink()
        checkpoints.with_name("aside").rename(checkpoints)


def build_trainer"""


def with_extra(extra: str) -> str:
    return TINY.replace("def build_trainer", extra)


def test_a_save_that_fails_in_mid_training_does_not_stop_it(tmp_path: Path) -> None:
    """The user is told loudly, training goes on, and the next due save succeeds."""
    target, folder = write_target(tmp_path, with_extra(BREAK)), tmp_path / "run"
    with Run(target, folder, every="2 steps", run=str(folder), break_at=5, mend_at=7) as run:
        assert run.wait() == 0, run.text
    assert "THE STATE OF STEP 6 IS NOT SAVED (the newest saved step is 4)" in run.text
    assert "Traceback" not in run.text
    assert final_state(folder)["step"] == 20


def test_a_last_state_that_cannot_be_saved_ends_with_the_storage_code(tmp_path: Path) -> None:
    """After retries exit 74, without a restart that would only repeat the steps; the older checkpoint stays."""
    target, folder = write_target(tmp_path, with_extra(BREAK)), tmp_path / "run"
    with Run(target, folder, every="5 steps", run=str(folder), break_at=18) as run:
        assert run.wait() == 74, run.text
    assert len(run.workers) == 1
    assert run.text.count("THE STATE OF STEP 20 IS NOT SAVED") >= 5
    assert (folder / "aside").is_dir()


def test_a_stop_that_cannot_be_saved_says_so(tmp_path: Path) -> None:
    """Exit 76 when the storage fails at the last save."""
    target, folder = write_target(tmp_path, with_extra(BREAK)), tmp_path / "run"
    with Run(target, folder, every="5 steps", run=str(folder), break_at=6, hold_at=7) as run:
        run.wait_for("holding step")
        run.send(signal.SIGTERM)
        (tmp_path / "step.go").touch()
        assert run.wait() == 76, run.text


def test_a_run_folder_that_cannot_be_made_ends_at_once(tmp_path: Path) -> None:
    """Exit 74 and one paragraph when the run's parent is a file."""
    (tmp_path / "file").touch()
    with Run(write_target(tmp_path), tmp_path / "file" / "run") as run:
        assert run.wait() == 74
    assert run.text.count("\n") == 1
    assert run.text.startswith("trainerd: Cannot ")


# A loader of torch itself, whose processes know nothing of us.
PLAIN_LOADER = TINY.replace("ResumableLoader(Data(), shuffle=True,", "torch.utils.data.DataLoader(Data(),")


def test_a_signal_to_every_process_of_the_job_still_saves_the_last_step(tmp_path: Path) -> None:
    """SIGTERM to daemon, worker and loader processes at once: the step is finished with their data, saved, exit 75."""
    target, folder = write_target(tmp_path, PLAIN_LOADER), tmp_path / "run"
    with Run(target, folder, max_iter=10**6, every="1000000 steps", hold_at=8, loaders=2) as run:
        run.wait_for("holding step")
        family = [run.pid, *(child.pid for child in psutil.Process(run.pid).children(recursive=True))]
        assert len(family) >= 4
        for pid in reversed(family):
            os.kill(pid, signal.SIGTERM)
        (tmp_path / "step.go").touch()
        assert run.wait() == 75, run.text
    assert "Traceback" not in run.text
    assert final_state(folder)["step"] == 8


def test_a_loader_process_that_is_terminated_alone_does_not_stop_the_run(tmp_path: Path) -> None:
    """It dies as it would anywhere, the worker's exception is an incident, and the next worker finishes."""
    target, folder = write_target(tmp_path, PLAIN_LOADER), tmp_path / "run"
    with Run(target, folder, hold_at=8, loaders=1) as run:
        run.wait_for("holding step")
        for child in psutil.Process(run.workers[0]).children():
            child.terminate()
            child.wait(20)
        (tmp_path / "step.go").touch()
        assert run.wait() == 0, run.text
    assert re.search(r"the worker died at step \d: training failed", run.text)


def test_without_a_daemon_the_same_run_is_trained_in_one_process(tmp_path: Path) -> None:
    """`--no-daemon`: lock, stop by signal with 75, resume, failure with the user's traceback and 1, the end with 0."""
    target, folder = write_target(tmp_path), tmp_path / "run"
    with Run(target, folder, "--no-daemon", hold_at=7) as run:
        run.wait_for("holding step")
        with Run(target, folder, "--no-daemon") as second:
            assert second.wait() == 79, second.text
        run.send(signal.SIGINT)
        (tmp_path / "step.go").touch()
        assert run.wait() == 75, run.text
    assert "stopped at step 7; its state is saved" in run.text
    with Run(target, folder, "--no-daemon", raise_at=12) as run:
        assert run.wait() == 1, run.text
    assert "resumed from step 7 (storage, grade bitwise)" in run.text
    assert run.text.count("Traceback") == 1
    with Run(target, folder, "--no-daemon") as run:
        assert run.wait() == 0, run.text
    with Run(target, folder, "--no-daemon") as run:
        assert run.wait() == 0, run.text
    assert "already trained to step 20" in run.text


def test_what_a_worker_prints_reaches_the_user_whole(tmp_path: Path) -> None:
    """Lines of 10 MB, invalid UTF-8, NUL bytes and 20 MB in one step come through as they were, in order."""
    extra = """
def EXTRA(hook, step):
    if step == 3:
        sys.stdout.buffer.write(b"x" * 10_000_000 + b"|\\n" + b"bad \\xff\\xfe \\0 bytes\\n")
        sys.stdout.flush()
        for number in range(200_000):
            sys.stdout.buffer.write(b"line %06d %s\\n" % (number, b"y" * 88))
        print("last words", end="", flush=True)


def build_trainer"""
    target, folder = write_target(tmp_path, with_extra(extra)), tmp_path / "run"
    with Run(target, folder, max_iter=4) as run:
        assert run.wait() == 0
    printed = run.log.read_bytes()
    assert b"x" * 10_000_000 + b"|\nbad \xff\xfe \0 bytes\n" in printed
    assert b"dropped" not in printed
    numbers = [int(number) for number in re.findall(rb"^line (\d{6}) y{88}$", printed, re.MULTILINE)]
    assert numbers == list(range(200_000))
    assert re.search(rb"^trainerd: finished at step 4", printed, re.MULTILINE)


def test_a_reader_that_never_reads_does_not_hold_the_training_up(tmp_path: Path) -> None:
    """The daemon's output goes into a pipe that nobody reads: 40 MB later the run is finished."""
    extra = """
def EXTRA(hook, step):
    for _ in range(40):
        os.write(1 + step % 2, b"z" * 2**18 + b"\\n")


def build_trainer"""
    target, folder = write_target(tmp_path, with_extra(extra)), tmp_path / "run"
    command = [TRAINERD, "run", target, "--dir", str(folder), "--max-iter", "4"]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert daemon.wait(60) == 0
    assert daemon.stdout is not None
    daemon.stdout.close()
    assert final_state(folder)["step"] == 4


def test_closed_standard_streams_do_no_harm(tmp_path: Path) -> None:
    """A daemon without stdin, stdout and stderr trains to the end and writes into none of its own files."""
    target, folder = write_target(tmp_path, with_extra("""
def EXTRA(hook, step):
    print("harmful", flush=True)


def build_trainer""")), tmp_path / "run"  # fmt: skip
    command = f"{TRAINERD} run {target} --dir {folder} --max-iter 4 <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], timeout=60, check=False).returncode == 0
    assert final_state(folder)["step"] == 4
    assert not any(b"harmful" in path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("flags", [[], ["--no-daemon"]])
def test_closed_standard_streams_cost_output_never_the_run(tmp_path: Path, flags: list[str]) -> None:
    """Started with all three closed, it trains; what it would have printed ends up in none of the run's files."""
    target, folder = write_target(tmp_path), tmp_path / "run"
    command = f'exec "$0" run {target} --dir {folder} --max-iter 6 "$@" <&- >&- 2>&-'
    done = subprocess.run(["bash", "-c", command, TRAINERD, *flags], check=False, timeout=60)
    assert done.returncode == 0
    assert final_state(folder)["step"] == 6
    assert b"step" not in (folder / "lock").read_bytes()
