"""What an attack found that resumed other bits and said bitwise, or said nothing at all."""

from typing import Any

import numpy as np
import pytest
import torch
from support.trainers import Net, StopAt, assert_same, batches, seed, through_a_file
from torch import nn
from torch.optim import lr_scheduler

from trainerd.trainer import AMPTrainer, HookBase, ResumableLoader, SimpleTrainer, StateMismatch, TrainerBase, hooks


def build(*some_hooks: HookBase, optimizer: Any = None, model: nn.Module | None = None) -> SimpleTrainer:
    seed(1)
    model = model or Net()
    made = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.05)))(model.parameters())
    trainer = SimpleTrainer(model, ResumableLoader(torch.cat(batches()), 6), made)
    trainer.register_hooks(some_hooks)
    return trainer


def test_parameters_outside_the_model_lose_their_values(caplog: Any) -> None:
    """Only their moments are saved: told before the first step, and the grade says it."""
    outside = torch.zeros(1, requires_grad=True)
    trainer = build(optimizer=lambda p: torch.optim.SGD([*p, outside], lr=0.1))
    trainer.train(0, 2)
    assert "1 parameters of the optimizer that are none of the model's will not be saved" in caplog.text
    resumed = build(optimizer=lambda p: torch.optim.SGD([*p, torch.zeros(1, requires_grad=True)], lr=0.1))
    resumed.load_state_dict(through_a_file(trainer.state_dict()))
    assert resumed.restored_grade == "position only"


def test_another_class_takes_the_state() -> None:
    """Optimizers and schedulers of another class are refused, whatever options they share."""

    def scheduled(make: Any) -> SimpleTrainer:
        trainer = build()
        trainer.register_hooks([hooks.LRScheduler(make(trainer.optimizer))])
        return trainer

    state = through_a_file(build(optimizer=torch.optim.Adam).state_dict())
    with pytest.raises(StateMismatch, match=r"optimizer\.class \(saved 'Adam', code 'RAdam'\)"):
        build(optimizer=torch.optim.RAdam).load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"optimizer\.class"):  # which side's state it is cannot be chosen
        build(optimizer=torch.optim.RAdam).load_state_dict(state, on_mismatch="saved")
    told = build(optimizer=torch.optim.RAdam)
    told.load_state_dict(state, on_mismatch="warn")
    assert told.state_dict()["hyperparameters"]["optimizer.class"] == "RAdam"
    step = scheduled(lambda o: lr_scheduler.StepLR(o, 3))
    step.train(0, 2)
    state = through_a_file(step.state_dict())
    for make in (
        lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 3), lr_scheduler.ExponentialLR(o, 0.9)]),
    ):
        with pytest.raises(StateMismatch, match=r"hooks\.LRScheduler\.classes"):
            scheduled(make).load_state_dict(state)


def test_gradients_that_nobody_clears_enter_the_norm() -> None:
    """Clipped is what the optimizer updates: a backbone that is not trained, and not frozen either, does not count."""
    norms = []

    def look(trainer: Any) -> None:
        norms.append(float(trainer.model.norm.weight.grad.norm()))

    model = Net()
    trainer = build(
        hooks.GradientClip(1e-3),
        hooks.CallbackHook(after_backward=look),
        optimizer=lambda _: torch.optim.SGD([model.norm.weight], lr=0.01),
        model=model,
    )
    trainer.train(0, 3)
    assert norms == pytest.approx([1e-3] * 3, rel=1e-2)


class FailsOnce(HookBase):
    def __init__(self) -> None:
        self.failed = False

    def after_backward(self) -> None:
        if self.trainer.iter == 3 and not self.failed:
            self.failed = True
            raise RuntimeError("once")


def test_a_second_try_skips_the_unscaling() -> None:
    """After a step that failed half-way and a load into the same trainer, gradients are unscaled again."""

    def make() -> AMPTrainer:
        seed(1)
        model = Net()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        loader = ResumableLoader(torch.cat(batches()), 6)
        trainer = AMPTrainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.05), grad_scaler=scaler)
        trainer.register_hooks([hooks.GradientClip(1.0), FailsOnce()])
        return trainer

    expected = make()
    expected._hooks[1].failed = True
    expected.train(0, 6)
    trainer = make()
    trainer.session = StopAt(2)
    trainer.train(0, 6)
    state = trainer.session.state
    trainer.session = StopAt(99)
    with pytest.raises(RuntimeError, match="once"):
        trainer.train(2, 6)
    trainer.load_state_dict(state)
    trainer.train(2, 6)
    assert_same(through_a_file(trainer.model.state_dict()), through_a_file(expected.model.state_dict()))


