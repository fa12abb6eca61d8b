"""A tensor that has not changed is referred to, not written again; one that has is never taken for unchanged."""

import os

import pytest
import torch
from support.states import assert_same

from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.reader import read_manifest
from trainerd.checkpoint.retention import Keep
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore


@pytest.fixture
def store(tmp_path):
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    yield CheckpointStore(storage, term=owner.ensure_term(0), keep=Keep(last=100))
    owner.release()


def written_bytes(tmp_path):
    """Bytes of data files in each checkpoint's folder, oldest first."""
    folders = sorted((tmp_path / "run/checkpoints").iterdir())
    return [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in folders]


def test_a_frozen_backbone_is_written_once(store, tmp_path):
    """Three saves, one of two tensors frozen: its 4 MB are on the disk once, and every checkpoint is whole."""
    frozen, trained = torch.randn(1_000_000), torch.randn(1000)
    for step in (1, 2, 3):
        trained += 1
        store.save(step, {"frozen": frozen, "trained": trained})
    first, second, third = written_bytes(tmp_path)
    assert first > 4_000_000
    assert max(second, third) < 10_000
    assert [info.bytes for info in store.list()] == [4_004_000] * 3
    assert [info.unique_bytes for info in store.list()] == [0, second, third], "what deleting each would free"
    assert [info.state for info in store.verify()] == ["valid"] * 3
    assert_same(store.load().state, {"frozen": frozen, "trained": trained})


def test_references_point_to_the_file_that_has_the_bytes_and_not_to_each_other(store, tmp_path):
    """The third checkpoint refers to the first, so that the second can go."""
    frozen = torch.randn(1000)
    for step in (1, 2, 3):
        store.save(step, {"frozen": frozen, "step": torch.tensor(step)})
    manifest = read_manifest(open_storage(str(tmp_path / "run")), CheckpointName(3, 1))
    assert sorted(manifest.files) == ["r00000-0000.safetensors", "step-000000001.t1/r00000-0000.safetensors"]


@pytest.mark.parametrize("at", [0, 1, 4_999, 123_457, 999_999])
def test_one_changed_element_of_a_million_is_written(store, tmp_path, at):
    """A sample that is the same proves nothing: the whole tensor is hashed before it is taken for unchanged."""
    table = torch.zeros(1_000_000)
    store.save(1, {"table": table})
    table[at] = 1.0
    store.save(2, {"table": table})
    assert_same(store.load().state, {"table": table})
    assert written_bytes(tmp_path)[1] > 4_000_000


def test_negative_zero_and_other_nans_are_changes(store, tmp_path):
    """Equal by ==, or unequal to itself: the bits decide."""
    zero, nan = torch.zeros(3), torch.full((3,), float("nan"))
    store.save(1, {"zero": zero, "nan": nan})
    store.save(2, {"zero": -zero, "nan": nan})
    assert_same(store.load().state, {"zero": -zero, "nan": nan})
    assert written_bytes(tmp_path)[1] > 0


def test_another_shape_or_type_of_the_same_bytes_is_another_tensor(store):
    """The bytes alone are not the tensor."""
    for step, tensor in enumerate((torch.zeros(4, 6), torch.zeros(6, 4), torch.zeros(24, dtype=torch.int32)), 1):
        store.save(step, {"x": tensor})
        assert_same(store.load().state, {"x": tensor})


def test_a_new_process_refers_to_what_it_has_loaded(store, tmp_path):
    """Verified while loading, so it may be built on."""
    frozen = torch.randn(100_000)
    store.save(1, {"frozen": frozen, "n": 1})
    again = CheckpointStore(open_storage(str(tmp_path / "run")), term=store.term)
    state = again.load().state
    again.save(2, {**state, "n": 2})
    assert written_bytes(tmp_path)[1] == 0


def test_a_new_process_that_has_loaded_nothing_writes_everything(store, tmp_path):
    """What was not read is not known to be whole."""
    frozen = torch.randn(100_000)
    store.save(1, {"frozen": frozen})
    CheckpointStore(open_storage(str(tmp_path / "run")), term=store.term).save(2, {"frozen": frozen})
    assert min(written_bytes(tmp_path)) > 400_000


@pytest.mark.parametrize("harm", ["gone", "shorter"])
def test_a_file_that_is_gone_or_cut_is_not_referred_to(store, tmp_path, harm):
    """The next checkpoint is whole by itself."""
    frozen = torch.randn(100_000)
    store.save(1, {"frozen": frozen})
    file = tmp_path / "run/checkpoints/step-000000001.t1/r00000-0000.safetensors"
    file.unlink() if harm == "gone" else os.truncate(file, 1000)
    store.save(2, {"frozen": frozen})
    loaded = store.load()
    assert (loaded.step, loaded.skipped) == (2, ())
    assert_same(loaded.state, {"frozen": frozen})


def test_tensors_of_no_elements_and_tied_ones_come_back(store):
    """The corner cases of a reference."""
    tied = torch.randn(10)
    state = {"a": tied, "b": tied, "empty": torch.empty(0, 3)}
    store.save(1, state)
    store.save(2, state)
    loaded = store.load().state
    assert_same(loaded, state)
    assert loaded["a"] is loaded["b"]


def test_retention_keeps_the_bytes_that_a_kept_checkpoint_refers_to(tmp_path):
    """With only the newest kept, a frozen tensor outlives the checkpoint that wrote it, and goes with the last."""
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    store = CheckpointStore(storage, term=owner.ensure_term(0), keep=Keep(last=1))
    frozen = torch.randn(100_000)
    for step in range(1, 5):
        store.save(step, {"frozen": frozen, "trained": torch.full((1000,), float(step))})
        assert_same(store.load().state["frozen"], frozen)
    assert [info.step for info in store.list() if info.state == "valid"] == [4]
    assert [info.state for info in store.verify(4)] == ["valid"]
    assert sorted(path.parent.name for path in tmp_path.rglob("*.safetensors")) == [
        "step-000000001.t1",
        "step-000000004.t1",
    ]
    store.save(5, {"trained": torch.ones(1000)})
    assert [path.parent.name for path in tmp_path.rglob("*.safetensors")] == ["step-000000005.t1"]
    owner.release()
