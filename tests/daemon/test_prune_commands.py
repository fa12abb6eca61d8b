"""`prune`, `pin` and `unpin` through the console script, beside a live daemon and without one."""

import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from support.command_line import assert_refused, trainerd
from support.runs import Run, write_target

from trainerd.checkpoint import envelope
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.listing import list_checkpoints
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.pruning import Pruner
from trainerd.checkpoint.reader import read_manifest
from trainerd.checkpoint.retention import Keep
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """A run with five checkpoints that share a frozen tensor, saved by the rule `last=5`."""
    folder = tmp_path_factory.mktemp("pruning") / "a"
    storage = open_storage(str(folder))
    owner = RunOwner.acquire(storage)
    store = CheckpointStore(storage, term=owner.ensure_term(0), keep=Keep(last=5))
    frozen = torch.zeros(1000)
    for step in (10, 20, 30, 40, 50):
        store.save(step, {"frozen": frozen, "n": torch.tensor(step)}, metrics={"total_loss": abs(step - 20.0)})
    owner.release()
    return folder


@pytest.fixture
def run(template, tmp_path):
    """A copy of the run."""
    return Path(shutil.copytree(template, tmp_path / "a"))


def steps(run):
    return [info.step for info in list_checkpoints(open_storage(str(run)))]


def contents(folder):
    """Every file with its bytes and times."""
    files = sorted(folder.rglob("*"))
    return [(str(file), file.stat().st_mtime_ns, file.read_bytes() if file.is_file() else None) for file in files]


def size(run):
    """Bytes of all data files."""
    return sum(file.stat().st_size for file in run.rglob("*.safetensors"))


