"""Repair adopts what is proven whole, moves the rest aside and deletes nothing; a crash in its midst harms nothing."""

import itertools
import os
import pathlib
import shutil

import pytest
import torch
from support.faults import CRASHED, CrashingStorage, in_child
from support.states import assert_same

from trainerd.checkpoint.errors import RunDamaged
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.pins import pinned_names
from trainerd.checkpoint.repair import CannotRepair, plan_checkpoints, plan_records
from trainerd.checkpoint.retention import Keep
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore
from trainerd.checkpoint.verifying import verify_checkpoints


def state_of(step):
    return {"frozen": torch.arange(2000.0), "w": torch.full((1000,), float(step)), "n": step}


@pytest.fixture
def run(tmp_path):
    """Three checkpoints; the second and third refer to the first one's file for the frozen tensor."""
    folder = tmp_path / "run"
    storage = open_storage(str(folder))
    owner = RunOwner.acquire(storage)
    store = CheckpointStore(storage, term=owner.ensure_term(0), keep=Keep(last=9))
    for step in (1, 2, 3):
        store.save(step, state_of(step))
    store.pin(1, "the first")
    owner.release()
    return folder


def repair(folder, **options):
    storage = open_storage(str(folder))
    records = plan_records(storage, **options)
    for step in records:
        step.do(storage)
    steps = plan_checkpoints(storage)
    for step in steps:
        step.do(storage)
    return [(step.action, step.what) for step in records + steps]


def states(folder):
    return [(info.step, info.state) for info in verify_checkpoints(open_storage(str(folder)))]


def contents(folder):
    """Every file's bytes, wherever it lies: nothing of this may be lost."""
    return sorted(path.read_bytes() for path in pathlib.Path(folder).rglob("*") if path.is_file())


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_run_that_is_whole_is_left_as_it_is(run):
    """No step, no byte."""
    before = contents(run)
    assert repair(run) == []
    assert contents(run) == before


def test_a_damaged_checkpoint_is_moved_aside_with_all_its_bytes(run):
    """The rest is whole, a resume warns no more, and what was moved can still be looked at."""
    flip(run / "checkpoints/step-000000003.t1/r00000-0000.safetensors")
    before = contents(run)
    assert repair(run) == [("moved aside", "step-000000003.t1")]
    assert states(run) == [(1, "valid"), (2, "valid")]
    assert contents(run) == before
    loaded = CheckpointStore(open_storage(str(run))).load()
    assert (loaded.step, loaded.skipped) == (2, ())
    assert len(list((run / "aside").rglob("step-000000003.t1/*"))) == 2


def test_a_file_that_whole_checkpoints_refer_to_stays(run):
    """The first one's manifest is damaged; the two others need its data."""
    flip(run / "checkpoints/step-000000001.t1/manifest.json")
    assert repair(run) == [("moved aside", "step-000000001.t1")]
    assert states(run) == [(2, "valid"), (3, "valid")]
    assert [path.name for path in (run / "checkpoints/step-000000001.t1").iterdir()] == ["r00000-0000.safetensors"]


def test_a_save_that_died_right_before_its_commit_is_adopted(run):
    """Its manifest is there under a temporary name, and every byte that it names is whole."""
    folder = run / "checkpoints/step-000000003.t1"
    (folder / "manifest.json").rename(folder / "manifest.json.0123456789abcdef.tmp")
    assert repair(run) == [("adopted", "step-000000003.t1")]
    assert states(run) == [(1, "valid"), (2, "valid"), (3, "valid")]
    assert_same(CheckpointStore(open_storage(str(run))).load().state, state_of(3))


@pytest.mark.parametrize("harm", ["data", "manifest", "term", "lineage"])
def test_what_is_not_proven_whole_or_would_not_count_is_not_adopted(run, harm):
    """A flipped byte, a term that nobody began, a step that is off the lineage."""
    folder = run / "checkpoints/step-000000003.t1"
    temporary = folder / "manifest.json.0123456789abcdef.tmp"
    (folder / "manifest.json").rename(temporary)
    if harm == "data":
        flip(folder / "r00000-0000.safetensors")
    elif harm == "manifest":
        flip(temporary, 100)
    elif harm == "term":
        folder.rename(run / "checkpoints/step-000000003.t7")
    else:
        owner = RunOwner.acquire(open_storage(str(run)))
        assert owner.ensure_term(1) == 2
        owner.release()
    assert repair(run) == []


