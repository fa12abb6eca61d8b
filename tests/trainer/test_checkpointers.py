"""PeriodicCheckpointer and BestCheckpointer: saved after all hooks, kept when best, with fvcore's kind or our store."""

import pathlib
from typing import Any

import pytest
import torch
from support.trainers import Net, StopAt, batches, seed, through_a_file

from trainerd.checkpoint import CheckpointStore, Keep, RunOwner, open_storage
from trainerd.trainer import hooks
from trainerd.trainer.base import HookBase
from trainerd.trainer.hooks import BestCheckpointer, PeriodicCheckpointer
from trainerd.trainer.simple import SimpleTrainer


class Fvcore:
    """An object with fvcore's `save`, which writes what its trainer's state is at that moment."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.save_dir = str(folder)
        self.trainer: Any = None
        self.saved: list[tuple[str, dict[str, Any], dict[str, Any]]] = []

    def save(self, name: str, **extra: Any) -> None:
        state = through_a_file(self.trainer.state_dict())
        self.saved.append((name, extra, state))
        (pathlib.Path(self.save_dir) / f"{name}.pth").write_bytes(b"")


class Scores(HookBase):
    """Puts a score in every iteration, from a list."""

    def __init__(self, scores: list[float]) -> None:
        self.scores = scores

    def after_step(self) -> None:
        self.trainer.storage.put_scalar("score", self.scores[self.trainer.iter], smoothing_hint=False)


class Count(HookBase):
    """A hook that is registered last, and whose state must not lag behind."""

    def __init__(self) -> None:
        self.count = 0

    def after_step(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def build(*hooks: HookBase) -> SimpleTrainer:
    seed(1)
    model = Net()
    trainer = SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), lr=0.05))
    trainer.register_hooks(hooks)
    return trainer


def owned(folder: pathlib.Path, **keep: Any) -> tuple[RunOwner, CheckpointStore]:
    owner = RunOwner.acquire(open_storage(str(folder)))
    newest = max((info.step for info in CheckpointStore(open_storage(str(folder))).list()), default=0)
    return owner, CheckpointStore(open_storage(str(folder)), term=owner.ensure_term(newest), keep=Keep(**keep))


def steps_in(folder: pathlib.Path) -> list[int]:
    return [info.step for info in CheckpointStore(open_storage(str(folder))).list()]


def test_hooks_after_the_checkpointer_are_saved_one_iteration_stale(tmp_path: pathlib.Path) -> None:
    """It saves when all hooks have had their after_step, whatever their order, and fvcore's names and extras stay."""
    checkpointer = Fvcore(tmp_path)
    trainer = build(PeriodicCheckpointer(checkpointer, 3), Count())
    checkpointer.trainer = trainer
    trainer.train(0, 7)
    assert [(name, extra) for name, extra, _ in checkpointer.saved] == [
        ("model_0000002", {"iteration": 2}),
        ("model_0000005", {"iteration": 5}),
        ("model_final", {"iteration": 6}),
    ]
    assert [(state["step"], state["hooks"]["Count"]["count"]) for _, _, state in checkpointer.saved] == [
        (3, 3),
        (6, 6),
        (7, 7),
    ]


def test_a_restart_forgets_which_files_to_delete(tmp_path: pathlib.Path) -> None:
    """max_to_keep counts across restarts; a file that somebody removed already is no trouble."""

    def make() -> SimpleTrainer:
        checkpointer = Fvcore(tmp_path)
        checkpointer.trainer = build(PeriodicCheckpointer(checkpointer, 2, max_to_keep=2))
        return checkpointer.trainer

    trainer = make()
    trainer.session = StopAt(5)
    trainer.train(0, 11)
    (tmp_path / "model_0000001.pth").unlink()
    resumed = make()
    resumed.load_state_dict(trainer.session.state)
    resumed.train(5, 11)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model_0000007.pth",
        "model_0000009.pth",
        "model_final.pth",
    ]


def test_the_store_has_the_whole_state(tmp_path: pathlib.Path) -> None:
    """A CheckpointStore gets what `trainerd run` would save, and two hooks that want one step save it once."""
    owner, store = owned(tmp_path, last=2)
    trainer = build(PeriodicCheckpointer(store, 4), PeriodicCheckpointer(store, 2), Count())
    trainer.train(0, 9)
    assert steps_in(tmp_path) == [8, 9]
    loaded = store.load(8)
    assert loaded is not None
    assert loaded.state["hooks"]["Count"] == {"count": 8}
    assert loaded.state["fingerprints"].keys() == {"parameters", "rng"}
    assert len(list(tmp_path.glob("checkpoints/step-000000008.t1/*.safetensors"))) == 1
    owner.release()


SCORES = [0.1, 0.9, float("nan"), 0.5, 0.95, 0.2, 0.3, 0.1, 0.2, 0.1]


