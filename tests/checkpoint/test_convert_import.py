"""Checkpoints of other programs begin a run of ours: exact in what carries over, and without running what they hold."""

import json
import os
import pickle
import warnings
import zipfile
from collections import OrderedDict

import pytest
import safetensors.torch
import torch
from support.foreign import (
    Model,
    detectron2_file,
    fvcore_folder,
    hugging_face_folder,
    lightning_file,
    optimizer_of,
    trained,
)
from support.states import assert_same
from support.trainers import batches

from trainerd.checkpoint import import_checkpoint, open_storage
from trainerd.checkpoint.convert.errors import NotConverted
from trainerd.checkpoint.errors import CheckpointError, RunOwned
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.store import CheckpointStore
from trainerd.trainer import SimpleTrainer, hooks
from trainerd.trainer.errors import StateMismatch


def imported(source, folder, **options):
    """What the import says, and the state that the run then resumes from."""
    storage = open_storage(str(folder))
    report = import_checkpoint(str(source), storage, **options)
    loaded = CheckpointStore(storage).load()
    assert loaded.step == report.step
    return report, loaded.state


def trainer_of_ours(groups=1):
    model = Model()
    optimizer = optimizer_of(model, groups)
    trainer = SimpleTrainer(model, batches(), optimizer)
    trainer.register_hooks([hooks.LRScheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20))])
    return trainer


def assert_goes_on_like(trainer, model, optimizer, step):
    """The imported trainer takes the very step that torch takes from the original objects, to the bit."""
    assert trainer.step == step
    assert_same(dict(trainer.model.state_dict()), dict(model.state_dict()))
    saved, now = optimizer.state_dict(), trainer.optimizer.state_dict()
    assert_same(now["state"], saved["state"])
    trainer.train(trainer.step, step + 1)
    model.train()
    optimizer.zero_grad()
    model(batches()[0]).backward()
    optimizer.step()
    assert_same(dict(trainer.model.state_dict()), dict(model.state_dict()))


def save_dcp(state, folder):
    from torch.distributed import checkpoint

    with warnings.catch_warnings(action="ignore"):
        checkpoint.save(state, checkpoint_id=str(folder))


def test_a_detectron2_user_loses_weights_moments_or_an_iteration(tmp_path):
    """The folder with last_checkpoint: `iteration` is the finished one, so training goes on with the next."""
    model, optimizer = fvcore_folder(tmp_path / "old")
    report, state = imported(tmp_path / "old", tmp_path / "run")
    assert report.step == 5
    assert report.kept == ()
    trainer = trainer_of_ours()
    with pytest.raises(StateMismatch, match="the data has no saved state"):
        trainer.load_state_dict(state)
    trainer.load_state_dict(state, on_mismatch={"entries": "warn"})
    assert trainer.restored_grade == "position only"
    assert trainer._hooks[0].scheduler.last_epoch == 5
    assert_goes_on_like(trainer, model, optimizer, 5)


