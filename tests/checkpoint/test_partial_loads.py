"""Loading a part of a state, and loading into tensors that are there."""

import pathlib

import pytest
import torch
from support.states import assert_same

from trainerd.checkpoint.errors import Damaged, DoesNotFit, NoCheckpoint
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore


@pytest.fixture
def store(tmp_path):
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    yield CheckpointStore(storage, term=owner.ensure_term(0))
    owner.release()


class CountingStorage:
    """The real storage, which notes the bytes that are read of data files."""

    def __init__(self, storage):
        self._storage = storage
        self.data_bytes = 0

    def __getattr__(self, name):
        return getattr(self._storage, name)

    def read_into(self, path, offset, buffer):
        self.data_bytes += len(buffer)
        return self._storage.read_into(path, offset, buffer)


def test_a_lazy_state_reads_only_the_tensors_that_are_touched(store, tmp_path):
    """Opening reads no data; one of three tensors costs its own bytes."""
    state = {"model": {"a": torch.randn(1000), "b": torch.randn(5000)}, "hooks": {"EMA": {"decay": 0.9, "n": [1, 2]}}}
    store.save(1, state)
    storage = CountingStorage(open_storage(str(tmp_path / "run")))
    lazy = CheckpointStore(storage).open()
    assert storage.data_bytes == 0
    assert list(lazy) == ["model", "hooks"]
    assert lazy["hooks"]["EMA"]["decay"] == 0.9
    assert lazy.at("hooks.EMA").load() == {"decay": 0.9, "n": [1, 2]}
    assert list(lazy["hooks"]["EMA"]["n"]) == [0, 1]
    assert lazy["hooks"]["EMA"]["n"][1] == 2
    assert storage.data_bytes == 0
    assert torch.equal(lazy["model"]["a"], state["model"]["a"])
    assert storage.data_bytes == 4000
    assert torch.equal(lazy.at("model.b"), state["model"]["b"])
    assert_same(lazy.load(), state)


def test_a_lazy_state_names_what_is_not_there(store):
    """KeyError, as of any mapping."""
    store.save(1, {"model": {"a": torch.ones(1)}, "list": [1]})
    lazy = store.open()
    for missing in (
        lambda: lazy["modle"],
        lambda: lazy["list"][5],
        lambda: lazy.at("model.x"),
        lambda: lazy["list"]["a"],
    ):
        with pytest.raises(KeyError):
            missing()
    with pytest.raises(NoCheckpoint):
        store.open(7)


def test_a_lazy_state_refuses_a_damaged_tensor_and_gives_the_others(store, tmp_path):
    """Damage shows where it is touched."""
    store.save(1, {"a": torch.zeros(100), "b": torch.ones(100)})
    file = next(pathlib.Path(tmp_path).rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    lazy = store.open()
    assert torch.equal(lazy["a"], torch.zeros(100))
    with pytest.raises(Damaged, match="b in r00000"):
        lazy["b"]


def test_live_tensors_are_filled_in_place(store):
    """The very memory of the model's parameters and of the optimizer's moments."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    store.save(1, {"model": model.state_dict(), "other": torch.arange(5)})
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    loaded = store.load(into={"model": model.state_dict()})
    assert_same(dict(model.state_dict()), saved)
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert loaded.state["model"]["0.weight"].data_ptr() == pointers[0]
    assert torch.equal(loaded.state["other"], torch.arange(5))


@pytest.mark.parametrize(
    "live",
    [
        pytest.param(lambda t: t.t().contiguous().t(), id="transposed"),
        pytest.param(lambda t: torch.zeros(6, 8)[:, ::2], id="every second column"),
        pytest.param(lambda t: torch.zeros_like(t).requires_grad_(), id="requires grad"),
        pytest.param(lambda t: torch.nn.Parameter(torch.zeros_like(t)), id="parameter"),
    ],
)
def test_live_tensors_of_any_layout_are_filled(store, live):
    """Where the bytes do not lie as in the file, they are copied there."""
    saved = torch.randn(6, 4)
    store.save(1, {"x": saved})
    target = live(saved.clone())
    with torch.no_grad():
        target.zero_()
    store.load(into={"x": target})
    assert torch.equal(target.detach(), saved)


def test_tied_live_tensors_and_untied_ones_are_filled(store):
    """One stored tensor may have two live places."""
    tied = torch.randn(4)
    store.save(1, {"a": tied, "b": tied})
    first, second = torch.zeros(4), torch.zeros(4)
    store.load(into={"a": first, "b": second})
    assert torch.equal(first, tied)
    assert torch.equal(second, tied)
    only_second = torch.zeros(4)
    store.load(into={"b": only_second})
    assert torch.equal(only_second, tied)


def test_tensors_that_do_not_fit_are_named_and_none_is_touched(store):
    """Another shape, another type, another name."""
    store.save(1, {"a": torch.ones(2, 3), "b": torch.ones(2), "c": torch.ones(1)})
    live = {"a": torch.zeros(3, 2), "b": torch.zeros(2, dtype=torch.float64), "c": torch.zeros(1), "d": torch.zeros(1)}
    with pytest.raises(DoesNotFit) as refused:
        store.load(into=live)
    text = str(refused.value)
    assert "a is float32 [3, 2] here and float32 [2, 3] in it" in text
    assert "b is float64 [2] here and float32 [2] in it" in text
    assert "d is not in it" in text
    assert not live["c"].any()
