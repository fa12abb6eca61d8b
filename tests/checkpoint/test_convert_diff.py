"""What differs between two checkpoints is told to the bit, and what is equal is not read."""

import collections

import numpy as np
import pytest
import torch

from trainerd.checkpoint import diff_checkpoints, open_storage
from trainerd.checkpoint.convert import streams
from trainerd.checkpoint.convert.errors import NotConverted
from trainerd.checkpoint.errors import Damaged
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.store import CheckpointStore
from trainerd.checkpoint.writer import write_checkpoint

NAN, INF = float("nan"), float("inf")


def saved(folder, *states):
    """A run with one checkpoint per state: steps 1, 2, ..."""
    storage = open_storage(str(folder))
    owner = RunOwner.acquire(storage)
    store = CheckpointStore(storage, term=owner.ensure_term(0))
    for step, state in enumerate(states, 1):
        store.save(step, state)
    owner.release()
    return storage


def diff(tmp_path, a, b, path=""):
    storage = saved(tmp_path / "run", a, b)
    return diff_checkpoints(storage, storage, step_a=1, step_b=2, path=path)


def only_change(found):
    [change] = found.tensors
    return change


def test_a_distance_is_another_than_torch_computes(tmp_path):
    """L2, relative, largest, fraction."""
    a = torch.tensor([3.0, 4.0, 0.0, 1.0])
    b = torch.tensor([3.0, 4.5, 0.0, -1.0])
    moved = only_change(diff(tmp_path, {"w": a}, {"w": b})).distance
    assert moved.l2 == pytest.approx(float((b - a).norm()))
    assert moved.relative == pytest.approx(float((b - a).norm() / a.norm()))
    assert (moved.max_abs, moved.changed_fraction, moved.not_finite) == (2.0, 0.5, 0)


@pytest.mark.parametrize(
    ("a", "b", "fraction", "not_finite", "l2"),
    [
        ([NAN, 1.0], [NAN, 2.0], 0.5, 0, 1.0),
        ([1.0, 1.0], [NAN, 2.0], 1.0, 1, 1.0),
        ([INF, 1.0], [INF, 2.0], 0.5, 0, 1.0),
        ([INF, 1.0], [-INF, 1.0], 0.5, 1, 0.0),
        ([0.0, 1.0], [-0.0, 1.0], 0.5, 0, 0.0),
    ],
)
def test_numbers_that_are_none_hide_the_others(tmp_path, a, b, fraction, not_finite, l2):
    """A NaN of the same bits is equal; one that is new is counted, and does not poison the norms."""
    moved = only_change(diff(tmp_path, {"w": torch.tensor(a)}, {"w": torch.tensor(b)})).distance
    assert (moved.changed_fraction, moved.not_finite, moved.l2) == (fraction, not_finite, l2)


