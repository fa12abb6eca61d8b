"""Pruning real runs: what others need stays, a crash leaves everything whole that counts, and many cost no more."""

import logging
import os
import pathlib
import shutil

import msgspec
import pytest
import torch
from support.faults import CRASHED, CrashingStorage, in_child
from support.states import assert_same

from trainerd.checkpoint import envelope, listing, reader
from trainerd.checkpoint.errors import StorageUnusable
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.manifest import parse_manifest
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.pins import pin, unpin
from trainerd.checkpoint.pruning import Pruner
from trainerd.checkpoint.retention import Keep
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore

ALL = Keep(last=100_000)
LAST = Keep(last=1)


class CountingStorage:
    """The real storage, which notes every operation and its path."""

    def __init__(self, storage):
        self._storage = storage
        self.operations = []

    def __getattr__(self, name):
        value = getattr(self._storage, name)
        if not callable(value):
            return value

        def operation(path, *args, **kwargs):
            self.operations.append((name, path))
            return value(path, *args, **kwargs)

        return operation

    def paths(self, name, ending=""):
        """The paths of one kind of operation."""
        return [path for operation, path in self.operations if operation == name and path.endswith(ending)]


@pytest.fixture
def run(tmp_path):
    """A storage and the one owner of the run in it."""
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    yield storage, owner
    owner.release()


FROZEN = torch.arange(1000.0)


def state_of(step):
    """A tensor that never changes, and one that always does."""
    return {"frozen": FROZEN, "trained": torch.full((10,), float(step)), "n": step}


def filled(run, steps, keep=ALL, **options):
    """A store that has saved these steps, the frozen tensor once."""
    storage, owner = run
    store = CheckpointStore(storage, term=owner.ensure_term(0), keep=keep)
    for step in steps:
        store.save(step, state_of(step), **options)
    return store


def data_files(storage):
    """Where data files lie, below checkpoints/."""
    folder = pathlib.Path(storage.root, "checkpoints")
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))


def data_bytes(storage):
    """What they take."""
    return sum(path.stat().st_size for path in pathlib.Path(storage.root).rglob("*.safetensors"))


def name(step):
    return CheckpointName(step, 1)