def test_an_evaluation_sees_statistics_of_before() -> None:
    """PreciseBN works in its after_step, so that a hook after it sees the model that is saved."""
    seed(1)
    model = Net()
    seen = []
    trainer = SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), lr=0.05))
    statistics = hooks.PreciseBN(2, nn.Sequential(model.norm), batches(), 2)
    trainer.register_hooks([statistics, hooks.EvalHook(2, lambda: seen.append(model.norm.running_mean.clone()))])
    kept = []
    trainer.register_hooks([hooks.CallbackHook(after_step=lambda t: kept.append(model.norm.running_mean.clone()))])
    trainer.train(0, 4)
    assert torch.equal(seen[0], kept[1])
    assert torch.equal(seen[1], kept[3])


def test_any_decision_moves_the_base_rates() -> None:
    """A scheduler's own base rates stay, unless the code's rate is taken."""

    def make(decay: float) -> SimpleTrainer:
        trainer = build(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=decay))
        lr_scheduler.LinearLR(trainer.optimizer, total_iters=3)  # leaves its initial_lr
        cyclic = lr_scheduler.CyclicLR(trainer.optimizer, 0.01, 0.05, step_size_up=3, cycle_momentum=False)
        trainer.register_hooks([hooks.LRScheduler(cyclic)])
        return trainer

    expected = make(0.0)
    expected.train(0, 8)
    trainer = make(0.0)
    trainer.train(0, 3)
    resumed = make(0.1)
    resumed.load_state_dict(through_a_file(trainer.state_dict()), on_mismatch="saved")
    resumed.train(3, 8)
    assert resumed.storage.history("lr").values() == expected.storage.history("lr").values()


def test_a_state_of_half_a_step_is_called_bitwise() -> None:
    """Saved after an interrupt in mid-step: a batch is used and its update is not done."""

    def interrupt(trainer: Any) -> None:
        if trainer.iter == 3:
            raise KeyboardInterrupt

    trainer = build(hooks.CallbackHook(after_backward=interrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(0, 9)
    state = through_a_file(trainer.state_dict())
    resumed = build()
    resumed.load_state_dict(state)
    assert resumed.restored_grade == "position only"
    assert "in the middle of a step" in resumed.restored_reason


def test_spawned_generators_repeat() -> None:
    """`Generator.spawn` goes on with the next child."""
    trainer, generator = build(), np.random.default_rng(3)
    trainer.register_rng("g", generator)
    generator.spawn(2)
    state = through_a_file(trainer.state_dict())
    expected = generator.spawn(1)[0].random()
    resumed, again = build(), np.random.default_rng(3)
    resumed.register_rng("g", again)
    resumed.load_state_dict(state)
    resumed.train(0, 0)
    assert again.spawn(1)[0].random() == expected


def test_the_shown_group_changes_with_a_resume() -> None:
    """The group whose rate is written is chosen by the rates as built."""

    def make() -> SimpleTrainer:
        seed(1)
        model = Net()
        first, second, third, *_ = model.parameters()
        groups = [{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.2}, {"params": [third], "lr": 0.2}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        trainer = SimpleTrainer(model, batches(), optimizer)
        rates = [lambda e: 1.0, lambda e: 0.9**e, lambda e: 0.8**e]
        trainer.register_hooks([hooks.LRScheduler(lr_scheduler.LambdaLR(optimizer, rates))])
        return trainer

    expected = make()
    expected.train(0, 6)
    trainer = make()
    trainer.train(0, 3)
    resumed = make()
    resumed.load_state_dict(through_a_file(trainer.state_dict()))
    resumed.train(3, 6)
    assert resumed.storage.history("lr").values() == expected.storage.history("lr").values()


def test_numbers_of_numpy_cannot_be_loaded() -> None:
    """They become Python's in the state, which torch.load(weights_only=True) takes."""
    trainer = build(
        hooks.EMA(np.float64(0.9)), optimizer=lambda p: torch.optim.SGD(p, lr=np.float64(0.1), momentum=np.float32(0.5))
    )
    scheduler = lr_scheduler.StepLR(trainer.optimizer, 2, gamma=np.float64(0.5))
    trainer.register_hooks([hooks.LRScheduler(scheduler), hooks.GradientClip(max_norm=np.float64(1.0))])
    trainer.train(0, 3)
    through_a_file(trainer.state_dict())


def test_parts_that_cannot_be_saved_train_first() -> None:
    """A dict of models, a hook that is registered twice, and what is no optimizer are refused at once."""

    class Players(TrainerBase):
        def __init__(self) -> None:
            super().__init__()
            self.model = {"a": nn.Linear(2, 2)}

    with pytest.raises(TypeError, match=r"Players\.model is a dict .* go into one torch\.nn\.ModuleDict"):
        Players().state_dict()
    hook = hooks.EMA()
    for again in ([hook, hook], [hook]):
        trainer = build(*([hook] if len(again) == 1 else []))
        with pytest.raises(ValueError, match="EMA is registered already"):
            trainer.register_hooks(again)
    with pytest.raises(TypeError, match="LRScheduler takes a torch optimizer and a torch scheduler, not 5"):
        hooks.LRScheduler(5)  # type: ignore[arg-type]
