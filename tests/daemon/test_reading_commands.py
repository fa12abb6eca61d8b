"""`list`, `inspect` and `verify` on real runs, through the console script."""

import json
import os
import re
import shutil
import subprocess
from collections import OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command_line import TRAINERD, assert_refused, trainerd

from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.retention import Keep
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore
from trainerd.daemon.commands.operands import split_operand

INF = float("inf")


def state_of(step):
    """A state with something of every shape that `inspect` has to show."""
    weight = torch.full((3, 4), float(step))
    return {
        "step": step,
        "model": OrderedDict({"blocks.0.weight": weight, "blocks.0.bias": torch.zeros(4), "head.weight": weight}),
        "hooks": {
            "EMA": {"decay": 0.5, "shadow": {"w": torch.ones(2, dtype=torch.bfloat16)}},
            "Stop": {"best": INF},
        },
        "optimizer": {"state": {i: {"exp": {"deep": torch.zeros(2)}} for i in range(20)}, "betas": (0.9, 0.99)},
        "losses": [float(i) for i in range(100)],
        "queue": deque([1, 2]),
        "array": np.zeros((2, 2)),
        "note": "x" * 500,
    }


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """A run with three checkpoints, made once."""
    folder = tmp_path_factory.mktemp("reading") / "a"
    storage = open_storage(str(folder))
    owner = RunOwner.acquire(storage)
    store = CheckpointStore(storage, term=owner.ensure_term(0), keep=Keep(last=10))
    for step in (10, 20, 30):
        store.save(step, state_of(step))
    owner.release()
    return folder


@pytest.fixture
def run(template, tmp_path):
    """A copy of the run that a test may damage."""
    return Path(shutil.copytree(template, tmp_path / "a"))


def flip_last_byte(run, step):
    """Damage the data of one checkpoint."""
    [file] = (run / "checkpoints" / f"step-{step:09d}.t1").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def contents(folder):
    """Every file with its bytes and times."""
    files = sorted(folder.rglob("*"))
    return [(str(file), file.stat().st_mtime_ns, file.read_bytes() if file.is_file() else None) for file in files]


def test_list_shows_one_line_per_checkpoint_newest_last(run):
    """Columns with a head."""
    done = trainerd("list", run)
    assert (done.returncode, done.stderr) == (0, "")
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["step", "term", "state", "size", "own", "size", "age", "why"]
    assert [row.split()[:3] for row in rows] == [[str(step), "1", "valid"] for step in (10, 20, 30)]