def test_a_dry_run_shows_what_goes_what_stays_and_why_and_changes_nothing(run):
    """Not even a lock; the bytes are those that then are really freed."""
    words = ("prune", run, "--keep", "last=2", "--keep", "best=1, every=30 steps")
    before = contents(run)
    done = trainerd(*words, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert contents(run) == before
    head, *rows, verdict = done.stdout.splitlines()
    assert head.split() == ["step", "term", "fate", "why"]
    assert [row.split(maxsplit=3) for row in rows] == [
        ["10", "1", "goes"],
        ["20", "1", "stays", "best=1"],
        ["30", "1", "stays", "every=30 steps"],
        ["40", "1", "stays", "last=2"],
        ["50", "1", "stays", "newest, last=2"],
    ]
    assert verdict.startswith("Would delete 1 of 5 checkpoints;")
    assert verdict.endswith("freed. Rules: last=2, every=30 steps, best=1.")
    planned = json.loads(trainerd(*words, "--dry-run", "--json").stdout)
    assert list(planned) == ["run", "dry_run", "rules", "freed_bytes", "debris", "checkpoints"]
    assert planned["checkpoints"][0] == {"step": 10, "term": 1, "kept": False, "kept_because": []}
    assert planned["checkpoints"][1] == {"step": 20, "term": 1, "kept": True, "kept_because": ["best=1"]}

    bytes_before = size(run)
    done = trainerd(*words, "--json")
    assert json.loads(done.stdout) == {**planned, "dry_run": False}
    assert planned["freed_bytes"] == bytes_before - size(run)
    assert steps(run) == [20, 30, 40, 50]


def test_data_that_others_need_is_not_counted_as_freed(run):
    """The frozen tensor lies in the oldest checkpoint's folder."""
    freed = json.loads(trainerd("prune", run, "--keep", "last=1", "--json").stdout)["freed_bytes"]
    assert 0 < freed < 4000 < size(run)
    assert [info.state for info in list_checkpoints(open_storage(str(run)))] == ["valid"]
    assert trainerd("verify", run).returncode == 0


def test_without_rules_those_of_the_last_save_count(run):
    """Nothing goes that the job itself would not delete."""
    done = trainerd("prune", run)
    assert done.returncode == 0
    assert done.stdout == "Deleted 0 of 5 checkpoints; 0 B freed. Rules: last=5.\n"
    assert len(steps(run)) == 5


def test_a_run_that_remembers_no_rules_is_not_pruned_by_a_guess(run):
    """As older versions wrote them."""
    storage, name = open_storage(str(run)), CheckpointName(50, 1)
    storage.replace(name.manifest, envelope.seal(msgspec.structs.replace(read_manifest(storage, name), keep={})))
    assert_refused(trainerd("prune", run), 2, "does not remember", "--keep last=3 --dry-run")
    assert trainerd("prune", run, "--keep", "last=3").returncode == 0
    assert steps(run) == [30, 40, 50]


def test_debris_and_superseded_ones_go_damaged_ones_stay(run):
    """The latter wait for a repair, whatever is asked."""
    (run / "checkpoints/step-000000060.t1").mkdir()
    owner = RunOwner.acquire(open_storage(str(run)))
    owner.ensure_term(40)
    owner.release()
    manifest = run / "checkpoints/step-000000030.t1/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert trainerd("prune", run, "--keep", "last=9").returncode == 0
    assert steps(run) == [10, 20, 30, 40, 50]
    done = trainerd("prune", run, "--keep", "last=1", "--superseded", "--dry-run")
    assert [row.split(maxsplit=3)[2:] for row in done.stdout.splitlines()[1:-1]] == [
        ["goes"],
        ["goes"],
        ["stays", "damaged"],
        ["stays", "newest, last=1"],
        ["goes"],
    ]
    assert trainerd("prune", run, "--keep", "last=1", "--superseded").returncode == 0
    infos = list_checkpoints(open_storage(str(run)))
    assert [(info.step, info.state) for info in infos if info.state != "incomplete"] == [(30, "damaged"), (40, "valid")]


def test_pins_are_shown_with_their_note_and_hold_until_unpinned(run):
    """In the list, against a prune, and gone again."""
    assert (
        trainerd("pin", f"{run}@20", "--note", "for\nthe  paper").stdout
        == "step-000000020.t1 is pinned: for the paper\n"
    )
    assert "was pinned already: for the paper" in trainerd("pin", f"{run}@20", "--note", "other").stdout
    assert trainerd("prune", run, "--keep", "last=1").returncode == 0
    listed = json.loads(trainerd("list", run, "--json").stdout)["checkpoints"]
    assert [(one["step"], one["pinned"], one["kept_because"]) for one in listed] == [
        (20, True, ["pinned by hand: for the paper", "last=5"]),
        (50, False, ["newest", "last=5"]),
    ]
    assert "pinned by hand: for the paper" in trainerd("list", run).stdout
    assert trainerd("unpin", f"{run}@20").stdout == "step-000000020.t1 is no longer pinned\n"
    assert_refused(trainerd("unpin", f"{run}@20"), 78, "no one has pinned step 20")
    assert trainerd("prune", run, "--keep", "last=1").returncode == 0
    assert steps(run) == [50]


def test_a_pin_of_a_step_that_is_not_there_ends_with_78_and_the_steps_there_are(run, tmp_path):
    """Nor of a run that is not there; nothing is made."""
    assert_refused(trainerd("pin", f"{run}@15"), 78, "no checkpoint of step 15", "10, 20, 30, 40, 50")
    assert_refused(trainerd("pin", f"{tmp_path / 'b'}@15"), 78, "There is no run at")
    assert_refused(trainerd("prune", tmp_path / "b"), 78, "There is no run at")
    assert not (run / "pins").exists()
    assert not (tmp_path / "b").exists()


def test_what_is_damaged_cannot_be_pinned(run):
    """Its owner learns it now and not when it is needed."""
    manifest = run / "checkpoints/step-000000030.t1/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert_refused(trainerd("pin", f"{run}@30"), 78, "step-000000030.t1", "damaged")


@pytest.mark.parametrize("words", [("prune", "--dry-run"), ("prune",), ("pin",), ("unpin",)])
def test_the_commands_import_no_torch(run, words):
    """They answer at once."""
    if words[0] == "unpin":
        trainerd("pin", f"{run}@30")
    operand = run if words[0] == "prune" else f"{run}@30"
    done = trainerd(words[0], operand, *words[1:], environment={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {name for name in imported if name.split(".")[0] in ("torch", "numpy", "rich")}


def test_a_live_daemon_sees_a_pin_at_its_next_save_and_is_never_pruned_beneath(tmp_path):
    """prune ends with 79, dry runs and pins work, and the job's own rules, the metric's included, do the rest."""
    folder = tmp_path / "run"
    flags = ("--checkpoint-keep", "last=1, best=1")
    with Run(write_target(tmp_path), folder, *flags, max_iter=12, every="2 steps", hold_at=3) as run:
        run.wait_for_step(2)
        run.wait_for("holding step")
        assert trainerd("pin", f"{folder}@2").returncode == 0
        assert_refused(trainerd("prune", folder, "--keep", "last=1"), 79, str(run.pid))
        assert trainerd("prune", folder, "--keep", "last=1", "--dry-run").returncode == 0
        (tmp_path / "step.go").touch()
        assert run.wait() == 0, run.text
    infos = {info.step: info for info in list_checkpoints(open_storage(str(folder)))}
    assert "pinned by hand" in infos[2].kept_because
    assert {"newest", "last=1"} <= set(infos[12].kept_because)
    assert sum("best=1" in info.kept_because for info in infos.values()) == 1
    assert len(infos) <= 3
    assert Pruner(open_storage(str(folder))).plan(Keep(last=1, best=1)).goes == ()
    assert os.listdir(folder / "pins") == ["step-000000002.t1.json"]