REAL = ["bool", "uint8", "int64", "uint16", "float16", "bfloat16", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("dtype", [*REAL, "float8_e4m3fn", "float8_e5m2fnuz", "float8_e8m0fnu"])
def test_a_type_cannot_be_compared(tmp_path, dtype):
    """Every type that torch computes with."""
    a, b = (torch.tensor(values).to(getattr(torch, dtype)) for values in ([1.0, 0.0], [1.0, 1.0]))
    moved = only_change(diff(tmp_path, {"w": a}, {"w": b})).distance
    assert moved.changed_fraction == 0.5
    assert moved.l2 == pytest.approx(1.0)


def test_halves_of_complex_numbers_are_compared_as_one_number(tmp_path):
    """complex32, which torch itself cannot subtract."""
    a, b = (torch.view_as_complex(torch.tensor(v, dtype=torch.half)) for v in ([[0.0, 1.0]], [[3.0, 5.0]]))
    moved = only_change(diff(tmp_path, {"w": a}, {"w": b})).distance
    assert (moved.l2, moved.changed_fraction) == (5.0, 1.0)


def test_two_numbers_in_a_byte_are_taken_for_one(tmp_path):
    """Torch cannot compute with them: changed or not is all that is told."""
    a, b = (torch.tensor([n, 7], dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for n in (1, 2))
    moved = only_change(diff(tmp_path, {"w": a}, {"w": b})).distance
    assert (moved.changed_fraction, moved.l2) == (0.5, None)


def test_names_types_and_shapes_that_changed_pass_for_values(tmp_path):
    """Told apart from a change of values; a value is told with both sides, 1 is not 1.0 and -0.0 not 0.0."""
    one, two = torch.ones(1), torch.ones(2)
    a = {"t": {"type": two, "shape": two, "gone": one, "same": one}, "v": {"x": 1, "z": 0.0, "s": "s", "old": None}}
    b = {
        "t": {"type": two.double(), "shape": one, "new": one, "same": one},
        "v": {"x": 1.0, "z": -0.0, "s": "s", "n": [1]},
    }
    found = diff(tmp_path, a, b)
    assert [(change.path, change.change) for change in found.tensors] == [
        ("t.type", "type"),
        ("t.shape", "type"),
        ("t.gone", "only in a"),
        ("t.new", "only in b"),
    ]
    assert [(v.path, v.change, v.a, v.b) for v in found.values] == [
        ("v.x", "value", 1, 1.0),
        ("v.z", "value", 0.0, -0.0),
        ("v.old", "only in a", None, None),
        ("v.n", "only in b", None, [1]),
    ]
    assert (found.equal_tensors, found.equal_values) == (1, 1)


def test_hooks_arrays_and_odd_containers_are_not_looked_into(tmp_path):
    """NumPy arrays as tensors of their type, parts of sparse ones, lists with dicts; a plain list as one value."""

    def state(n):
        return {
            "hooks": {"Stop": {"best": float(n)}},
            "array": np.array([1.0, n]),
            "sparse": (torch.eye(2) * n).to_sparse(),
            "groups": [{"lr": 0.1 * n, "params": [0, 1]}],
            "queue": collections.deque([n] * 50),
            "frozen": torch.nn.Parameter(torch.ones(1), requires_grad=n == 1),
        }

    found = diff(tmp_path, state(1), state(2))
    assert [(change.path, change.a.dtype, change.distance.max_abs) for change in found.tensors] == [
        ("array", "float64", 1.0),
        ("sparse.values", "float32", 1.0),
    ]
    assert [change.path for change in found.values] == [
        "hooks.Stop.best",
        "groups.0.lr",
        "queue",
        "frozen.requires_grad",
    ]


def test_blocks_that_end_elsewhere_are_compared_with_the_wrong_ones(tmp_path, monkeypatch):
    """Files cut at other places, and blocks smaller than a chunk."""
    monkeypatch.setattr(streams, "BLOCK_BYTES", 48)
    state = {"w": torch.arange(600.0).reshape(60, 10), "n": torch.tensor([NAN] * 99)}
    monkeypatch.setattr("trainerd.checkpoint.store.write_checkpoint", cut_small)
    saved(tmp_path / "small", state)
    monkeypatch.undo()
    monkeypatch.setattr(streams, "BLOCK_BYTES", 48)
    a, b = open_storage(str(tmp_path / "small")), saved(tmp_path / "whole", state)
    assert diff_checkpoints(a, b).is_empty
    state["w"][37, 3] += 1
    moved = only_change(diff_checkpoints(a, saved(tmp_path / "other", state))).distance
    assert (moved.max_abs, moved.changed_fraction) == (1.0, 1 / 600)


def cut_small(*args, **options):
    return write_checkpoint(*args, **options, file_bytes=100)


def test_equal_tensors_are_read(tmp_path):
    """Their hashes tell: with their data damaged the comparison does not notice, and with that of others it does."""
    state = {"w": torch.ones(100), "m": torch.zeros(3)}
    storage = saved(tmp_path / "run", state, {**state, "m": torch.full((3,), 2.0)})
    for file in (tmp_path / "run/checkpoints").rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        w = data.find(torch.ones(1).numpy().tobytes())  # the second checkpoint refers to the first one's
        if w >= 0:
            data[w] ^= 1
        data[-1] ^= 1
        file.write_bytes(data)
    assert diff_checkpoints(storage, storage, step_a=1, step_b=2, path="w").is_empty
    with pytest.raises(Damaged):
        diff_checkpoints(storage, storage, step_a=1, step_b=2, path="m")


def test_a_path_of_one_side_alone_is_an_error(tmp_path):
    """All of it is new then; a path of neither is refused."""
    a, b = {"model": {}}, {"model": {}, "hooks": {"EMA": {"w": torch.ones(1)}}}
    assert only_change(diff(tmp_path, a, b, "hooks.EMA")).change == "only in b"
    with pytest.raises(NotConverted, match="There is no zzz"):
        diff(tmp_path / "again", a, b, "zzz")
