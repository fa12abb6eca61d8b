"""What other programs read of a checkpoint is what was saved, whole or not there at all."""

import collections
import dataclasses
import datetime
import enum
import os
import pathlib
import resource
import signal
import subprocess
import sys
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from support.faults import in_child
from support.states import assert_same

from trainerd.checkpoint import export_checkpoint, open_storage
from trainerd.checkpoint.convert import publishing
from trainerd.checkpoint.convert.errors import NotConverted
from trainerd.checkpoint.errors import CheckpointError, Damaged, StorageUnusable
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.store import CheckpointStore


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    where: pathlib.Path


class Pair(NamedTuple):
    first: int
    second: torch.Tensor


def saved(folder, state, step=3):
    storage = open_storage(str(folder))
    owner = RunOwner.acquire(storage)
    CheckpointStore(storage, term=owner.ensure_term(0)).save(step, state)
    owner.release()
    return storage


def state():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(4, 3, generator=generator)
    return {
        "step": 3,
        "model": {
            "backbone.0.weight": weight,
            "backbone.1.half": torch.ones(5, dtype=torch.bfloat16),
            "head.weight": weight,
            "head.image": torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
            "head.flag": torch.tensor(True),
            "empty": torch.zeros(0, 3),
        },
        "hooks": {"EMA": {"decay": 0.5, "shadow": {"w": torch.ones(2)}}},
        "history": [1.0, 2.0],
    }


def test_a_model_loads_in_the_safetensors_library_with_other_values(tmp_path):
    """Every name, without the prefix; tied and channels-last tensors included."""
    storage = saved(tmp_path / "run", state())
    out = tmp_path / "model.safetensors"
    report = export_checkpoint(storage, str(out), path="model")
    assert (report.tensors, report.repeated, report.left_out) == (6, 1, ())
    expected = {name: value.contiguous().clone() for name, value in state()["model"].items()}
    assert_same(dict(sorted(safetensors.torch.load_file(out).items())), dict(sorted(expected.items())))
    with safetensors.safe_open(out, "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["step"] == "3"


def test_what_safetensors_cannot_hold_vanishes_silently(tmp_path):
    """The whole state: values are named one by one, and so is a tensor of a type that the format lacks."""
    storage = saved(tmp_path / "run", {**state(), "odd": torch.zeros(2, dtype=torch.complex128)})
    report = export_checkpoint(storage, str(tmp_path / "a.safetensors"))
    assert report.left_out == ("step", "hooks.EMA.decay", "history", "odd")
    assert "hooks.EMA.shadow.w" in safetensors.torch.load_file(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("model.backbone", ["0.weight", "1.half"]),
        ("hooks.EMA.shadow", ["w"]),
        ("model.head.weight", ["tensor"]),
    ],
)
def test_a_part_keeps_the_prefix_of_its_path(tmp_path, path, names):
    """The beginning of dotted names is a path as well."""
    storage = saved(tmp_path / "run", state())
    export_checkpoint(storage, str(tmp_path / "a.safetensors"), path=path)
    assert sorted(safetensors.torch.load_file(tmp_path / "a.safetensors")) == names


