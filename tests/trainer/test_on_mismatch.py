"""What the code changed since the checkpoint is shown, and whose value counts is the user's choice."""

import logging
from typing import Any

import pytest
import torch
from support.trainers import Net, batches, seed, through_a_file
from torch.optim import lr_scheduler

from trainerd.trainer import hooks
from trainerd.trainer.base import HookBase
from trainerd.trainer.errors import StateMismatch
from trainerd.trainer.hooks import LRScheduler
from trainerd.trainer.mismatch import OnMismatch
from trainerd.trainer.simple import SimpleTrainer


class Noise(HookBase):
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def hyperparameters(self) -> dict[str, Any]:
        return {"scale": self.scale}


def build(lr: Any = 0.1, t_max: int = 20, scheduler: Any = None, **options: Any) -> SimpleTrainer:
    seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    trainer = SimpleTrainer(model, batches(), optimizer, **options)
    made = scheduler(optimizer) if scheduler else lr_scheduler.CosineAnnealingLR(optimizer, T_max=t_max)
    trainer.register_hooks([LRScheduler(made)])
    return trainer


def saved_after(trainer: SimpleTrainer, steps: int) -> dict[str, Any]:
    trainer.train(0, steps)
    return through_a_file(trainer.state_dict())


def rates(trainer: SimpleTrainer, start: int, end: int) -> list[float]:
    trainer.train(start, end)
    return [rate for rate, iteration in trainer.storage.history("lr").values() if iteration >= start]


def test_a_changed_learning_rate_is_ignored_silently() -> None:
    """By default it is refused, with both values, and the trainer is not touched."""
    state = saved_after(build(), 5)
    changed = build(lr=0.01, t_max=30)
    before = through_a_file(changed.state_dict())
    with pytest.raises(StateMismatch) as refused:
        changed.load_state_dict(state)
    assert "optimizer.param_groups.0.lr (saved 0.1, code 0.01)" in str(refused.value)
    assert "hooks.LRScheduler.T_max (saved 20, code 30)" in str(refused.value)
    assert "optimizer.lr=code" in str(refused.value)
    after = through_a_file(changed.state_dict())
    assert before["optimizer"] == after["optimizer"]
    assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])


def test_a_schedule_is_taken_for_a_change() -> None:
    """A rate that a scheduler or a hook moved while training is no difference between two builds of one code."""
    state = saved_after(build(), 5)
    resumed = build()
    resumed.load_state_dict(state)
    assert resumed.restored_grade == "position only"  # of a list, and for no other reason
    assert "settings" not in resumed.restored_reason


@pytest.mark.parametrize("action", ["saved", "warn"])
def test_the_saved_settings_win_and_the_table_says_so(action: str, caplog: Any) -> None:
    """Training goes on as it would have, and the next checkpoint still says with what."""
    expected = rates(build(), 0, 12)
    state = saved_after(build(), 5)
    changed = build(lr=0.01, t_max=30)
    with caplog.at_level(logging.WARNING, "trainerd.trainer"):
        changed.load_state_dict(state, on_mismatch=action)
    (table,) = [r.getMessage() for r in caplog.records if "sets other values" in r.getMessage()]
    rows = [line.split() for line in table.splitlines()[1:]]
    assert rows == [
        ["setting", "saved", "code", "taken"],
        ["optimizer.param_groups.0.lr", "0.1", "0.01", "saved"],
        ["hooks.LRScheduler.T_max", "20", "30", "saved"],
    ]
    assert rates(changed, 5, 12) == expected[5:]
    assert changed.state_dict()["hyperparameters"] == state["hyperparameters"]


def test_the_codes_rate_is_scaled_by_the_schedule() -> None:
    """Taking the code's rate and settings goes on as if the schedule had had them from the beginning."""
    state = saved_after(build(scheduler=lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5)), 5)
    changed = build(lr=0.01, scheduler=lambda o: lr_scheduler.StepLR(o, 3, gamma=0.1))
    changed.load_state_dict(state, on_mismatch={"optimizer": "code", "hooks.LRScheduler": "code"})
    # Steps 0 to 5 had one halving; from step 6 on the code's factor counts.
    assert rates(changed, 5, 10) == pytest.approx([0.005, 0.0005, 0.0005, 0.0005, 0.00005])
    assert changed.restored_grade == "position only"
    assert changed.state_dict()["hyperparameters"]["optimizer.param_groups.0.lr"] == 0.01


def test_a_scheduler_that_computes_from_base_rates_takes_the_codes_rate() -> None:
    """LambdaLR computes from `base_lrs`, which follow the optimizer's rate; a later resume has nothing to decide."""
    state = saved_after(build(scheduler=lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step)), 5)

    def build_changed() -> SimpleTrainer:
        return build(lr=0.01, scheduler=lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step))

    changed = build_changed()
    changed.load_state_dict(state, on_mismatch="optimizer.lr=code")
    assert rates(changed, 5, 9) == pytest.approx([0.01 * 0.9**step for step in range(5, 9)])
    again = build_changed()
    again.load_state_dict(through_a_file(changed.state_dict()))
    assert rates(again, 9, 11) == pytest.approx([0.01 * 0.9**step for step in range(9, 11)])