def test_the_best_checkpoint_is_pruned_and_overwritten_by_a_worse_one(tmp_path: pathlib.Path) -> None:
    """The best stays whatever retention says; after a resume a worse value changes nothing, a better one takes over."""

    def make(scores: list[float]) -> tuple[RunOwner, SimpleTrainer]:
        owner, store = owned(tmp_path, last=1)
        best = BestCheckpointer(1, store, "score")
        return owner, build(Scores(scores), best, PeriodicCheckpointer(store, 1))

    owner, trainer = make(SCORES)
    trainer.session = StopAt(8)
    trainer.train(0, 10)
    assert steps_in(tmp_path) == [5, 8]
    assert [(info.step, info.pinned) for info in CheckpointStore(open_storage(str(tmp_path))).list()] == [
        (5, True),
        (8, False),
    ]
    owner.release()

    owner, trainer = make(SCORES)
    store = CheckpointStore(open_storage(str(tmp_path)))
    trainer.load_state_dict(store.load().state)  # type: ignore[union-attr]
    trainer.train(8, 10)
    assert steps_in(tmp_path) == [5, 10]
    assert store.load(5).state["hooks"]["BestCheckpointer"] == {"best": 0.95, "best_step": 5, "seen": 4}  # type: ignore[union-attr]
    owner.release()

    owner, trainer = make([*SCORES, 0.96, 0.1])
    trainer.load_state_dict(store.load().state)  # type: ignore[union-attr]
    trainer.train(10, 12)
    assert steps_in(tmp_path) == [11, 12]
    owner.release()


@pytest.mark.parametrize(("mode", "expected"), [("max", [0, 1, 4]), ("min", [0, 9])])
def test_fvcores_kind_gets_the_best_under_one_name(tmp_path: pathlib.Path, mode: str, expected: list[int]) -> None:
    """As in detectron2: `save(file_prefix, iteration=...)` each time that the metric is better than ever."""
    checkpointer = Fvcore(tmp_path)
    scores = [0.1, 0.9, float("nan"), 0.5, 0.95, 0.2, 0.3, 0.1, 0.2, 0.05]
    trainer = build(Scores(scores), BestCheckpointer(1, checkpointer, "score", mode), Count())
    checkpointer.trainer = trainer
    trainer.train(0, 10)
    assert [(name, extra["iteration"]) for name, extra, _ in checkpointer.saved] == [
        ("model_best", i) for i in expected
    ]
    assert [state["hooks"]["Count"]["count"] for _, _, state in checkpointer.saved] == [i + 1 for i in expected]


def test_nobody_saves_and_nobody_says_so(caplog: Any) -> None:
    """Without a checkpointer and without a watching session the hooks say that nothing will be saved."""
    trainer = build(PeriodicCheckpointer(period=2), BestCheckpointer(2, val_metric="missing"))
    trainer.train(0, 4)
    assert "PeriodicCheckpointer has no checkpointer and nobody watches" in caplog.text
    assert "no scalar missing was ever put" in caplog.text


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: PeriodicCheckpointer(None, 0), "period is 0"),
        (lambda: PeriodicCheckpointer(None, 5, max_to_keep=0), "max_to_keep is 0"),
        (lambda: BestCheckpointer(5, None, "score", "best"), 'mode is "max" or "min", not \'best\''),
        (lambda: BestCheckpointer(5), "val_metric must name"),
        (lambda: BestCheckpointer(-1, None, "score"), "eval_period is -1"),
    ],
)
def test_bad_arguments_are_noticed_at_the_first_save(make: Any, problem: str) -> None:
    """They are refused when the hook is made."""
    with pytest.raises(ValueError, match=problem):
        make()


def test_what_cannot_save_is_noticed_at_the_first_save() -> None:
    """A checkpointer without `save` is refused, by its type."""
    with pytest.raises(TypeError, match="PosixPath is none of these"):
        PeriodicCheckpointer(pathlib.Path("x"), 5)  # type: ignore[arg-type]


class StopAtStep(HookBase):
    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self) -> None:
        if self.trainer.iter + 1 == self.step:
            self.trainer.stop_early("enough")


@pytest.mark.parametrize("first", [True, False])
def test_an_early_end_is_not_saved(tmp_path: pathlib.Path, first: bool) -> None:
    """It is an end: the last save, look at the metric and evaluation happen, in whatever order of hooks."""
    checkpointer = Fvcore(tmp_path)
    model = Net()
    evaluations: list[int] = []
    saving = [
        hooks.EvalHook(0, lambda: evaluations.append(1) or {"score": 1.0}),
        PeriodicCheckpointer(checkpointer, 5),
        BestCheckpointer(0, checkpointer, "score"),
        hooks.PreciseBN(0, model, batches(), 1),
    ]
    stop = [StopAtStep(7)]
    seed(1)
    trainer = SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), lr=0.05))
    trainer.register_hooks([*stop, *saving] if first else [*saving, *stop])
    checkpointer.trainer = trainer
    trainer.train(0, 100)
    assert [name for name, _, _ in checkpointer.saved] == ["model_0000004", "model_final", "model_best"]
    assert evaluations == [1]
    final = checkpointer.saved[1][2]
    assert final["events"]["latest"]["score"] == [1.0, 6]
    assert final["hooks"]["BestCheckpointer"]["best_step"] == 7


def test_files_of_others_are_deleted(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """max_to_keep needs to know the folder; a max_iter before the trainer's gives one last file, not many."""
    for target in (None, owned(tmp_path / "run")[1], type("Saver", (), {"save": lambda self, name, **extra: None})()):
        with pytest.raises(TypeError, match="max_to_keep deletes files in the checkpointer's save_dir"):
            PeriodicCheckpointer(target, 5, max_to_keep=1)
    checkpointer = Fvcore(tmp_path)
    trainer = build(PeriodicCheckpointer(checkpointer, 100, max_iter=3))
    checkpointer.trainer = trainer
    trainer.train(0, 6)
    assert [(name, extra["iteration"]) for name, extra, _ in checkpointer.saved] == [
        ("model_final", 2),
        ("model_final", 5),
    ]
