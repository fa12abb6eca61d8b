"""The command line: help, wrong use, and what `run` hands on."""

import subprocess
import sys
import types

import pytest
from support.command_line import TRAINERD, assert_refused, trainerd

from trainerd.checkpoint.errors import Damaged, NoCheckpoint, RunOwned, StorageUnusable, UnsupportedState
from trainerd.daemon import cli
from trainerd.daemon.exit_codes import ExitCode, exit_code_of
from trainerd.daemon.job_errors import JobError
from trainerd.daemon.job_keys import all_keys, flag_keys


@pytest.fixture
def supervised(monkeypatch, tmp_path):
    """Stands in for the supervisor and the worker; collects what they are called with. Target and folder are ready."""
    calls = []

    def stand_in(name):
        def called(job, *, fresh, take_over):
            calls.append((name, job, fresh, take_over))
            return ExitCode.PREEMPTED_SAVED

        return called

    for module, name in [("supervisor", "supervise"), ("worker", "train_here")]:
        fake = types.ModuleType(f"trainerd.daemon.{module}")
        setattr(fake, name, stand_in(name))
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return calls


def test_help_names_every_command_and_imports_nothing_heavy():
    """`--help` must stay fast: no torch, no rich, no numpy, nothing of the checkpoint package."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", TRAINERD, "--help"], capture_output=True, text=True, check=True
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"typer", "trainerd.daemon.cli"} <= imported
    heavy = {name for name in imported if name.split(".")[0] in ("torch", "rich", "numpy", "asyncio", "xxhash")}
    assert not heavy
    ours = {name for name in imported if name.startswith(("trainerd.checkpoint", "trainerd.trainer"))}
    assert ours == {
        "trainerd.checkpoint",
        "trainerd.checkpoint.words",  # values in words, as in the job file
        "trainerd.trainer",
        "trainerd.trainer.mismatch",  # on_mismatch is read where it is used
    }
    for command in ("run", "list", "inspect", "verify", "diff", "prune", "pin", "unpin", "export", "import", "copy"):
        assert f"\n  {command} " in done.stdout


def test_help_of_run_shows_every_key_of_the_job_file_with_its_default():
    """Each key has its flag, and the help is read off the same structs."""
    done = trainerd("run", "--help")
    assert done.returncode == 0
    words = " ".join(done.stdout.split())
    for key in flag_keys():
        assert f" {key.flag} " in words
        assert key.help[1:] in words
        assert key.default_text in words
    assert {key.path for key in all_keys() if not key.is_table} - {key.path for key in flag_keys()} == {
        "target",  # the operand
        "config",  # --set
        "storage",  # --storage
        # inside --checkpoint-keep
        *(f"checkpoint.keep.{rule}" for rule in ("last", "every", "newer_than", "best", "metric", "mode", "bytes")),
    }


def test_the_version_is_that_of_the_distribution():
    """One line."""
    from importlib.metadata import version

    done = trainerd("--version")
    assert (done.returncode, done.stdout) == (0, f"trainerd {version('trainerd')}\n")


def test_no_command_shows_the_help_and_counts_as_wrong_use():
    """On standard error: a script that forgot the command must not take it for a result."""
    done = trainerd()
    assert (done.returncode, done.stdout) == (2, "")
    assert "Commands:" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "train.py:f", "--max-itr", "5"], "No such option: --max-itr. Did you mean --max-iter?"),
        (["run", "train.py:f", "--max_iter=5"], "No such option: --max_iter. Did you mean --max-iter?"),
        (["run", "train.py:f", "--checkpoint-evry", "auto"], "Did you mean --checkpoint-every?"),
        (["run", "train.py:f", "--zzz"], "No such option: --zzz. `trainerd run --help`"),
        (["list", "d", "--jsn"], "Did you mean --json?"),
        (["--verson"], "Did you mean --version?"),
        (["lst", "d"], "No such command 'lst'. Did you mean 'list'?"),
        (["frobnicate"], "No such command 'frobnicate'. `trainerd --help`"),
        (["run"], "Missing argument 'JOB'"),
        (["run", "train.py:f", "--max-iter"], "'--max-iter' requires an argument. `trainerd run --help`"),
        (["list", "a", "b"], "unexpected extra argument"),
        (["prune", "d", "--keep", "lats=3"], "--keep lats=3: unknown key 'lats'. Did you mean last?"),
        (["prune", "d", "--keep", "last"], "--keep last: expected key=value pairs"),
        (["prune", "d", "--keep", "last=0"], "--keep last=0: expected a whole number, 1 or more (the newest"),
        (["prune", "d", "--dryrun"], "Did you mean --dry-run?"),
        (["pin", "d"], "d names no step: give DIR@STEP, as in `trainerd pin d@500`"),
        (["unpin", "d"], "d names no step"),
        (["run", "train.py"], "the function is missing. Expected path/train.py:build_trainer or"),
        (["run", "train.py:f"], "--dir and --max-iter must be given"),
        (["run", "train.py:f", "--dir", "d", "--max-iter", "0"], "--max-iter 0: expected a whole number, 1 or more"),
        (["run", "train.py:f", "--dir", "d", "--max-iter", "5", "--set", "lr"], "--set lr: expected key=value"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_use_ends_with_2_and_a_way_out(tmp_path, words, says):
    """One paragraph, no traceback, the nearest name offered."""
    (tmp_path / "train.py").touch()
    assert_refused(trainerd(*words, cwd=tmp_path), 2, says)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tarin.py:f", "--dir", "d", "--max-iter", "5"], "tarin.py does not exist. Did you mean"),
        (["jbo.toml"], "The job file jbo.toml does not exist. Did you mean job.toml?"),
        (["job.toml"], "job.toml: unknown key or table max_itre at the top of the file. Did you mean max_iter?"),
        (["bad.toml"], "bad.toml is no valid TOML: Invalid value (at line 1, column 5)."),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_bad_job_ends_with_78_and_leaves_the_folder_as_it_was(tmp_path, words, says):
    """Nothing is made before the job is known to be good."""
    (tmp_path / "train.py").touch()
    (tmp_path / "job.toml").write_text("max_itre = 5\n")
    (tmp_path / "bad.toml").write_text("a = \n")
    before = sorted(tmp_path.iterdir())
    assert_refused(trainerd("run", *words, cwd=tmp_path), 78, says)
    assert sorted(tmp_path.iterdir()) == before


def test_run_hands_the_job_to_the_supervisor_and_returns_its_exit_code(supervised, tmp_path):
    """Every flag arrives."""
    words = ["run", "train.py:f", "--dir", "d", "--max-iter", "5", "--checkpoint-every", "2 steps", "--fresh"]
    words += ["--take-over"]
    assert cli.main([*words, "--set", "lr=0.1", "--set", "model.width=4"]) == 75
    [(name, job, fresh, take_over)] = supervised
    assert (name, fresh, take_over) == ("supervise", True, True)
    assert (job.target, job.dir, job.max_iter) == (f"{tmp_path}/train.py:f", f"{tmp_path}/d", 5)
    assert job.checkpoint.every.steps == 2
    assert job.config == {"lr": 0.1, "model": {"width": 4}}


def test_no_daemon_trains_in_this_process(supervised):
    """Same job, other caller."""
    assert cli.main(["run", "train.py:f", "--dir", "d", "--max-iter", "5", "--no-daemon"]) == 75
    [(name, _, fresh, take_over)] = supervised
    assert (name, fresh, take_over) == ("train_here", False, False)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (JobError("no such key."), 78),
        (JobError("no such flag.", ExitCode.WRONG_USAGE), 2),
        (UnsupportedState("hooks.Foo.callback", "function"), 78),
        (NoCheckpoint("none."), 78),
        (Damaged("step-000000001.t1", "cut"), 78),
        (RunOwned("runs/a", "host", 7, "today"), 79),
        (StorageUnusable("write", "runs/a", OSError(28, "full")), 74),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_error_meant_for_the_user_is_a_paragraph_with_its_exit_code(supervised, monkeypatch, capsys, error, code):
    """Never a traceback, whoever raised it."""

    def raising(_job, *, fresh, take_over):
        raise error

    monkeypatch.setattr(sys.modules["trainerd.daemon.supervisor"], "supervise", raising)
    assert cli.main(["run", "train.py:f", "--dir", "d", "--max-iter", "5"]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("trainerd: ")
    assert printed.err.count("\n") == 1


def test_a_fault_of_the_program_keeps_its_traceback(supervised, monkeypatch):
    """A bug must not be dressed up as an error of the user."""

    def broken(_job, *, fresh, take_over):
        raise ZeroDivisionError

    monkeypatch.setattr(sys.modules["trainerd.daemon.supervisor"], "supervise", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", "train.py:f", "--dir", "d", "--max-iter", "5"])
    assert exit_code_of(ZeroDivisionError()) is None