def test_the_optimizer_and_hooks_inside_detectron2s_trainer_state_are_lost(tmp_path):
    """DefaultTrainer nests them two levels deep."""
    model, optimizer = detectron2_file(tmp_path / "model_final.pth")
    report, state = imported(tmp_path / "model_final.pth", tmp_path / "run")
    assert report.kept == ()
    assert state["optimizer"]["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]
    trainer = trainer_of_ours()
    trainer.load_state_dict(state, on_mismatch={"entries": "warn"})
    assert_goes_on_like(trainer, model, optimizer, 5)


@pytest.fixture(scope="module")
def lightning(tmp_path_factory):
    path = tmp_path_factory.mktemp("lightning") / "epoch=1-step=6.ckpt"
    return path, lightning_file(path)


def test_a_lightning_user_loses_weights_moments_or_the_step(lightning, tmp_path):
    """A file that the real library wrote; its callbacks, loops and hyperparameters are kept, and told."""
    path, truth = lightning
    report, state = imported(path, tmp_path / "run")
    assert (report.kind, report.step) == ("Lightning checkpoint", 6)
    assert {"loops", "callbacks", "hyper_parameters", "epoch"} <= set(report.kept) == set(state["imported"])
    assert state["imported"]["hyper_parameters"] == {"width": 4}
    model = Model()
    optimizer = optimizer_of(model)
    model.load_state_dict(truth["model"])
    optimizer.load_state_dict(truth["optimizer"])
    trainer = trainer_of_ours()
    trainer.load_state_dict(state, on_mismatch={"entries": "warn"})
    assert_goes_on_like(trainer, model, optimizer, 6)


def test_a_scheduler_that_counted_epochs_is_stepped_on_by_iterations(tmp_path):
    """Lightning's default: kept, not put to use, and said so; the trainer then asks for an answer about its hook."""
    lightning_file(tmp_path / "a.ckpt", "epoch")
    report, state = imported(tmp_path / "a.ckpt", tmp_path / "run")
    assert "stepped 2 times in 6 iterations" in " ".join(report.notes)
    assert state["hooks"] == {}
    assert state["imported"]["schedulers"][0]["last_epoch"] == 2
    trainer = trainer_of_ours()
    with pytest.raises(StateMismatch, match="LRScheduler"):
        trainer.load_state_dict(state, on_mismatch={"entries": "warn"})
    trainer.load_state_dict(state, on_mismatch={"entries": "warn", "hooks": "warn"})


@pytest.mark.parametrize("sharded", [False, True])
def test_moments_of_a_hugging_face_trainer_go_to_other_parameters(tmp_path, sharded):
    """Two groups: told to be matched by position; the trainer then refuses other groups."""
    model, optimizer = hugging_face_folder(tmp_path / "checkpoint-5", sharded=sharded)
    report, state = imported(tmp_path / "checkpoint-5", tmp_path / "run")
    assert (report.kind, report.step) == ("Hugging Face Trainer checkpoint", 5)
    assert "by position alone" in " ".join(report.notes)
    assert "config.json, training_args.bin" in " ".join(report.notes)
    assert report.kept == ("trainer_state", "rng_state")
    with pytest.raises(StateMismatch, match="groups of"):
        trainer_of_ours().load_state_dict(state, on_mismatch={"entries": "warn"})
    trainer = trainer_of_ours(groups=2)
    trainer.load_state_dict(state, on_mismatch={"entries": "warn"})
    assert_goes_on_like(trainer, model, optimizer, 5)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_dcp_folder_loses_its_types(tmp_path, by_name):
    """Made by the real library, plainly and through get_state_dict, which names optimizer states."""
    model, optimizer, _ = trained()
    states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    if by_name:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        states["model"], states["optim"] = get_state_dict(model, optimizer)
    save_dcp({"app": {**states, "betas": [0.5, {"x": torch.ones(2)}]}}, tmp_path / "dcp")
    report, state = imported(tmp_path / "dcp", tmp_path / "run", step=5)
    assert report.kept == ("betas",)
    assert_same(state["imported"], {"betas": [0.5, {"x": torch.ones(2)}]})
    trainer = trainer_of_ours()
    trainer.load_state_dict(state, on_mismatch={"entries": "warn", "hooks": "warn"})
    assert_goes_on_like(trainer, model, optimizer, 5)


def test_a_state_of_our_own_trainer_comes_back_mangled(tmp_path):
    """Through torch.save it is the same to the bit, random numbers and data position included."""
    trainer = trainer_of_ours()
    trainer.train(0, 3)
    state = trainer.state_dict()
    torch.save(state, tmp_path / "a.pt")
    report, again = imported(tmp_path / "a.pt", tmp_path / "run")
    assert (report.step, report.carried) == (3, ("the whole state",))
    assert_same(again, state)


def test_weights_alone_pass_for_a_training_that_has_come_far(tmp_path):
    """Step 0 and a note; DDP's prefix is taken off; tied names stay tied."""
    tied = torch.randn(3)
    torch.save(OrderedDict({"module.a": tied, "module.b": tied, "module.c": torch.zeros(2)}), tmp_path / "w.pth")
    report, state = imported(tmp_path / "w.pth", tmp_path / "run")
    assert report.step == 0
    assert "tells no step" in " ".join(report.notes)
    assert list(state["model"]) == ["a", "b", "c"]
    assert state["model"]["a"] is state["model"]["b"]
    assert "optimizer" not in state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_a_safetensors_file_is_read_in_another_way_than_its_own_library_does(tmp_path, dtype):
    """Every type, an odd header, empty and scalar tensors."""
    weights = {"a": torch.ones(3, 5).to(dtype), "scalar": torch.zeros((), dtype=dtype), "empty": torch.zeros(0, 2)}
    safetensors.torch.save_file(weights, tmp_path / "w.safetensors", metadata={"note": "x" * 13})
    _, state = imported(tmp_path / "w.safetensors", tmp_path / "run")
    assert_same(dict(sorted(state["model"].items())), dict(sorted(weights.items())))


class Attack:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def attack_in_dcp(folder, attack):
    save_dcp({"model": {"w": torch.ones(2)}}, folder)
    (folder / ".metadata").write_bytes(pickle.dumps(attack))


def attack_in_a_value_of_dcp(folder, attack):
    save_dcp({"model": {"w": torch.ones(2)}, "extra": attack}, folder)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path, attack: torch.save({"model": {"w": torch.ones(2)}, "x": attack}, path), "posix.system"),
        (lambda path, attack: torch.save(attack, path, _use_new_zipfile_serialization=False), "posix.system"),
        (lambda path, attack: path.write_bytes(pickle.dumps(attack)), "posix.system"),
        (attack_in_dcp, "posix.system"),
        (attack_in_a_value_of_dcp, "posix.system"),
    ],
    ids=["zip", "legacy", "bare pickle", "dcp metadata", "dcp value"],
)
def test_a_pickle_runs_its_code(tmp_path, make, says):
    """It is refused, named, and not executed; no run is begun."""
    make(tmp_path / "evil", Attack(tmp_path / "executed"))
    with pytest.raises(NotConverted, match=says):
        import_checkpoint(str(tmp_path / "evil"), open_storage(str(tmp_path / "run")))
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "run").exists()


