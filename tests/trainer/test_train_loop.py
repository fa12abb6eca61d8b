"""The loop of detectron2: order of calls, errors, and what train() promises before and after."""

import gc
import weakref
from typing import Any

import pytest
import torch
from support.trainers import StopAt, batches, seed, simple_trainer

from trainerd.trainer import hooks, late_metrics
from trainerd.trainer.base import HookBase, TrainerBase
from trainerd.trainer.errors import StateMismatch
from trainerd.trainer.simple import SimpleTrainer


@pytest.fixture(autouse=True)
def _every_device_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let metrics that may be written late be late here, as on a device that computes beside us."""
    monkeypatch.setattr(late_metrics, "must_wait", lambda _losses: True)


class Trace(HookBase):
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []


for _name in ("before_train", "after_train", "before_step", "after_backward", "after_step"):
    setattr(Trace, _name, lambda self, n=_name: self.calls.append((n, self.trainer.iter)))


class Fails(HookBase):
    def __init__(self, **errors: BaseException) -> None:
        for name, error in errors.items():
            setattr(self, name, lambda error=error: self._raise(error))

    def _raise(self, error: BaseException) -> None:
        raise error


def test_hooks_run_in_another_order_than_in_detectron2() -> None:
    """Hooks are called around every step, after_backward between backward and update, and iter ends at max_iter."""
    trace = Trace()
    trainer = simple_trainer()
    trainer.register_hooks([trace])
    trainer.train(0, 2)
    step = ["before_step", "after_backward", "after_step"]
    assert trace.calls == [
        ("before_train", 0),
        *((name, 0) for name in step),
        *((name, 1) for name in step),
        ("after_train", 2),
    ]
    assert (trainer.iter, trainer.step) == (2, 2)


def test_a_step_counts_before_it_is_done() -> None:
    """step counts finished iterations; a state taken in after_step already stands for this one."""
    seen = []

    class Looks(HookBase):
        def before_step(self) -> None:
            seen.append((self.trainer.step, self.trainer.state_dict()["step"]))

        def after_step(self) -> None:
            seen.append((self.trainer.step, self.trainer.state_dict()["step"]))

    trainer = simple_trainer()
    trainer.register_hooks([Looks()])
    trainer.train(3, 5)
    assert seen == [(3, 3), (3, 4), (4, 4), (4, 5)]


def test_a_second_train_call_fails() -> None:
    """train() works any number of times, with metrics written in a thread too, and the data goes on."""
    for asynchronous in (False, True):
        trainer = simple_trainer(async_write_metrics=asynchronous)
        for start in (0, 3, 6):
            trainer.train(start, start + 3)
            assert [i for _, i in trainer.storage.history("total_loss").values()] == list(range(start, start + 3))
        assert trainer.state_dict()["data"]["epoch"] == 1
        assert trainer.state_dict()["data"]["batches"] == 2


def test_nothing_to_do_counts_a_step() -> None:
    """A run that is finished already does nothing and stays where it is."""
    trainer = simple_trainer()
    trainer.train(5, 5)
    assert (trainer.iter, trainer.step) == (5, 5)
    trainer.train(5, 3)
    assert (trainer.iter, trainer.step) == (5, 5)


def test_steps_are_repeated_after_a_wrong_start() -> None:
    """A start that does not continue the loaded state is an error that names both numbers."""
    source = simple_trainer()
    source.train(0, 4)
    trainer = simple_trainer()
    trainer.load_state_dict(source.state_dict())
    with pytest.raises(ValueError, match=r"4 completed steps.*iteration 0.*train\(4, max_iter\)"):
        trainer.train(0, 6)
    trainer.train(4, 6)


def test_an_error_in_after_train_hides_the_first() -> None:
    """The first exception is the one that is raised; that of after_train is chained to it and noted on it."""
    trainer = simple_trainer()
    cause = KeyError("cause")
    first = ValueError("first")
    first.__cause__ = cause
    second = OSError("second")
    trainer.register_hooks([Fails(after_step=first, after_train=second)])
    with pytest.raises(ValueError, match="first") as caught:
        trainer.train(0, 2)
    assert caught.value.__context__ is second
    assert caught.value.__cause__ is cause
    assert caught.value.__notes__ == ["after_train failed as well: OSError: second"]
    assert (trainer.iter, trainer.step) == (0, 0)


def test_an_error_in_after_train_is_lost() -> None:
    """When training went well, an exception of after_train is raised."""
    trainer = simple_trainer()
    trainer.register_hooks([Fails(after_train=OSError("disk"))])
    with pytest.raises(OSError, match="disk"):
        trainer.train(0, 2)


def test_ctrl_c_is_swallowed() -> None:
    """KeyboardInterrupt ends training after after_train, wherever it comes."""
    for where in ("before_train", "after_step", "after_train"):
        trainer, trace = simple_trainer(), Trace()
        trainer.register_hooks([trace, Fails(**{where: KeyboardInterrupt()})])
        with pytest.raises(KeyboardInterrupt):
            trainer.train(0, 2)
        assert trace.calls[-1][0] == "after_train"


def test_an_interrupt_in_after_train_loses_to_an_error() -> None:
    """A KeyboardInterrupt that comes while after_train runs after an error is raised, with the error chained."""
    trainer = simple_trainer()
    first = ValueError("first")
    trainer.register_hooks([Fails(after_step=first, after_train=KeyboardInterrupt())])
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.train(0, 2)
    assert caught.value.__context__ is first


def test_a_stop_is_taken_for_the_end() -> None:
    """A session that asks to stop ends training quietly, after all hooks, with iter short of max_iter."""
    trainer, trace = simple_trainer(), Trace()
    trainer.register_hooks([trace])
    trainer.session = StopAt(3)
    trainer.train(0, 9)
    assert trace.calls[-2:] == [("after_step", 2), ("after_train", 3)]
    assert (trainer.iter, trainer.step, trainer.max_iter) == (3, 3, 9)


def test_phases_are_not_marked() -> None:
    """Start, data, step, what a hook announces, and idle are told to the session with the completed steps."""

    class Evaluates(HookBase):
        def after_step(self) -> None:
            with self.trainer.phase("evaluation"):
                pass

    trainer = simple_trainer()
    trainer.session = session = StopAt(9)
    trainer.register_hooks([Evaluates()])
    trainer.train(4, 5)
    assert session.marks == [
        ("start", 4),
        ("data", 4),
        ("step", 4),
        ("evaluation", 4),
        ("step", 4),
        ("idle", 5),
    ]


def test_bad_numbers_train_on() -> None:
    """A loss that is not finite raises FloatingPointError with the iteration and every loss, before the update."""

    class Diverges(torch.nn.Linear):
        def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"good": super().forward(batch).mean(), "bad": self.weight.sum() * float("nan")}

    model = Diverges(4, 1)
    before = model.weight.detach().clone()
    trainer = SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(FloatingPointError, match=r"iteration 6: good=.*, bad=nan"):
        trainer.train(6, 8)
    assert torch.equal(model.weight, before)


def test_bad_numbers_go_unseen_in_late_metrics() -> None:
    """An error of metrics that are written late is raised in the training thread at the next step, or at the end."""

    class Broken(SimpleTrainer):
        @staticmethod
        def write_metrics(loss_dict: Any, data_time: float, cur_iter: int, prefix: str = "") -> None:
            raise FloatingPointError(f"not finite at {cur_iter}")

    for max_iter in (5, 1):
        seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0))
        trainer = Broken(_Mean(model), batches(), torch.optim.SGD(model.parameters(), lr=0.1), async_write_metrics=True)
        trace = Trace()
        trainer.register_hooks([trace])
        with pytest.raises(FloatingPointError, match="not finite at 0"):
            trainer.train(0, max_iter)
        assert trainer.step == 1
        assert trace.calls[-1][0] == "after_train"


class _Mean(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.inner(batch).mean()


def test_metrics_make_the_device_wait_every_step() -> None:
    """With gather_metric_period the losses are read only at its multiples; one tensor is total_loss alone."""
    model = _Mean(torch.nn.Linear(4, 1))
    trainer = SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), lr=0.1), gather_metric_period=3)
    trainer.train(0, 7)
    assert [i for _, i in trainer.storage.history("total_loss").values()] == [2, 5]
    assert set(trainer.storage.histories()) == {"total_loss", "data_time"}
    several = simple_trainer()
    several.train(0, 1)
    assert set(several.storage.histories()) == {"total_loss", "data_time", "fit", "noise"}


@pytest.mark.parametrize("early", [False, True])
def test_gradients_add_up(early: bool) -> None:
    """Gradients of the step before are cleared, at either place."""
    trainer = simple_trainer(zero_grad_before_forward=early)
    trainer.train(0, 3)
    assert trainer.optimizer.state[trainer.model.first.weight]["momentum_buffer"] is not None
    other = simple_trainer(zero_grad_before_forward=not early)
    other.train(0, 3)
    assert torch.equal(trainer.model.first.weight.grad, other.model.first.weight.grad)


def test_a_model_left_in_eval_mode_trains_wrongly() -> None:
    """A model that some hook left in eval mode is an error."""
    trainer = simple_trainer()
    trainer.model.eval()
    with pytest.raises(RuntimeError, match="eval mode"):
        trainer.train(0, 1)


def test_an_empty_loader_loops_forever() -> None:
    """A loader that gives nothing, or can be used only once, is an error with its name."""
    for loader in ([torch.zeros(6, 4)][:0] or iter([]), iter(batches(2))):
        trainer = simple_trainer(loader=loader)
        with pytest.raises(RuntimeError, match="iterator that can be used only once"):
            trainer.train(0, 5)


def test_a_replaced_loader_goes_on_in_the_middle() -> None:
    """reset_data_loader frees the old loader first, and begins the new one at its first batch."""

    class Loader(list[torch.Tensor]):
        pass

    loader = Loader(batches())
    alive = weakref.ref(loader)
    trainer = simple_trainer(loader=loader)
    del loader
    trainer.train(0, 3)

    def build() -> Any:
        assert alive() is None
        return batches(2)

    trainer.reset_data_loader(build)
    assert trainer.state_dict()["data"] == {"epoch": 0, "batches": 0}
    trainer.train(3, 4)
    assert trainer.state_dict()["data"]["batches"] == 1


def test_shorter_data_resumes_at_another_place() -> None:
    """Data that has become shorter than the saved position is refused."""
    source = simple_trainer()
    source.train(0, 6)
    trainer = simple_trainer(loader=batches(4))
    trainer.load_state_dict(source.state_dict())
    assert trainer.restored_grade == "position only"
    assert "list" in trainer.restored_reason
    with pytest.raises(StateMismatch, match="ended after 4 batches, but 6 of epoch 0"):
        trainer.train(6, 8)


def test_hooks_keep_their_trainer_alive() -> None:
    """With the garbage collector off, dropping the trainer frees it, hooks, scheduler and threads included."""
    trainer = simple_trainer(async_write_metrics=True)
    scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer)
    kept = Trace()
    trainer.register_hooks([kept, hooks.LRScheduler(scheduler)])
    trainer.train(0, 3)
    trainer.load_state_dict(trainer.state_dict())
    trainer.train(3, 5)
    alive = weakref.ref(trainer)
    gc.collect()
    gc.disable()
    try:
        del trainer
        assert alive() is None
        with pytest.raises(ReferenceError):
            _ = kept.trainer.iter
    finally:
        gc.enable()


def test_a_state_is_loaded_half_way_through_training() -> None:
    """Loading a state inside train() is refused."""

    class Loads(HookBase):
        def after_step(self) -> None:
            self.trainer.load_state_dict(self.trainer.state_dict())

    trainer = simple_trainer()
    trainer.register_hooks([Loads()])
    with pytest.raises(RuntimeError, match="while train"):
        trainer.train(0, 2)


def test_a_trainer_without_a_step_does_nothing() -> None:
    """A TrainerBase without run_step says so."""
    with pytest.raises(NotImplementedError, match="run_step"):
        TrainerBase().train(0, 1)


def test_reduce_on_plateau_is_stepped_without_its_metric() -> None:
    """ReduceLROnPlateau is refused, and so is what is no scheduler."""
    trainer = simple_trainer()
    with pytest.raises(TypeError, match="ReduceLROnPlateau"):
        hooks.LRScheduler(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer))
    with pytest.raises(TypeError, match="torch scheduler, not int"):
        hooks.LRScheduler(scheduler=3)  # type: ignore[arg-type]


def test_the_wrong_groups_rate_is_shown() -> None:
    """The rate shown is that of the largest group, or the commonest one among groups of one parameter."""
    p = [torch.nn.Parameter(torch.zeros(1)) for _ in range(4)]
    large = torch.optim.SGD([{"params": p[:1], "lr": 1.0}, {"params": p[1:], "lr": 2.0}])
    single = torch.optim.SGD([{"params": [q], "lr": lr} for q, lr in zip(p, (1.0, 3.0, 3.0, 2.0), strict=True)])
    assert hooks.LRScheduler.get_best_param_group_id(large) == 1
    assert hooks.LRScheduler.get_best_param_group_id(single) == 1


def test_metrics_on_the_cpu_come_late_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no device to wait for, so they are written at once."""
    monkeypatch.undo()
    trainer = simple_trainer(async_write_metrics=True)
    seen = []

    class Look(HookBase):
        def after_step(self) -> None:
            seen.append(self.trainer.storage.latest()["total_loss"][1])

    trainer.register_hooks([Look()])
    trainer.train(0, 3)
    assert seen == [0, 1, 2]