@pytest.mark.parametrize("command", ["list", "verify"])
def test_json_of_list_and_verify_has_the_documented_shape(run, command):
    """Exactly these keys, so that scripts can rely on them."""
    done = trainerd(command, run, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert list(report) == ["run", "checkpoints"]
    assert report["run"] == str(run)
    assert [entry["step"] for entry in report["checkpoints"]] == [10, 20, 30]
    for entry in report["checkpoints"]:
        assert {key: type(value) for key, value in entry.items()} == {
            "step": int,
            "term": int,
            "state": str,
            "reason": str,
            "bytes": int,
            "unique_bytes": int,
            "time": float,
            "pinned": bool,
            "kept_because": list,
        }


def test_verify_finds_what_list_cannot_see_and_ends_with_65(run):
    """A flipped byte leaves manifest and lengths as they are."""
    flip_last_byte(run, 20)
    listed = json.loads(trainerd("list", run, "--json").stdout)["checkpoints"]
    assert [entry["state"] for entry in listed] == ["valid"] * 3

    done = trainerd("verify", run, "--json")
    assert done.returncode == 65
    found = json.loads(done.stdout)["checkpoints"]
    assert [entry["state"] for entry in found] == ["valid", "damaged", "valid"]
    assert "does not match its hash" in found[1]["reason"]

    done = trainerd("verify", run)
    assert done.returncode == 65
    assert "2 valid, 1 damaged." in done.stdout


def test_verify_of_one_step_is_not_disturbed_by_another(run):
    """DIR@STEP."""
    flip_last_byte(run, 20)
    assert trainerd("verify", f"{run}@30").returncode == 0
    assert trainerd("verify", f"{run}@20").returncode == 65


def test_a_save_without_manifest_is_no_damage(run):
    """It was never committed."""
    (run / "checkpoints/step-000000030.t1/manifest.json").unlink()
    done = trainerd("verify", run)
    assert done.returncode == 0
    assert "incomplete" in done.stdout


def test_a_damaged_manifest_is_shown_and_not_believed(run):
    """`inspect` goes to the next older one, or says why the step that was asked for cannot be shown."""
    manifest = run / "checkpoints/step-000000030.t1/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-10])
    assert trainerd("list", run).stdout.splitlines()[-1].split()[:3] == ["30", "1", "damaged"]
    assert json.loads(trainerd("inspect", run, "step", "--json").stdout)["step"] == 20
    assert_refused(trainerd("inspect", f"{run}@30"), 78, "step-000000030.t1", "damaged")


def test_inspect_shows_the_state_without_loading_it(run):
    """Values as they are, tensors by type, shape and size, long things cut, deep things counted."""
    done = trainerd("inspect", run)
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout
    assert "step 30, term 1" in text.splitlines()[0]
    for line in (
        "\nstep    30\n",
        "\n  blocks.0.weight  float32 [3, 4] 48 B\n",
        "\n    decay  0.5\n",
        "\n    best  inf\n",
        "\n  betas  (0.9, 0.99)\n",
        "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, ... 94 more]",
        "deque[1, 2]",
        "numpy float64 [2, 2] 32 B",
        "(500 characters)",
        "\n    0  (1 entry, 8 B)\n",
        "\n    ... 8 more\n",
    ):
        assert line in text, line
    assert text.splitlines()[-1].endswith(f"trainerd inspect {run}@30 hooks.EMA.shadow")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("hooks.EMA", "decay  0.5"),
        ("hooks.EMA.decay", "\n0.5\n"),
        ("model.blocks.0.weight", "\nfloat32 [3, 4] 48 B\n"),
        ("model.blocks.0", "blocks.0.bias    float32 [4] 16 B\n"),
        ("hooks.EMA.shadow.w", "bfloat16 [2] 4 B"),
        ("optimizer.state", "\n19  (1 entry, 8 B)\n  exp  (1 entry, 8 B)\n    deep  float32 [2] 8 B\n"),
    ],
)
def test_a_path_goes_deeper(run, path, says):
    """Entries whose names hold dots, and beginnings of such names."""
    done = trainerd("inspect", f"{run}@20", path)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    assert "Not everything" not in done.stdout


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("hooks.EMMA", "There is no EMMA in hooks of"),
        ("hooks.EMMA", "Did you mean EMA?"),
        ("modle", "Did you mean model?"),
        ("step.x", "There is no x in step of"),
        ("model.blocks.7", "Did you mean blocks.0."),
    ],
    ids=lambda value: value,
)
def test_an_unknown_path_is_answered_with_the_nearest_name(run, path, says):
    """Exit code 78: what was asked for is not there."""
    done = trainerd("inspect", run, path)
    assert_refused(done, 78, says)


def test_inspect_json_is_step_term_and_tree(run):
    """A tensor's node carries type, shape and size."""
    report = json.loads(trainerd("inspect", run, "model.head.weight", "--json").stdout)
    assert list(report) == ["step", "term", "tree"]
    assert (report["step"], report["term"]) == (30, 1)
    assert report["tree"] == {
        "!": "tensor",
        "tensor": "model.blocks.0.weight",
        "dtype": "float32",
        "shape": [3, 4],
        "bytes": 48,
    }