def test_a_damaged_manifest_beside_a_whole_temporary_one_is_exchanged(run):
    """Both are kept."""
    folder = run / "checkpoints/step-000000002.t1"
    shutil.copy(folder / "manifest.json", folder / "manifest.json.0123456789abcdef.tmp")
    flip(folder / "manifest.json")
    assert repair(run) == [("adopted", "step-000000002.t1")]
    assert states(run) == [(1, "valid"), (2, "valid"), (3, "valid")]
    assert len(list((run / "aside").rglob("manifest.json"))) == 1


def test_damaged_records_are_rebuilt_from_what_proves_them(run):
    """The run's id is in every manifest; that something was committed, or pinned, is in a name."""
    run_id = CheckpointStore(open_storage(str(run)))
    flip(run / "run.json")
    flip(run / "terms/committed-000001.json")
    flip(run / "pins/step-000000001.t1.json")
    with pytest.raises(RunDamaged):
        run_id.load()
    assert [what for _, what in repair(run)] == [
        "run.json",
        "terms/committed-000001.json",
        "pins/step-000000001.t1.json",
    ]
    assert states(run) == [(1, "valid"), (2, "valid"), (3, "valid")]
    assert [name.step for name in pinned_names(open_storage(str(run)))] == [1]
    assert CheckpointStore(open_storage(str(run))).load().step == 3
    assert repair(run) == []


def test_a_run_record_that_the_manifests_disagree_about_is_left_to_a_person(run):
    """Two ids, or none."""
    flip(run / "run.json")
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    before = contents(run)
    with pytest.raises(CannotRepair, match="there is none"):
        repair(run)
    assert contents(run) == before


def test_a_damaged_ticket_is_asked_for_and_then_written(run):
    """Nothing but the ticket tells which checkpoints count; a person may know."""
    flip(run / "terms/000001.json")
    with pytest.raises(CannotRepair, match="--resumed-from 1=STEP"):
        repair(run)
    assert repair(run, resumed_from={1: 0}) == [("rebuilt", "terms/000001.json")]
    assert states(run) == [(1, "valid"), (2, "valid"), (3, "valid")]
    assert CheckpointStore(open_storage(str(run))).load().step == 3


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_repair_that_dies_can_be_done_again(run, tmp_path, after):
    """Around every storage call: nothing is lost, and the next repair comes to the same end."""
    flip(run / "checkpoints/step-000000002.t1/r00000-0000.safetensors")
    flip(run / "terms/committed-000001.json")
    folder = run / "checkpoints/step-000000003.t1"
    (folder / "manifest.json").rename(folder / "manifest.json.0123456789abcdef.tmp")
    before = set(contents(run))
    for at in itertools.count(1, 3):
        copy = tmp_path / f"{at}"
        shutil.copytree(run, copy)

        def dying(copy=copy, at=at):
            storage = CrashingStorage(open_storage(str(copy)), at, after=after)
            for step in plan_records(storage):
                step.do(storage)
            for step in plan_checkpoints(storage):
                step.do(storage)

        status = in_child(dying)
        assert status in (0, CRASHED)
        assert before <= set(contents(copy))
        repair(copy)
        assert before <= set(contents(copy))
        # An empty folder may stay behind; the next prune takes it.
        assert [found for found in states(copy) if found != (2, "incomplete")] == [(1, "valid"), (3, "valid")]
        assert not list((copy / "checkpoints").rglob("step-000000002.t1/*"))
        shutil.rmtree(copy)
        if status == 0:
            break
    assert at > 20


def test_foreign_files_and_debris_are_left_alone(run):
    """They are nobody's business here, or the next prune's."""
    (run / "checkpoints/mine").mkdir()
    (run / "checkpoints/step-000000009.t1").mkdir()
    (run / "checkpoints/step-000000009.t1/r00000-0000.safetensors").write_bytes(b"half")
    before = sorted(os.listdir(run / "checkpoints"))
    assert repair(run) == []
    assert sorted(os.listdir(run / "checkpoints")) == before
