"""Damage in what is stored is found while training goes on, within a budget, and is not built on."""

import threading

import pytest
import torch
from support.states import assert_same

from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.retention import Keep
from trainerd.checkpoint.scrub import Scrubber, pause_seconds
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore

FAST = 10**12


@pytest.fixture
def store(tmp_path):
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    store = CheckpointStore(storage, term=owner.ensure_term(0), keep=Keep(last=9))
    for step in (1, 2):
        store.save(step, {"frozen": torch.arange(100_000.0), "w": torch.full((1000,), float(step))})
    yield store
    owner.release()


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def first_found(folder):
    """What a scrubber tells first; the test fails if that takes a minute."""
    told, event = [], threading.Event()
    scrubber = Scrubber(open_storage(str(folder)), FAST, lambda *found: (told.append(found), event.set()))
    scrubber.start()
    assert event.wait(60)
    scrubber.stop()
    return told[0]


def test_a_flipped_byte_of_an_old_checkpoint_is_found_and_named(store, tmp_path):
    """The file, the tensor, the step that needs it, and the way out."""
    flip(tmp_path / "run/checkpoints/step-000000001.t1/r00000-0000.safetensors", 200_000)
    path, text = first_found(tmp_path / "run")
    assert path == "checkpoints/step-000000001.t1/r00000-0000.safetensors"
    for part in ("frozen", "step 2", "trainerd repair"):
        assert part in text


def test_a_file_that_is_gone_and_a_damaged_manifest_are_found(store, tmp_path):
    """Of a checkpoint that is still there."""
    flip(tmp_path / "run/checkpoints/step-000000002.t1/manifest.json", 60)
    path, text = first_found(tmp_path / "run")
    assert path == "checkpoints/step-000000002.t1/manifest.json"
    assert "does not match its hash" in text


def test_the_next_save_does_not_build_on_what_is_damaged(store, tmp_path):
    """The frozen tensor is written anew, from the memory where it is still right."""
    path = "checkpoints/step-000000001.t1/r00000-0000.safetensors"
    flip(tmp_path / "run" / path, 200_000)
    state = {"frozen": torch.arange(100_000.0), "w": torch.zeros(1000)}
    store.distrust([path])
    store.save(3, state)
    assert_same(store.load(3).state, state)
    store.save(4, state)
    assert_same(store.load(4).state, state)
    folders = {file.parent.name for file in tmp_path.rglob("*.safetensors") if file.stat().st_size > 400_000}
    assert folders == {"step-000000001.t1", "step-000000003.t1"}, "from the third on it is referred to again"


def test_the_budget_of_an_hour_is_kept():
    """After each part the pause is what the part may take."""
    assert pause_seconds(4_000_000_000, 4_000_000_000) == 3600
    assert pause_seconds(2**20, 4_000_000_000) == pytest.approx(0.944, abs=0.001)