@pytest.mark.parametrize("command", ["list", "inspect", "verify"])
def test_a_run_that_is_not_there_ends_with_78_and_is_not_made(tmp_path, run, command):
    """With the nearest name, or what is there instead."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "file").touch()
    before = contents(tmp_path)
    assert_refused(trainerd(command, tmp_path / "aa"), 78, "does not exist", f"Did you mean {run}?")
    assert_refused(trainerd(command, tmp_path / "no" / "where"), 78, "does not exist", f"Nor does {tmp_path}/no")
    assert_refused(trainerd(command, tmp_path / "plain"), 78, "no training began there yet", "trainerd run")
    assert_refused(trainerd(command, tmp_path / "file"), 78, "it is a file")
    assert_refused(trainerd(command, tmp_path), 78, "Runs inside it: a.")
    assert_refused(trainerd(command, run / "checkpoints/step-000000010.t1"), 78, f"{run}@10")
    assert_refused(trainerd(command, "gopher://bucket/a"), 78, "no storage for gopher://")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_step_that_is_not_there_ends_with_78_and_the_steps_there_are(run, command):
    """Never a silent answer about nothing."""
    assert_refused(trainerd(command, f"{run}@15"), 78, "no checkpoint of step 15", "10, 20, 30")


def test_a_run_without_checkpoints_is_no_error_to_list(tmp_path):
    """It has only just begun."""
    owner = RunOwner.acquire(open_storage(str(tmp_path / "a")))
    owner.ensure_term(0)
    owner.release()
    for command in ("list", "verify"):
        done = trainerd(command, "a", cwd=tmp_path)
        assert done.returncode == 0
        assert "no checkpoint has been committed yet" in done.stdout
        assert json.loads(trainerd(command, "a", "--json", cwd=tmp_path).stdout) == {"run": "a", "checkpoints": []}
    assert_refused(trainerd("inspect", "a", cwd=tmp_path), 78, "No checkpoint has been committed in a yet.")


def test_a_step_is_what_follows_the_last_at_unless_a_folder_has_that_name(run, tmp_path, monkeypatch):
    """Folders with @ in their names stay reachable, and so do their steps."""
    monkeypatch.chdir(tmp_path)
    assert split_operand("a@20") == ("a", 20)
    shutil.copytree(run, tmp_path / "a@20")
    assert split_operand("a@20") == ("a@20", None)
    assert split_operand("a@20@10") == ("a@20", 10)
    assert split_operand("a/@20") == ("a/", 20)
    assert split_operand("me@host") == ("me@host", None)
    assert split_operand("@5") == ("@5", None)
    assert split_operand("a@²") == ("a@²", None)
    assert json.loads(trainerd("inspect", "a@20@10", "step", "--json").stdout)["tree"] == 10
    assert_refused(trainerd("inspect", "a@newest"), 78, "A step is given as a number: DIR@500.")


@pytest.mark.parametrize("command", ["list", "inspect", "verify"])
def test_reading_changes_nothing_and_imports_no_torch(run, command):
    """Not even a lock or a time stamp of a file; a live daemon may be at work."""
    before = contents(run)
    done = trainerd(command, run, environment={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "trainerd.checkpoint.reader" in imported
    assert not {name for name in imported if name.split(".")[0] in ("torch", "numpy", "rich")}
    assert contents(run) == before


@pytest.mark.parametrize("command", ["list", "inspect", "verify"])
def test_a_run_that_cannot_be_read_is_a_storage_error(run, command):
    """Trouble of the storage is not damage of the checkpoints: exit code 74. (A folder's permissions stop no root.)"""
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").touch()
    assert_refused(trainerd(command, run), 74, f"Cannot list {run}/checkpoints: Not a directory")


def test_verify_tells_a_person_at_a_terminal_how_far_it_is(run):
    """One line on standard error that overwrites itself, and is gone at the end."""
    terminal, its_end = os.openpty()
    done = subprocess.run([TRAINERD, "verify", run], stdout=subprocess.PIPE, stderr=its_end, check=True)
    os.close(its_end)
    shown = os.read(terminal, 65536).decode()
    os.close(terminal)
    assert re.search(r"verifying \S+ \[#*\.*\] \d+% of [\d.]+ kB, [\d.]+ .B/s, \d+ s left", shown)
    assert shown.endswith("\r\x1b[K")
    assert done.stdout.endswith(b"3 valid, no damage found.\n")


@pytest.mark.parametrize(("step", "code"), [(30, 0), (20, 65)])
def test_a_reader_that_has_gone_is_no_error_and_hides_none(run, step, code):
    """`| head` closes the pipe early: the exit code stays the honest one, and nobody complains."""
    flip_last_byte(run, 20)
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [TRAINERD, "verify", f"{run}@{step}"], stdout=write_end, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("name", ["run.json", "terms/000001.json"])
def test_verify_does_not_overlook_the_files_that_all_checkpoints_depend_on(run, name):
    """A damaged ticket or run record is damage, with the way out; the checkpoints alone would look whole."""
    path = Path(run) / name
    path.write_bytes(path.read_bytes().replace(b"t", b"T", 1))
    done = trainerd("verify", run)
    assert done.returncode == 65
    assert f"{name} is damaged" in done.stderr
    assert "from a copy" in done.stderr


@pytest.mark.parametrize("make", [lambda inner: {1: inner}, lambda inner: (inner,), lambda inner: OrderedDict(a=inner)])
def test_the_deepest_state_that_can_be_saved_can_be_inspected(tmp_path, make):
    """Each level of it may take several levels of the tree."""
    value = 1
    for _ in range(97):
        value = make(value)
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    CheckpointStore(storage, term=owner.ensure_term(0)).save(1, {"deep": value})
    owner.release()
    for flags in ([], ["deep"], ["--json"]):
        done = trainerd("inspect", tmp_path / "run", *flags)
        assert done.returncode == 0, done.stderr
    assert CheckpointStore(storage).load().state == {"deep": value}