def test_torch_file_needs_pickle_or_hides_what_it_changed(tmp_path):
    """weights_only=True reads it; each value of another class is plain and listed; the rest is the same to the bit."""
    odd = {
        "enum": Color.RED,
        "point": Point(1, pathlib.Path("/tmp/x")),
        "pair": Pair(1, torch.ones(2)),
        "queue": collections.deque([1, 2], maxlen=3),
        "frozen": frozenset({1}),
        "default": collections.defaultdict(list, {"a": [1]}),
        "range": range(1, 9, 2),
        "when": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "array": np.arange(4, dtype=np.float32)[::-1],
        "text": np.array(["a", "b"]),
        "number": np.float64(0.1),
        "generator": torch.Generator().manual_seed(7),
        "numpy": np.random.default_rng(3),
    }
    same = {**state(), "keys": {1: "a", (1, 2): None}, "big": 2**70, "nan": float("nan"), "bytes": b"x", "set": {1}}
    same |= {"complex": 1j, "size": torch.Size([2]), "dtype": torch.float16, "sparse": torch.eye(3).to_sparse()}
    same |= {
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "device": torch.device("cpu"),
        "ordered": collections.OrderedDict(a=1),
    }
    storage = saved(tmp_path / "run", {**same, "odd": odd})
    report = export_checkpoint(storage, str(tmp_path / "a.pt"))
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    plain = loaded.pop("odd")
    assert_same(loaded, same)
    assert loaded["model"]["backbone.0.weight"].data_ptr() == loaded["model"]["head.weight"].data_ptr()
    assert {path.split(".")[1] for path, _, _ in report.changed} == set(odd)
    assert ("odd.point", "dataclass", "dict") in report.changed
    assert_same(plain["point"], {"x": 1, "where": "/tmp/x"})
    assert_same(plain["pair"], (1, torch.ones(2)))
    assert plain["array"].tolist() == [3, 2, 1, 0]
    assert_same(plain["generator"], odd["generator"].get_state())
    assert {name: plain[name] for name in ("enum", "queue", "frozen", "default", "range", "when", "number")} == {
        "enum": "red",
        "queue": [1, 2],
        "frozen": {1},
        "default": {"a": [1]},
        "range": (1, 9, 2),
        "when": "2026-01-02T00:00:00+00:00",
        "number": 0.1,
    }


