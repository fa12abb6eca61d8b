"""The whole store on every storage, on real servers: what is true on a disk is true there."""

import pytest
import torch
from support.servers import KINDS
from support.states import assert_same

from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.retention import Keep
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore


@pytest.fixture(params=KINDS)
def place(request, servers):
    return servers.place(request.param)


def store_at(place, resumed_from=0, keep=None):
    storage = open_storage(*place)
    owner = RunOwner.acquire(storage)
    return CheckpointStore(storage, term=owner.ensure_term(resumed_from), keep=keep or Keep(last=9)), owner


def state_of(step):
    """Ten megabytes that never change, some that do, and values."""
    return {
        "frozen": torch.arange(2_500_000.0),
        "w": torch.full((300_000,), float(step)),
        "hooks": {"EMA": {"n": step, "decay": 0.9}},
    }


def test_save_list_verify_load_prune_and_pin(place):
    """One life of a run, and its next daemon."""
    store, owner = store_at(place)
    for step in (1, 2, 3):
        store.save(step, state_of(step))
    assert [(info.step, info.state) for info in store.verify()] == [(1, "valid"), (2, "valid"), (3, "valid")]
    assert store.list()[1].unique_bytes < 2_000_000, "the frozen tensor is there once"
    store.pin(1, "the first")
    owner.release()

    store, owner = store_at(place, resumed_from=3, keep=Keep(last=1))
    loaded = store.load()
    assert (loaded.step, loaded.skipped) == (3, ())
    assert_same(loaded.state, state_of(3))
    lazy = store.open(2)
    assert lazy.at("hooks.EMA").load() == {"n": 2, "decay": 0.9}
    assert torch.equal(lazy["w"], state_of(2)["w"])
    live = {"w": torch.zeros(300_000)}
    store.load(1, into=live)
    assert torch.equal(live["w"], state_of(1)["w"])

    store.load()
    store.save(4, state_of(4))
    assert [(info.step, info.pinned) for info in store.list()] == [(1, True), (4, False)]
    assert [info.state for info in store.verify()] == ["valid", "valid"]
    owner.release()


def test_a_tensor_larger_than_a_file_is_cut_and_comes_back(place):
    """40 MB, on object stores in three pieces."""
    store, owner = store_at(place)
    state = {"large": torch.arange(10_000_000, dtype=torch.int32).reshape(1000, 10_000)}
    store.save(1, state)
    assert_same(store.load().state, state)
    owner.release()


def test_a_damaged_byte_is_noticed_and_the_checkpoint_passed_over(place):
    """Whatever holds it."""
    store, owner = store_at(place)
    for step in (1, 2):
        store.save(step, {"w": torch.full((1000,), float(step))})
    storage = open_storage(*place)
    [file] = [name for name in storage.names("checkpoints/step-000000002.t1") if name.endswith(".safetensors")]
    path = f"checkpoints/step-000000002.t1/{file}"
    data = bytearray(storage.read(path))
    data[-1] ^= 1
    storage.replace(path, bytes(data))
    assert [info.state for info in store.verify()] == ["valid", "damaged"]
    loaded = store.load()
    assert loaded.step == 1
    assert "does not match its hash" in loaded.skipped[0]
    owner.release()
