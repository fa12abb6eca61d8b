"""`export`, `import`, `copy` and `diff` through the console script."""

import json
import os
import signal
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from support.command_line import TRAINERD, assert_refused, trainerd
from support.foreign import fvcore_folder
from support.runs import Run, finish, write_target
from support.runs import final_state as final_state_of
from support.states import assert_same

from trainerd.checkpoint import open_storage
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.store import CheckpointStore

# The class that support.foreign trained, in a job of ours.
TARGET = """
import torch
from support.foreign import Model, optimizer_of
from trainerd.trainer import SimpleTrainer, hooks


def build_trainer(config):
    torch.set_num_threads(1)
    model = Model()
    optimizer = optimizer_of(model)
    trainer = SimpleTrainer(model, [torch.ones(6, 4), torch.zeros(6, 4)], optimizer)
    trainer.register_hooks([hooks.LRScheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20))])
    return trainer
"""


def state_of(step):
    weight = torch.full((3, 4), float(step))
    return {"step": step, "model": {"a.weight": weight, "b.weight": torch.ones(2)}, "hooks": {"Stop": {"best": step}}}


@pytest.fixture
def run(tmp_path):
    storage = open_storage(str(tmp_path / "a"))
    owner = RunOwner.acquire(storage)
    store = CheckpointStore(storage, term=owner.ensure_term(0))
    for step in (10, 20):
        store.save(step, state_of(step))
    owner.release()
    return tmp_path / "a"