def flip(storage, path):
    """Damage one byte of a file."""
    file = pathlib.Path(storage.root, path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_file_outlives_its_checkpoint_as_long_as_one_refers_to_it(run):
    """The checkpoint that wrote it is no longer listed or resumed from; its other files are gone."""
    storage, _ = run
    store = filled(run, (1, 2, 3))
    plan = Pruner(storage).prune(Keep(last=2), term=1)
    assert plan.goes == (name(1),)
    assert data_files(storage)[0] == "step-000000001.t1/r00000-0000.safetensors"
    assert [(info.step, info.state) for info in store.verify()] == [(2, "valid"), (3, "valid")]
    assert reader.newest_step(storage) == 3
    assert_same(store.load(2).state, state_of(2))
    store.save(4, {"n": 4})
    assert Pruner(storage).prune(LAST, term=1).goes == (name(2), name(3))
    assert data_files(storage) == []
    assert os.listdir(os.path.join(storage.root, "checkpoints")) == [str(name(4))]


def test_a_dry_run_says_what_the_prune_then_does_and_changes_nothing(run):
    """The same checkpoints, the same bytes, to the last one."""
    storage, _ = run
    filled(run, (1, 2, 3, 4))
    storage.make_folder("checkpoints/step-000000002.t0")
    storage.make_folder("checkpoints/step-000000009.t1")
    storage.write("checkpoints/step-000000009.t1/r00000-0000.safetensors", [b"debris"], 6)
    before, bytes_before = data_files(storage), data_bytes(storage)
    planned = Pruner(storage).plan(Keep(last=2))
    assert (data_files(storage), data_bytes(storage)) == (before, bytes_before)
    done = Pruner(storage).prune(Keep(last=2), term=1)
    assert planned.goes == done.goes == (name(1), name(2))
    assert planned.debris == done.debris == (name(9),)
    assert planned.kept == done.kept
    assert planned.bytes == done.bytes == bytes_before - data_bytes(storage) > 6


@pytest.mark.parametrize("harm", ["hash", "another run", "file gone"])
def test_damaged_checkpoints_stay_with_all_that_they_refer_to(run, harm):
    """They may be mended; whether the manifest can be read or not, nothing of theirs goes."""
    storage, _ = run
    filled(run, (1, 2, 3, 4))
    manifest = pathlib.Path(storage.root, name(2).manifest)
    if harm == "hash":
        flip(storage, name(2).manifest)
    if harm == "another run":
        body = parse_manifest(manifest.read_bytes(), name(2))
        manifest.write_bytes(envelope.seal(msgspec.structs.replace(body, run="other")))
    if harm == "file gone":
        own = next(path for path in data_files(storage) if path.startswith(str(name(2))))
        os.unlink(os.path.join(storage.root, "checkpoints", own))
    storage_files = data_files(storage)
    store = CheckpointStore(storage, term=1, keep=LAST)
    store.save(5, {"n": 5})
    left = [path for path in storage_files if path.startswith((str(name(1)), str(name(2))))]
    assert data_files(storage) == left, "1 is needed by 2; 3 and 4 are not"
    assert [(info.step, info.state) for info in store.list()] == [
        *([(1, "incomplete")] if harm == "hash" else []),
        (2, "damaged"),
        (5, "valid"),
    ]


def test_a_mended_manifest_finds_its_files(run):
    """A manifest that came back from a copy after prunes."""
    storage, _ = run
    filled(run, (1, 2, 3))
    good = storage.read(name(2).manifest)
    flip(storage, name(2).manifest)
    store = CheckpointStore(storage, term=1, keep=LAST)
    store.save(4, {"n": 4})
    storage.replace(name(2).manifest, good)
    assert_same(store.load(2).state, state_of(2))


def test_superseded_checkpoints_go_only_when_asked_and_never_take_what_the_lineage_needs(run):
    """After a step back from 3 to 1, both 2 and 3 count no more."""
    storage, owner = run
    filled(run, (1, 2, 3))
    owner.ensure_term(1)
    heir = CheckpointStore(storage, term=2, keep=ALL)
    heir.load(1)
    heir.save(2, state_of(2))
    assert Pruner(storage).prune(ALL, term=2).goes == ()
    pin(storage, name(3))
    assert Pruner(storage).prune(ALL, term=2, superseded=True).goes == (name(2),)
    unpin(storage, 3)
    assert Pruner(storage).prune(LAST, term=2, superseded=True).goes == (name(1), name(3))
    assert_same(heir.load().state, state_of(2))


def test_a_zombie_deletes_nothing(run, caplog):
    """A later term has begun: what this one no longer wants may be what the heir goes on from."""
    storage, owner = run
    zombie = filled(run, (1, 2, 3))
    owner.term = None
    owner.ensure_term(3)
    with caplog.at_level(logging.WARNING):
        assert Pruner(storage).prune(LAST, term=1) == Pruner(storage).prune(LAST, term=0)
        zombie.save(4, state_of(4))
    assert len(data_files(storage)) == 4
    assert "this is term 1, and the run's newest is 2" in caplog.text


def test_an_heir_that_begins_in_the_middle_stops_the_prune(run):
    """It is looked for before each deletion."""
    storage, owner = run
    filled(run, (1, 2, 3, 4))

    class HeirAtTheFirstDeletion:
        def __getattr__(self, attribute):
            return getattr(storage, attribute)

        def delete(self, path):
            storage.delete(path)
            owner.term = None
            owner.ensure_term(4)

    assert Pruner(HeirAtTheFirstDeletion()).prune(LAST, term=1).goes == (name(1),)
    assert len(data_files(storage)) == 4, "no data goes after that"
    assert [info.step for info in listing.list_checkpoints(storage)] == [2, 3, 4]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_around_every_operation_of_a_prune_leaves_every_checkpoint_whole(run, tmp_path, after):
    """Data shared by checkpoints that go and that stay; debris; then the next prune finishes the work."""
    storage, _ = run
    filled(run, (1, 2, 3, 4))
    storage.make_folder("checkpoints/step-000000009.t1")
    storage.write("checkpoints/step-000000009.t1/r00000-0000.safetensors", [b"debris"], 6)
    points = 0
    while True:
        points += 1
        folder = tmp_path / f"{points}"
        shutil.copytree(storage.root, folder)
        there = open_storage(str(folder))
        crashing = CrashingStorage(there, points, after=after)
        status = in_child(lambda crashing=crashing: Pruner(crashing).prune(LAST, term=1) and 0)
        assert status in (0, CRASHED)
        store = CheckpointStore(there, term=1)
        for info in store.verify():
            assert info.state in ("valid", "incomplete"), f"point {points}: {info}"
            if info.state == "valid":
                assert_same(store.load(info.step).state, state_of(info.step))
        assert store.load().step == 4
        Pruner(there).prune(LAST, term=1)
        assert len(data_files(there)) == 2, "the frozen file, and that of step 4"
        shutil.rmtree(folder)
        if status == 0:
            break
    assert points > 20


def test_a_save_whose_commit_may_still_appear_keeps_its_files(run):
    """An answer that was lost: the manifest comes after the next prune, and finds everything."""
    storage, owner = run

    class CommitOnItsWay:
        def __getattr__(self, attribute):
            return getattr(storage, attribute)

        def create(self, path, data):
            if path == name(2).manifest:
                self.late = data
                raise StorageUnusable("write", path, OSError(110, "timed out"))
            storage.create(path, data)

    slow = CommitOnItsWay()
    store = CheckpointStore(slow, term=owner.ensure_term(0), keep=ALL)
    store.save(1, state_of(1))
    with pytest.raises(StorageUnusable, match="no answer in time"):
        store.save(2, state_of(2))
    store.save(3, state_of(3))
    storage.create(name(2).manifest, slow.late)
    assert_same(store.load(2).state, state_of(2))


def test_what_is_gone_for_good_is_not_counted_and_what_changed_is_seen(run):
    """One pruner over a life: folders deleted by hand, a newest one damaged since."""
    storage, _ = run
    filled(run, (1, 2, 3, 4))
    pruner = Pruner(storage)
    assert pruner.prune(ALL, term=1).goes == ()
    shutil.rmtree(os.path.join(storage.root, name(2).folder))
    own = next(path for path in data_files(storage) if path.startswith(str(name(4))))
    os.truncate(os.path.join(storage.root, "checkpoints", own), 10)
    assert pruner.prune(LAST, term=1).goes == (name(1),), "3 is the newest valid one, 4 stays for a repair"


def test_metrics_decide_which_is_best_and_a_name_that_is_nowhere_is_told_once(run, caplog):
    """A typing error in `metric` would else delete every best one in silence."""
    storage, owner = run
    keep = Keep(last=1, best=1, metric="loss")
    store = CheckpointStore(storage, term=owner.ensure_term(0), keep=keep)
    for step, loss in enumerate([3.0, 1.0, float("nan"), float("-inf"), 2.0], 1):
        store.save(step, {"n": step}, metrics={"loss": loss})
    assert [(info.step, info.kept_because) for info in store.list()] == [
        (2, ("best=1",)),
        (5, ("newest", "last=1")),
    ]
    assert "has no metric loss" in caplog.text, "of steps 3 and 4"
    caplog.clear()
    store = CheckpointStore(storage, term=1, keep=Keep(last=1, best=1, metric="los"))
    store.save(6, {"n": 6}, metrics={"loss": 1.0})
    store.save(7, {"n": 7}, metrics={"loss": 1.0})
    assert [record.getMessage() for record in caplog.records] == [
        "keep.best: the checkpoint of step 6 has no metric los, so it cannot be the best; it has: loss"
    ]


def test_the_rules_of_the_last_save_answer_why(run):
    """They lie in each manifest; without any, only what holds anyway is said."""
    storage, _ = run
    store = filled(run, (1, 2, 3, 4))
    CheckpointStore(storage, term=1, keep=Keep(last=2, every_steps=3)).save(6, state_of(6), pinned=[4])
    assert [(info.step, info.pinned, info.kept_because) for info in store.list()] == [
        (3, False, ("every=3 steps",)),
        (4, True, ("pinned", "last=2")),
        (6, False, ("newest", "last=2", "every=3 steps")),
    ]


# ---- scale

MANY = 10_000


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A run of 10,000 checkpoints, made of one."""
    folder = tmp_path_factory.mktemp("many") / "run"
    storage = open_storage(str(folder))
    owner = RunOwner.acquire(storage)
    CheckpointStore(storage, term=owner.ensure_term(0), keep=ALL).save(1, {"n": 1, "w": torch.ones(3)})
    owner.release()
    manifest = parse_manifest(storage.read(name(1).manifest), name(1))
    data = folder / "checkpoints" / str(name(1)) / "r00000-0000.safetensors"
    for step in range(2, MANY + 1):
        copy = folder / "checkpoints" / str(name(step))
        copy.mkdir()
        os.link(data, copy / data.name)
        (copy / "manifest.json").write_bytes(envelope.seal(msgspec.structs.replace(manifest, step=step)))
    return folder


def test_a_resume_looks_at_the_newest_only_however_many_there_are(many):
    """One listing, one manifest; likewise for the question whether a new term has to begin."""
    storage = CountingStorage(open_storage(str(many)))
    assert CheckpointStore(storage).load().step == MANY
    assert storage.paths("names", "checkpoints") == ["checkpoints"]
    assert storage.paths("read", "manifest.json") == [name(MANY).manifest]
    assert len(storage.operations) < 20

    storage = CountingStorage(open_storage(str(many)))
    owner = RunOwner(storage, 2)
    owner.term = 1
    assert owner.ensure_term(MANY) == 1
    assert storage.paths("size", "manifest.json") == [name(MANY).manifest]
    assert len(storage.operations) < 10


def test_a_prune_after_a_save_reads_what_is_new_only(many):
    """All manifests once, then two for each save: the new one, to judge it and to have it whole."""
    storage = CountingStorage(open_storage(str(many)))
    store = CheckpointStore(storage, term=1, keep=Keep(last=MANY))
    store.save(MANY + 1, {"n": 1})
    assert len(storage.paths("read", "manifest.json")) >= MANY
    storage.operations.clear()
    store.save(MANY + 2, {"n": 2})
    assert storage.paths("delete", "manifest.json") == [name(2).manifest]
    assert sorted(set(storage.paths("read", "manifest.json"))) == [name(2).manifest, name(MANY + 2).manifest]
    assert storage.paths("names", "checkpoints") == ["checkpoints"]
    assert len(storage.operations) < 40
