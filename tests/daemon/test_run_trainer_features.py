"""What trainer and daemon agree on: settings that changed, the best checkpoint, an early end, the printed grade."""

import json
import re
import subprocess
from pathlib import Path

from support.runs import TINY, TRAINERD, Run, final_state, write_target

from trainerd.checkpoint.listing import list_checkpoints
from trainerd.checkpoint.storage import open_storage

FEATURES = """
def build_trainer(config):
    from trainerd.trainer import AMPTrainer, hooks

    torch.set_num_threads(1)
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.001))
    loader = ResumableLoader(Data(), shuffle=True, batch_size=4)
    trainer = AMPTrainer(model, loader, optimizer, precision=torch.bfloat16)
    scores = config.get("scores", [])
    trainer.register_hooks([
        hooks.EvalHook(1, lambda: {"score": scores[trainer.iter] if trainer.iter < len(scores) else 0.0}),
        hooks.LRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 4, config.get("gamma", 0.5))),
        hooks.BestCheckpointer(1, None, "score"),
        hooks.EarlyStopping("score", config.get("patience", 100), mode="max"),
        Script(config),
    ])
    return trainer
"""


def features(folder: Path) -> str:
    return write_target(folder, TINY[: TINY.index("def build_trainer")] + FEATURES)


def steps(folder: Path) -> list[tuple[int, bool]]:
    return [(info.step, info.pinned) for info in list_checkpoints(open_storage(str(folder)))]


def test_a_changed_rate_is_refused_and_the_flag_decides(tmp_path: Path) -> None:
    """78 with both values and the way out; `--checkpoint-on-mismatch` takes one side, and a table is printed."""
    target, folder = features(tmp_path), tmp_path / "run"
    with Run(target, folder, max_iter=10) as run:
        assert run.wait() == 0, run.text
        assert run.text.count("starting from step 0") == 1
    with Run(target, folder, max_iter=20, lr=0.0002, gamma=0.1) as run:
        assert run.wait() == 78, run.text
    flat = " ".join(run.text.split())
    assert "optimizer.param_groups.0.lr (saved 0.001, code 0.0002)" in flat
    assert "hooks.LRScheduler.gamma (saved 0.5, code 0.1)" in flat
    assert "on_mismatch, such as optimizer.lr=saved or optimizer.lr=code" in flat
    assert "Traceback" not in run.text
    policy = "optimizer.lr=code, hooks=saved"
    with Run(target, folder, "--checkpoint-on-mismatch", policy, max_iter=20, lr=0.0002, gamma=0.1) as run:
        assert run.wait() == 0, run.text
    assert re.search(r"hooks\.LRScheduler\.gamma +0\.5 +0\.1 +saved", run.text)
    line = "resumed from step 10 (storage, grade same data: settings of the code were taken in place of saved ones)"
    assert line in run.text
    rates = final_state(folder)["events"]["histories"]["lr"]["values"].tolist()
    assert [round(rate, 12) for rate in rates[8:13]] == [0.00025, 0.00025, 0.00005, 0.00005, 0.000025]
    with Run(target, folder, max_iter=21, lr=0.0002, gamma=0.5) as run:  # what was decided is what is remembered
        assert run.wait() == 0, run.text
    assert "sets other values" not in run.text


def test_a_policy_in_the_job_file(tmp_path: Path) -> None:
    """A table by item, with quoted or nested names; what there is not is refused before anything starts."""
    features(tmp_path)
    text = 'target = "train.py:build_trainer"\ndir = "run"\nmax_iter = 5\n[checkpoint]\non_mismatch = %s\n'
    for value, status in (
        ('{ "optimizer.lr" = "code", hooks = "warn" }', 0),
        ('{ optimizer.lr = "code" }', 0),
        ('{ optimiser = "code" }', 78),
        ('"ignore"', 78),
        ("true", 78),
    ):
        (tmp_path / "job.toml").write_text(text % value)
        command = [TRAINERD, "run", str(tmp_path / "job.toml")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
    assert "on_mismatch" in done.stderr


def test_the_best_checkpoint_is_pruned(tmp_path: Path) -> None:
    """It is saved in its step, whatever the interval, and stays pinned across restarts until a better one comes."""
    target, folder = features(tmp_path), tmp_path / "run"
    scores = [0.1, 0.2, 0.9, *[0.3] * 15, 1.0]
    flags = ("--checkpoint-keep", "last=1")
    with Run(target, folder, *flags, max_iter=15, scores=scores, raise_once_at=[12]) as run:
        assert run.wait() == 0, run.text
    assert steps(folder) == [(3, True), (15, False)]
    listed = subprocess.run([TRAINERD, "list", str(folder)], capture_output=True, text=True, check=True).stdout
    assert "pinned" in listed.splitlines()[1]
    report = subprocess.run([TRAINERD, "list", str(folder), "--json"], capture_output=True, text=True, check=True)
    assert [one["pinned"] for one in json.loads(report.stdout)["checkpoints"]] == [True, False]
    with Run(target, folder, *flags, max_iter=25, scores=scores) as run:
        assert run.wait() == 0, run.text
    assert steps(folder) == [(19, True), (25, False)]


def test_an_early_end_is_taken_for_a_failure(tmp_path: Path) -> None:
    """Exit 0 with the last state saved; started again, it ends at once; with more patience it goes on."""
    target, folder = features(tmp_path), tmp_path / "run"
    with Run(target, folder, max_iter=50, scores=[1.0], patience=7) as run:
        assert run.wait() == 0, run.text
    assert "training ends at step 8" in run.text
    assert final_state(folder)["step"] == 8
    with Run(target, folder, max_iter=50, scores=[1.0], patience=7) as run:
        assert run.wait() == 0, run.text
    assert final_state(folder)["step"] == 8
    with Run(target, folder, max_iter=50, scores=[1.0], patience=12) as run:
        assert run.wait() == 0, run.text
    assert final_state(folder)["step"] == 13
    assert "resumed from step 8 (storage, grade bitwise)" in run.text