def test_classes_of_the_training_must_be_imported_to_export(tmp_path):
    """A program that never saw the class exports the state all the same."""
    saved(tmp_path / "run", {"point": Point(1, pathlib.Path("x"))})
    code = (
        "import sys; from trainerd.checkpoint import *; export_checkpoint(open_storage(sys.argv[1]), sys.argv[2])\n"
        "import torch; print(torch.load(sys.argv[2], weights_only=True))"
    )
    words = [sys.executable, "-P", "-c", code, str(tmp_path / "run"), str(tmp_path / "a.pt")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "{'point': {'x': 1, 'where': 'x'}}\n"


def test_torchs_own_tools_do_not_read_the_dcp_folder(tmp_path):
    """dcp.load into tensors, and dcp_to_torch_save."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    storage = saved(tmp_path / "run", state())
    report = export_checkpoint(storage, str(tmp_path / "dcp"), to="dcp")
    assert report.tensors == 7
    target = {"model": {name: torch.zeros_like(value) for name, value in state()["model"].items()}}
    with warnings.catch_warnings(action="ignore"):
        checkpoint.load(target, storage_reader=checkpoint.FileSystemReader(tmp_path / "dcp"))
    contiguous = {name: value.contiguous().clone() for name, value in state()["model"].items()}
    assert_same({name: value.contiguous() for name, value in target["model"].items()}, contiguous)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["hooks"]["EMA"]["decay"] == 0.5


@pytest.mark.parametrize(("out", "to"), [("a.safetensors", None), ("a.pt", None), ("a", "dcp")])
def test_an_existing_file_is_overwritten(tmp_path, out, to):
    """Only with force; then it is replaced whole."""
    storage = saved(tmp_path / "run", state())
    place = tmp_path / out
    export_checkpoint(storage, str(place), to=to)
    before = snapshot(tmp_path)
    with pytest.raises(NotConverted, match="--force"):
        export_checkpoint(storage, str(place), to=to)
    assert snapshot(tmp_path) == before
    export_checkpoint(storage, str(place), to=to, path="model", force=True)
    assert snapshot(tmp_path) != before
    assert sorted(os.listdir(tmp_path)) == sorted(["run", out])


def test_force_deletes_a_folder_that_no_export_made(tmp_path):
    """A run folder, or a home, is not replaced."""
    storage = saved(tmp_path / "run", state())
    before = snapshot(tmp_path)
    for to in ("dcp", "torch", "safetensors"):
        with pytest.raises(NotConverted, match="is a folder"):
            export_checkpoint(storage, str(tmp_path / "run"), to=to, force=True)
    assert snapshot(tmp_path) == before


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("out", ["a.safetensors", "a.pt"])
def test_damage_is_exported(tmp_path, out):
    """A flipped byte: nothing is left at the place, and an older export there stays."""
    storage = saved(tmp_path / "run", state())
    [file] = (tmp_path / "run/checkpoints").rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (tmp_path / out).write_text("an older export")
    with pytest.raises(Damaged):
        export_checkpoint(storage, str(tmp_path / out), force=True)
    assert (tmp_path / out).read_text() == "an older export"
    assert sorted(os.listdir(tmp_path)) == sorted(["run", out])


@pytest.mark.parametrize(
    ("out", "path", "says"),
    [
        ("a.zip", "model", "no suffix that tells the format"),
        ("a.pt", "modle", "Did you mean model"),
        ("a.safetensors", "history", "holds no tensor"),
        ("a.safetensors", "hooks.EMA.decay", "holds no tensor"),
    ],
)
def test_a_wrong_request_leaves_a_file(tmp_path, out, path, says):
    """One paragraph, nothing made."""
    storage = saved(tmp_path / "run", state())
    with pytest.raises(CheckpointError, match=says):
        export_checkpoint(storage, str(tmp_path / out), path=path)
    assert os.listdir(tmp_path) == ["run"]


def test_a_missing_folder_is_a_traceback(tmp_path):
    """The storage error names the place."""
    storage = saved(tmp_path / "run", state())
    for to in ("safetensors", "torch"):
        with pytest.raises(StorageUnusable, match="nowhere"):
            export_checkpoint(storage, str(tmp_path / "nowhere/a"), to=to)


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_a_full_disk_is_a_traceback_or_leaves_half_a_file(tmp_path, to):
    """A real limit of the file size stands in for the disk: what the system said, and nothing left."""
    storage = saved(tmp_path / "run", {"model": {"w": torch.zeros(10**5)}})

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))
        with pytest.raises(StorageUnusable, match="File too large"):
            export_checkpoint(storage, str(tmp_path / "a"), to=to)

    assert in_child(limited) == 0
    assert os.listdir(tmp_path) == ["run"]


_HELD = """
import sys, time
from trainerd.checkpoint import export_checkpoint, open_storage

class Holding:
    # The real storage, which stays in the middle of its third read of data.
    def __init__(self, storage):
        self.storage, self.reads = storage, 0
    def __getattr__(self, name):
        return getattr(self.storage, name)
    def read(self, path, *range):
        self.reads += path.endswith(".safetensors")
        if self.reads == 3:
            print("holding", flush=True)
            sys.stdin.read()
        return self.storage.read(path, *range)

export_checkpoint(Holding(open_storage(sys.argv[1])), sys.argv[2])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_export_leaves_what_looks_whole(tmp_path, number):
    """Killed half-way: no file of that name; after Ctrl-C not even a temporary one."""
    saved(tmp_path / "run", state())
    out = tmp_path / "a.safetensors"
    words = [sys.executable, "-P", "-c", _HELD, str(tmp_path / "run"), str(out)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as child:
        assert child.stdout.readline() == b"holding\n"
        child.send_signal(number)
        child.wait(timeout=60)
    left = sorted(os.listdir(tmp_path))
    assert "a.safetensors" not in left
    if number is signal.SIGINT:
        assert left == ["run"]


def test_somebody_elses_file_that_appears_meanwhile_is_overwritten(tmp_path):
    """The name is taken in one step that fails if it is there."""
    out = tmp_path / "a"

    def publish():
        with publishing.appearing(str(out), force=False) as temporary:
            pathlib.Path(temporary).write_text("ours")
            out.write_text("theirs")

    with pytest.raises(NotConverted, match="exists already"):
        publish()
    assert out.read_text() == "theirs"
    assert os.listdir(tmp_path) == ["a"]