def test_a_daemon_does_not_go_on_from_an_imported_checkpoint(tmp_path):
    """The two lines of docs/convert.md: refused without a word on what begins anew, with it trained to the end."""
    model, _ = fvcore_folder(tmp_path / "old")
    done = trainerd("import", tmp_path / "old", tmp_path / "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "model (9 entries), optimizer (by parameter name), hooks (LRScheduler)." in done.stdout
    assert "--checkpoint-on-mismatch entries=warn" in done.stdout
    exported = trainerd("export", tmp_path / "run", tmp_path / "m.safetensors", "--path", "model")
    assert exported.returncode == 0, exported.stderr
    assert_same(
        dict(sorted(safetensors.torch.load_file(tmp_path / "m.safetensors").items())),
        dict(sorted(model.state_dict().items())),
    )
    target = write_target(tmp_path, TARGET)
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with Run(target, tmp_path / "run", max_iter=8, env=environment) as refused:
        assert refused.wait() == 78
    assert "the data has no saved state" in refused.text
    text = finish(
        Run(target, tmp_path / "run", "--checkpoint-on-mismatch", "entries=warn", max_iter=8, env=environment)
    )
    assert "resumed from step 5" in text
    state = final_state_of(tmp_path / "run")
    assert (state["step"], state["hooks"]["LRScheduler"]["last_epoch"]) == (8, 8)
    assert float(state["optimizer"]["state"][0]["step"]) == 8


def test_export_hides_what_it_left_out(run, tmp_path):
    """One line for what was written, one for what was not."""
    done = trainerd("export", f"{run}@10", tmp_path / "a.safetensors")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first == f"{run}, step 10 -> {tmp_path}/a.safetensors: safetensors, 2 tensors, {size(tmp_path)}"
    assert second == "Left out, as safetensors cannot hold them: 2 values: step, hooks.Stop.best."
    assert safetensors.torch.load_file(tmp_path / "a.safetensors")["model.a.weight"].flatten()[0] == 10


def size(folder):
    return f"{(folder / 'a.safetensors').stat().st_size} B"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["export", "{run}", "{run}.zip"], 78, "no suffix that tells the format"),
        (["export", "{run}", "{run}.pt", "--to", "zip"], 2, "zip is none of safetensors, torch, dcp"),
        (["export", "{run}", "{run}", "--to", "torch", "--force"], 78, "is a folder"),
        (["export", "{run}", "{run}.pt", "--path", "modle"], 78, "Did you mean model?"),
        (["export", "{run}", "{run}.pt", "--psth", "model"], 2, "Did you mean --path?"),
        (["export", "{run}x", "{run}.pt"], 78, "There is no run"),
        (["import", "{run}", "{run}b"], 78, "trainerd copy"),
        (["import", "{run}.pth", "{run}b"], 78, "does not exist"),
        (["import", "{run}", "{run}b", "--step", "-1"], 2, "--step"),
        (["copy", "{run}@15", "{run}b"], 78, "no checkpoint of step 15"),
        (["copy", "{run}", "/proc/nowhere"], 74, "/proc/nowhere"),
        (["diff", "{run}@10", "{run}@15"], 78, "no checkpoint of step 15"),
        (["diff", "{run}", "{run}", "modle"], 78, "Did you mean model?"),
        (["diff", "{run}"], 2, "Missing argument 'B'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_request_is_a_traceback(run, words, code, says):
    """One paragraph with a way out, and its exit code."""
    assert_refused(trainerd(*(word.format(run=run) for word in words)), code, says)


def test_diff_hides_what_differs(run):
    """A table of tensors, one of values, and a line that counts."""
    done = trainerd("diff", f"{run}@10", run)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"a: {run}, step 10, term 1; b: {run}, step 20, term 1"
    assert lines[2].split() == ["tensor", "relative", "l2", "max", "abs", "changed", "what"]
    assert lines[3].split() == ["model.a.weight", "1", "34.6", "10", "100%"]
    assert [line.split() for line in lines[5:8]] == [
        ["value", "a", "b"],
        ["step", "10", "20"],
        ["hooks.Stop.best", "10", "20"],
    ]
    assert lines[-1] == "1 tensor and 2 values differ, 1 tensor and 0 values are equal to the bit."


def test_scripts_cannot_tell_whether_two_checkpoints_differ(run):
    """--exit-code as git diff's; without it 0 whatever was found; --json of the documented shape."""
    assert trainerd("diff", f"{run}@10", run, "--exit-code").returncode == 1
    same = trainerd("diff", run, f"{run}@20", "--exit-code")
    assert same.returncode == 0
    assert "No difference: 2 tensors and 2 values" in same.stdout
    report = json.loads(trainerd("diff", f"{run}@10", run, "model", "--json").stdout)
    assert report == {
        "a": {"run": str(run), "step": 10, "term": 1},
        "b": {"run": str(run), "step": 20, "term": 1},
        "path": "model",
        "tensors": [
            {
                "path": "model.a.weight",
                "change": "value",
                "a": {"dtype": "float32", "shape": [3, 4]},
                "b": {"dtype": "float32", "shape": [3, 4]},
                "changed_fraction": 1.0,
                "l2": pytest.approx(1200**0.5),
                "relative": pytest.approx(1.0),
                "max_abs": 10.0,
                "not_finite": 0,
            }
        ],
        "values": [],
        "equal_tensors": 1,
        "equal_values": 0,
    }


def test_copy_goes_on_silently_after_damage(run, tmp_path):
    """A line per checkpoint; 65 when one is damaged; verify agrees."""
    done = trainerd("copy", run, tmp_path / "b")
    assert (done.returncode, done.stderr) == (0, "")
    assert [row.split()[0::4] for row in done.stdout.splitlines()[1:]] == [["20", "copied"], ["10", "copied"]]
    assert trainerd("verify", tmp_path / "b").returncode == 0
    assert "there already" in trainerd("copy", run, tmp_path / "b").stdout
    [file] = (run / "checkpoints/step-000000010.t1").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    done = trainerd("copy", run, tmp_path / "c")
    assert done.returncode == 65
    assert "does not match its hash" in done.stdout
    assert trainerd("verify", tmp_path / "c").returncode == 0


def test_ctrl_c_leaves_a_traceback_or_half_a_run(tmp_path):
    """130 and one line, in the middle of reading the source; no run was begun."""
    (tmp_path / "old").mkdir()
    pipe = tmp_path / "old/last_checkpoint"
    os.mkfifo(pipe)
    words = [TRAINERD, "import", str(tmp_path / "old"), str(tmp_path / "b")]
    started = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # The pipe opens when the command has opened its end; nothing is written, so it waits there.
    with started as child, pipe.open("wb"):
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, "", "trainerd: Interrupted.\n")
    assert not (tmp_path / "b").exists()