def test_settings_inside_a_chain_of_schedulers_are_compared_too() -> None:
    """SequentialLR holds others; theirs are named by their place, and can be taken."""

    def chain(factor: float) -> Any:
        return lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.StepLR(o, 2, gamma=factor)], milestones=[3]
        )

    state = saved_after(build(scheduler=chain(0.5)), 4)
    changed = build(scheduler=chain(0.1))
    with pytest.raises(StateMismatch, match=r"hooks\.LRScheduler\.1\.gamma \(saved 0\.5, code 0\.1\)"):
        changed.load_state_dict(state)
    changed.load_state_dict(state, on_mismatch={"hooks": {"LRScheduler": "code"}})
    assert rates(changed, 4, 7) == pytest.approx([0.1, 0.01, 0.01])


def test_milestones_can_be_taken_from_the_code() -> None:
    """MultiStepLR keeps them in a form of its own."""
    state = saved_after(build(scheduler=lambda o: lr_scheduler.MultiStepLR(o, [6], gamma=0.5)), 4)
    changed = build(scheduler=lambda o: lr_scheduler.MultiStepLR(o, [5, 7], gamma=0.5))
    changed.load_state_dict(state, on_mismatch="code")
    assert rates(changed, 4, 9) == pytest.approx([0.1, 0.05, 0.05, 0.025, 0.025])


def test_every_option_of_every_group_is_compared() -> None:
    """Betas, weight decay, the implementation: whatever changes the update, tensors and tuples included."""

    def adam(lr: Any, **options: Any) -> SimpleTrainer:
        seed(1)
        model = Net()
        groups = [{"params": [model.first.weight]}, {"params": [model.first.bias], "weight_decay": 0.1}]
        return SimpleTrainer(model, batches(), torch.optim.AdamW(groups, lr=lr, **options))

    state = saved_after(adam(torch.tensor(0.1), betas=(0.8, 0.9), foreach=False), 3)
    changed = adam(torch.tensor(0.2), betas=(0.8, 0.99), foreach=None)
    with pytest.raises(StateMismatch) as refused:
        changed.load_state_dict(state)
    for place in ("0.lr", "1.lr", "0.betas", "1.betas", "0.foreach"):
        assert f"optimizer.param_groups.{place} (saved" in str(refused.value)
    changed.load_state_dict(state, on_mismatch={"optimizer.lr": "code", "optimizer.betas": "code", "default": "saved"})
    group = changed.optimizer.param_groups[1]
    assert (group["lr"].item(), group["betas"], group["foreach"]) == (pytest.approx(0.2), (0.8, 0.99), False)
    changed.train(3, 4)
    assert changed.optimizer.param_groups[1]["betas"] == (0.8, 0.99)


def test_settings_of_trainer_and_hooks_are_set() -> None:
    """Attributes that a trainer or a hook names as its settings follow the decision, too."""

    def noisy(scale: float, accumulate: int) -> tuple[SimpleTrainer, Noise]:
        trainer = build(gradient_accumulation_steps=accumulate)
        hook = Noise(scale)
        trainer.register_hooks([hook])
        return trainer, hook

    state = saved_after(noisy(0.5, 2)[0], 2)
    trainer, hook = noisy(0.1, 4)
    with pytest.raises(StateMismatch, match=r"trainer\.gradient_accumulation_steps \(saved 2, code 4\)"):
        trainer.load_state_dict(state)
    trainer.load_state_dict(state, on_mismatch={"default": "saved", "hooks.Noise.scale": "code"})
    assert (trainer.gradient_accumulation_steps, hook.scale) == (2, 0.1)


def test_a_hook_without_state_is_forgiven_one_that_is_asked_for_is_not() -> None:
    """What is missing on one side follows the item "hooks"; "saved" cannot be had there, so it refuses."""
    state = saved_after(build(), 2)
    bare = SimpleTrainer(Net(), batches(), torch.optim.SGD(Net().parameters(), lr=0.1, momentum=0.9))
    bare.optimizer = torch.optim.SGD(bare.model.parameters(), lr=0.1, momentum=0.9)
    for policy in ("error", "saved", {"optimizer": "warn"}):
        with pytest.raises(StateMismatch, match="saved state of the hook LRScheduler"):
            bare.load_state_dict(state, on_mismatch=policy)
    bare.load_state_dict(state, on_mismatch={"hooks": "warn"})


