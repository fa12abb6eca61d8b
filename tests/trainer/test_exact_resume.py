"""An undisturbed training against one that is killed and rebuilt: the same bits, step by step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.trainers import Net, Recorder, StopAt, assert_same, batches, seed, simple_trainer, through_a_file
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from trainerd.trainer import late_metrics
from trainerd.trainer.base import HookBase, TrainerBase
from trainerd.trainer.data import ResumableLoader
from trainerd.trainer.hooks import LRScheduler
from trainerd.trainer.simple import SimpleTrainer

STEPS = 17  # two epochs of seven batches and a bit

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
}


@pytest.fixture(autouse=True)
def _every_device_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let metrics that may be written late be late here, as on a device that computes beside us."""
    monkeypatch.setattr(late_metrics, "must_wait", lambda _losses: True)


def cycles(optimizer: torch.optim.Optimizer) -> bool:
    return "momentum" in optimizer.defaults or "betas" in optimizer.defaults


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, milestones=[7, 10], gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1, cycle_momentum=cycles(o)),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=7), lr_scheduler.CosineAnnealingLR(o, T_max=10)],
        milestones=[7],
    ),
}


class Average(HookBase):
    """An average of the weights that begins anew in before_train, as many hooks do."""

    def before_train(self) -> None:
        self.average = {k: v.detach().clone() for k, v in self.trainer.model.named_parameters()}
        self.updates = 0

    def after_step(self) -> None:
        self.updates += 1
        for name, parameter in self.trainer.model.named_parameters():
            self.average[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "updates": self.updates} if hasattr(self, "average") else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"]
        self.updates = state_dict["updates"]


class Meddler(HookBase):
    """Draws random numbers, changes weights, optimizer state and the learning rate before training."""

    def before_train(self) -> None:
        torch.rand(3)
        with torch.no_grad():
            self.trainer.model.first.bias.add_(1.0)
        for state in self.trainer.optimizer.state.values():
            state.clear()
        for group in self.trainer.optimizer.param_groups:
            group["lr"] *= 1 if isinstance(group["lr"], torch.Tensor) else 1.5


def build(optimizer: str, scheduler: str, loader: Any = None) -> tuple[SimpleTrainer, Recorder]:
    seed(1)
    model = Net()
    made = OPTIMIZERS[optimizer](model.parameters())
    trainer = SimpleTrainer(model, loader() if loader else batches(), made)
    recorder = Recorder()
    trainer.register_hooks([Average(), LRScheduler(SCHEDULERS[scheduler](made)), Meddler(), recorder])
    return trainer, recorder


def killed_and_rebuilt(make: Callable[[], tuple[Any, Recorder]], kills: list[int]) -> tuple[Any, Recorder]:
    trainer, recorder = make()
    rows: list[Any] = []
    start = 0
    for step in kills:
        trainer.session = StopAt(step)
        trainer.train(start, STEPS)
        rows += recorder.rows
        state, start = trainer.session.state, step
        seed(99)
        trainer, recorder = make()
        seed(98)
        trainer.load_state_dict(state)
        assert_same(through_a_file(trainer.state_dict()), state)
    trainer.train(start, STEPS)
    recorder.rows = rows + recorder.rows
    return trainer, recorder


def assert_undisturbed(make: Callable[[], tuple[Any, Recorder]], kills: list[int]) -> None:
    expected, rows = make()
    expected.train(0, STEPS)
    got, got_rows = killed_and_rebuilt(make, kills)
    assert got_rows.rows == rows.rows
    assert_same(got.state_dict(), expected.state_dict())


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_killed_run_ends_with_other_weights(optimizer: str, scheduler: str) -> None:
    """Kills in an epoch, at its very end, on a milestone and twice in one epoch change no bit."""
    assert_undisturbed(lambda: build(optimizer, scheduler), [1, 3, 7, 10])


@pytest.mark.parametrize("kills", [[step] for step in range(1, STEPS)])
def test_some_step_cannot_be_resumed_at(kills: list[int]) -> None:
    """Every single step is a good one to be killed after."""
    assert_undisturbed(lambda: build("adamw", "one_cycle"), kills)


