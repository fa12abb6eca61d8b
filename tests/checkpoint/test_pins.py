"""What a person pins stays: against the rules, against damage of the record, against a prune at the same moment."""

import os
import pathlib

import pytest

from trainerd.checkpoint import pins
from trainerd.checkpoint.errors import NoCheckpoint
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.pruning import Pruner
from trainerd.checkpoint.retention import Keep
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore

LAST = Keep(last=1)


@pytest.fixture
def storage(tmp_path):
    """A run with checkpoints of the steps 1, 2 and 3."""
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    store = CheckpointStore(storage, term=owner.ensure_term(0), keep=Keep(last=9))
    for step in (1, 2, 3):
        store.save(step, {"n": step})
    yield storage
    owner.release()


def first(store):
    return store.list()[0]


def steps(storage):
    return [info.step for info in CheckpointStore(storage).list()]


def test_a_pin_outlives_every_rule_until_it_is_removed(storage):
    """The store's own pin and unpin, and why, in words."""
    store = CheckpointStore(storage, term=1, keep=LAST)
    store.pin(1, "for the paper")
    store.pin(1, "another word changes nothing")
    assert store.prune(dry_run=True) == ["step-000000002.t1"]
    assert store.prune() == ["step-000000002.t1"]
    assert [(info.step, info.pinned, info.kept_because) for info in store.list()] == [
        (1, True, ("pinned by hand: for the paper", "last=9")),
        (3, False, ("newest", "last=9")),
    ]
    store.unpin(1)
    assert store.prune() == ["step-000000001.t1"]


def test_a_pin_of_what_is_not_there_is_refused_and_leaves_nothing(storage):
    """It would else look as if something were kept."""
    with pytest.raises(NoCheckpoint, match=r"no checkpoint of step 7. It has the steps 1, 2, 3"):
        CheckpointStore(storage).pin(7)
    with pytest.raises(NoCheckpoint, match="it was pruned just now"):
        pins.pin(storage, CheckpointName(7, 1))
    assert pins.pinned_names(storage) == []


def test_an_unpin_of_what_nobody_pinned_is_told_with_what_is_pinned(storage):
    """A typing error in the step must not pass in silence."""
    store = CheckpointStore(storage)
    with pytest.raises(NoCheckpoint, match=r"no one has pinned step 2. Nothing is"):
        store.unpin(2)
    store.pin(1)
    with pytest.raises(NoCheckpoint, match=r"no one has pinned step 2. Pinned are the steps 1"):
        store.unpin(2)


@pytest.mark.parametrize("data", [b"", b"nonsense", b'{"xxh3_128":"00000000000000000000000000000000","format":1}'])
def test_a_damaged_record_pins_as_well_and_is_told(storage, data):
    """Whoever wrote it wanted something kept. A second pin mends it, an unpin removes it."""
    store = CheckpointStore(storage, term=1, keep=LAST)
    store.pin(1)
    pathlib.Path(storage.root, "pins/step-000000001.t1.json").write_bytes(data)
    store.prune()
    assert first(store).kept_because[0] == "pinned by hand (its record is damaged)"
    store.pin(1, "mended")
    assert first(store).kept_because[0] == "pinned by hand: mended"
    store.unpin(1)
    assert store.prune() == ["step-000000001.t1"]


def test_foreign_files_among_the_pins_pin_nothing(storage):
    """Another spelling, another ending, temporary names."""
    storage.make_folder("pins")
    for name in ("step-1.t1.json", "step-000000001.t1", "step-000000001.t1.json.0123.tmp", "README"):
        pathlib.Path(storage.root, "pins", name).touch()
    assert pins.pinned_names(storage) == []


class PinnedAtTheDeletion:
    """The real storage; somebody pins a checkpoint right before, or right after, its manifest is deleted."""

    def __init__(self, storage, step, *, after):
        self._storage = storage
        self._name = CheckpointName(step, 1)
        self._after = after
        self.told = None

    def __getattr__(self, name):
        return getattr(self._storage, name)

    def delete(self, path):
        now = path == self._name.manifest
        if now and not self._after:
            self._pin()
        self._storage.delete(path)
        if now and self._after:
            self._pin()

    def _pin(self):
        try:
            pins.pin(self._storage, self._name)
        except NoCheckpoint:
            self.told = "gone"
        else:
            self.told = "kept"


def test_a_pin_between_a_prunes_look_and_its_deletion_keeps_the_checkpoint(storage):
    """Who was told that it stays finds it whole."""
    racing = PinnedAtTheDeletion(storage, 1, after=False)
    plan = Pruner(racing).prune(LAST, term=1)
    assert racing.told == "kept"
    assert [name.step for name in plan.goes] == [2]
    assert plan.kept[CheckpointName(1, 1)] == ("pinned by hand",)
    assert CheckpointStore(storage).load(1).state == {"n": 1}


def test_a_pin_right_after_the_deletion_is_refused_and_leaves_nothing(storage):
    """It is told that it came too late."""
    racing = PinnedAtTheDeletion(storage, 1, after=True)
    assert [name.step for name in Pruner(racing).prune(LAST, term=1).goes] == [1, 2]
    assert racing.told == "gone"
    assert os.listdir(os.path.join(storage.root, "pins")) == []
    assert steps(storage) == [3]