def test_a_misspelt_policy_is_taken_for_the_default() -> None:
    """Items and actions that there are not are refused with those that there are."""
    with pytest.raises(ValueError, match="knows no item 'optimiser'; there are optimizer, hooks"):
        OnMismatch.of({"optimiser": "code"})
    with pytest.raises(ValueError, match='on_mismatch is "error", "warn", "saved" or "code", not \'ignore\''):
        OnMismatch.of("ignore")
    with pytest.raises(ValueError, match="on_mismatch for hooks is"):
        OnMismatch.of("optimizer=code, hooks=ignore")


@pytest.mark.parametrize("text", ["error", "optimizer.lr=code, hooks=warn"])
def test_a_policy_reads_its_own_text(text: str) -> None:
    """Flags, messages and documents write it in one way."""
    assert str(OnMismatch.of(text)) == text
    assert OnMismatch.of(str(OnMismatch.of(text))) == OnMismatch.of(text)


def test_longer_names_go_first() -> None:
    """`environment` is never refused by a general "error"."""
    policy = OnMismatch.of({"optimizer": {"lr": "code"}, "hooks": "saved", "default": "error"})
    items = ("optimizer.lr", "optimizer.betas", "hooks.LRScheduler.T_max", "trainer.precision", "environment")
    assert [policy.action(item) for item in items] == ["code", "error", "saved", "error", "warn"]


def test_changed_switches_go_unnoticed(caplog: Any) -> None:
    """Determinism switches are recorded; a changed one is told at resume, lowers the grade, and can be refused."""
    state = saved_after(build(), 2)
    torch.use_deterministic_algorithms(True)
    try:
        told = build()
        told.load_state_dict(state)
        assert "deterministic_algorithms was False, is True" in caplog.text
        refused = build()
        with pytest.raises(StateMismatch, match="deterministic_algorithms"):
            refused.load_state_dict(state, on_mismatch={"environment": "error"})
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_a_scheduler_has_computed_stays_behind() -> None:
    """OneCycleLR and SequentialLR follow what they computed when they were built; the code's choice changes that."""

    def one_cycle(total: int) -> Any:
        return lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=total, cycle_momentum=False)

    state = saved_after(build(scheduler=one_cycle(10)), 4)
    longer = build(scheduler=one_cycle(20))
    longer.load_state_dict(state, on_mismatch={"hooks": "code"})
    expected = rates(build(scheduler=one_cycle(20)), 0, 12)
    # The rate of the next step is computed when a step ends, so that one is still the saved schedule's.
    assert rates(longer, 4, 12)[1:] == pytest.approx(expected[5:])

    def chain(milestone: int) -> Any:
        return lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, 0.5, 99), lr_scheduler.StepLR(o, 2, 0.5)], milestones=[milestone]
        )

    state = saved_after(build(scheduler=chain(6)), 4)
    with pytest.raises(StateMismatch, match=r"hooks\.LRScheduler\._milestones \(saved \[6\], code \[12\]\)"):
        build(scheduler=chain(12)).load_state_dict(state)


def test_the_same_number_is_told_as_a_change() -> None:
    """0 and 0.0 are one value, and so is a NaN with itself."""

    def make(decay: float, scale: float) -> SimpleTrainer:
        seed(1)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1, weight_decay=decay)
        trainer = SimpleTrainer(model, batches(), optimizer)
        trainer.register_hooks([Noise(scale)])
        return trainer

    state = through_a_file(make(0, float("nan")).state_dict())
    make(0.0, float("nan")).load_state_dict(state)
    with pytest.raises(StateMismatch, match="weight_decay"):
        make(0.1, float("nan")).load_state_dict(state)


def test_hooks_that_come_later_make_moved_options_look_built() -> None:
    """Registering a hook after a training adds its settings, and leaves what was captured before."""

    def make() -> SimpleTrainer:
        seed(1)
        model = Net()
        trainer = SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), lr=0.1))
        trainer.register_hooks([hooks.CallbackHook(after_step=lower)])
        return trainer

    def lower(trainer: Any) -> None:
        trainer.optimizer.param_groups[0]["lr"] *= 0.5

    trainer = make()
    trainer.train(0, 2)
    trainer.register_hooks([Noise(0.5)])
    trainer.train(2, 3)
    state = through_a_file(trainer.state_dict())
    resumed = make()
    resumed.register_hooks([Noise(0.5)])
    resumed.load_state_dict(state)
    assert state["hyperparameters"]["optimizer.param_groups.0.lr"] == 0.1
    assert "hooks.Noise.scale" in state["hyperparameters"]


def test_one_missing_hook_is_forgiven_and_no_other() -> None:
    """A hook's own name decides about it; what is decided as a whole takes no longer names."""
    state = saved_after(build(), 2)
    model = Net()
    bare = SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(StateMismatch, match="on_mismatch hooks=warn"):
        bare.load_state_dict(state, on_mismatch={"hooks.Other": "warn"})
    bare.load_state_dict(state, on_mismatch={"hooks.LRScheduler": "warn"})
    with pytest.raises(ValueError, match=r"decides about entries as a whole, not about 'entries\.model'"):
        OnMismatch.of({"entries": {"model": "warn"}})