def shuffled() -> DataLoader[Any]:
    return DataLoader(torch.cat(batches()), batch_size=6, shuffle=True)  # type: ignore[arg-type]


def resumable(num_workers: int = 0) -> Callable[[], ResumableLoader]:
    def make() -> ResumableLoader:
        return ResumableLoader(torch.cat(batches()), batch_size=6, shuffle=True, seed=3, num_workers=num_workers)

    return make


@pytest.mark.parametrize("loader", [shuffled, resumable()], ids=["DataLoader", "ResumableLoader"])
def test_shuffled_data_comes_in_another_order_after_a_resume(loader: Any) -> None:
    """A plain shuffling DataLoader and a ResumableLoader both go on with the same batches."""
    assert_undisturbed(lambda: build("sgd_momentum", "cosine", loader), [2, 7, 8, 14])


def test_loader_processes_shift_the_random_numbers() -> None:
    """Loader processes started at resume leave the trainer's random numbers as they were saved."""
    assert_undisturbed(lambda: build("sgd_momentum", "cosine", resumable(2)), [3])


@pytest.mark.parametrize("loader", [batches, shuffled, resumable()], ids=["list", "DataLoader", "ResumableLoader"])
def test_a_state_from_before_the_first_step_skips_what_before_train_draws(loader: Any) -> None:
    """A state taken before training begins continues exactly, before_train included."""
    expected, rows = build("adamw", "cosine", loader)
    state = through_a_file(expected.state_dict())
    expected.train(0, STEPS)
    seed(5)
    got, got_rows = build("adamw", "cosine", loader)
    seed(6)
    got.load_state_dict(state)
    got.train(0, STEPS)
    assert got_rows.rows == rows.rows
    assert_same(got.state_dict(), expected.state_dict())


def test_a_scheduler_made_in_before_train_starts_over() -> None:
    """A scheduler that exists only from before_train on still continues where it was."""

    class MakesScheduler(HookBase):
        def before_train(self) -> None:
            self.trainer.scheduler = SCHEDULERS["one_cycle"](self.trainer.optimizer)

    def make() -> tuple[SimpleTrainer, Recorder]:
        trainer, recorder = simple_trainer(), Recorder()
        trainer.register_hooks([MakesScheduler(), LRScheduler(), recorder])
        return trainer, recorder

    assert_undisturbed(make, [5, 12])


def test_a_trainer_without_model_and_optimizer_cannot_be_resumed() -> None:
    """A bare TrainerBase saves hooks, metrics and random numbers, and continues them."""

    class Draws(TrainerBase):
        def run_step(self) -> None:
            self.storage.put_scalar("total_loss", torch.rand(()))

    class Total(HookBase):
        total = 0.0

        def after_step(self) -> None:
            self.total += self.trainer.storage.history("total_loss").latest()

        def state_dict(self) -> dict[str, float]:
            return {"total": self.total}

        def load_state_dict(self, state_dict: dict[str, float]) -> None:
            self.total = state_dict["total"]

    def make() -> Draws:
        seed(1)
        trainer = Draws()
        trainer.register_hooks([Total()])
        return trainer

    expected = make()
    expected.train(0, 10)
    first = make()
    first.session = StopAt(4)
    first.train(0, 10)
    assert {"model", "optimizer", "data"}.isdisjoint(first.session.state)
    second = make()
    second.load_state_dict(first.session.state)
    assert second.restored_grade == "position only"
    second.train(4, 10)
    assert_same(second.state_dict(), expected.state_dict())


def test_metrics_in_a_thread_are_missing_from_the_state() -> None:
    """A state waits for the metrics that are still being written."""

    def make() -> SimpleTrainer:
        return simple_trainer(async_write_metrics=True)

    expected = make()
    expected.train(0, STEPS)
    first = make()
    first.session = StopAt(8)
    first.train(0, STEPS)
    second = make()
    second.load_state_dict(first.session.state)
    second.train(8, STEPS)
    assert_same(second.state_dict(), expected.state_dict())