def truncated(path):
    torch.save({"model": trained()[0].state_dict()}, path)
    path.write_bytes(path.read_bytes()[:-200])


def compressed(path):
    torch.save({"model": {"w": torch.ones(2)}}, path.with_suffix(".made"))
    with zipfile.ZipFile(path.with_suffix(".made")) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


def inflated(path):
    torch.save({"model": {"w": torch.ones(1).expand(10**12)}}, path)


def dcp_without_a_shard(path):
    save_dcp({"model": {"w": torch.ones(2)}}, path)
    next(path.glob("*.distcp")).unlink()


def dcp_cut_short(path):
    save_dcp({"model": {"w": torch.ones(2000)}}, path)
    shard = next(path.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-3000])


def dcp_reaching_out(path):
    save_dcp({"model": {"w": torch.ones(2)}}, path)
    described = pickle.loads((path / ".metadata").read_bytes())
    for info in described.storage_data.values():
        info.relative_path = "../outside"
    (path / ".metadata").write_bytes(pickle.dumps(described))


def dcp_with_a_hole(path):
    save_dcp({"model": {"w": torch.ones(2000)}}, path)
    described = pickle.loads((path / ".metadata").read_bytes())
    described.state_dict_metadata["model.w"].size = torch.Size([2100])
    (path / ".metadata").write_bytes(pickle.dumps(described))


def folder_with(**files):
    def make(path):
        path.mkdir()
        for name, text in files.items():
            (path / name.replace("__", ".")).write_text(text)

    return make


def index_that_leaves(path):
    folder_with(**{"model__safetensors.index.json": json.dumps({"weight_map": {"w": "../../etc/passwd"}})})(path)


def safetensors_with(header, data=b""):
    def make(path):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.with_suffix(".safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)

    return make


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_bytes(b""), "no whole file of torch.save"),
        (truncated, "no whole file of torch.save"),
        (compressed, "compressed"),
        (inflated, "would take"),
        (lambda path: torch.save([1, 2], path), "holds a list"),
        (lambda path: torch.save({"epoch": 1, "loss": torch.ones(1)}, path), "no model's weights.*epoch, loss"),
        (lambda path: torch.save(torch.nn.Linear(1, 1), path), "torch.nn.modules.linear.Linear"),
        (lambda path: path.mkdir(), "no checkpoint folder that is known"),
        (folder_with(last_checkpoint="../secret.pth"), "no file of that folder"),
        (folder_with(last_checkpoint="gone.pth"), "gone.pth.*is missing"),
        (folder_with(trainer_state__json="{"), "holds no weights"),
        (folder_with(model__safetensors="garbage!" * 4), "no whole safetensors file"),
        (index_that_leaves, "no file of that folder"),
        (folder_with(run__json="{}"), "trainerd copy"),
        (folder_with(__metadata="garbage"), "cannot be read"),
        (dcp_without_a_shard, "is missing"),
        (dcp_cut_short, "cut short"),
        (dcp_reaching_out, "no file of the folder"),
        (dcp_with_a_hole, "not whole"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_garbage_ends_in_a_traceback_or_begins_a_run(tmp_path, make, says):
    """One paragraph, and no folder is made."""
    make(tmp_path / "source")
    with pytest.raises(NotConverted, match=says):
        import_checkpoint(str(tmp_path / "source"), open_storage(str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"[" * 2000, b""),
        (b"\xff" * 10, b""),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
        ({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"12345678"),
        ({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, b"12345678"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, b"12345678"),
        ({"w": {"dtype": "Q7", "shape": [8], "data_offsets": [0, 8]}}, b"12345678"),
        ({"w": {"dtype": "F32"}}, b"12345678"),
        ({"w": 3}, b""),
    ],
)
def test_a_lying_safetensors_header_is_believed(tmp_path, header, data):
    """Lengths, shapes and types are held against the file."""
    safetensors_with(header, data)(tmp_path / "w")
    with pytest.raises(NotConverted, match=r"w\.safetensors"):
        import_checkpoint(str(tmp_path / "w.safetensors"), open_storage(str(tmp_path / "run")))


def test_a_class_that_the_caller_trusts_cannot_be_permitted(tmp_path):
    """safe_globals around the import; what no checkpoint can hold is still named before anything is written."""
    source = tmp_path / "a.pt"
    torch.save({"model": {"w": torch.ones(2)}, "x": Attack("kept")}, source)
    torch.save({"model": {"w": torch.ones(2)}, "x": Holder()}, source)
    storage = open_storage(str(tmp_path / "run"))
    with pytest.raises(NotConverted, match="Holder"):
        import_checkpoint(str(source), storage)
    with torch.serialization.safe_globals([Holder]), pytest.raises(CheckpointError, match=r"imported\.x.*Holder"):
        import_checkpoint(str(source), storage)
    assert not (tmp_path / "run").exists()


class Holder:
    def __init__(self):
        self.value = 1


def test_an_import_changes_a_run_that_is_there(tmp_path):
    """A used run, a foreign folder and a run whose daemon lives are left alone; an empty folder is fine."""
    source = tmp_path / "w.pt"
    torch.save({"w": torch.ones(2)}, source)
    (tmp_path / "run").mkdir()
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    with pytest.raises(RunOwned):
        import_checkpoint(str(source), storage)
    owner.release()
    assert import_checkpoint(str(source), storage, step=7).step == 7
    with pytest.raises(NotConverted, match="holds a run already"):
        import_checkpoint(str(source), storage)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").touch()
    with pytest.raises(NotConverted, match=r"thesis\.tex"):
        import_checkpoint(str(source), open_storage(str(tmp_path / "other")))
