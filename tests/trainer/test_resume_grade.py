"""How exactly a resume continues is said, with the reason, and never better than it is."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.trainers import Net, StopAt, assert_same, batches, simple_trainer, through_a_file

from trainerd.trainer.data import ResumableLoader
from trainerd.trainer.errors import StateMismatch
from trainerd.trainer.hooks import LRScheduler
from trainerd.trainer.simple import SimpleTrainer


class OwnState:
    """A loader that saves itself as torchdata's does: after the last batch it stands at the end of its epoch."""

    def __init__(self, count: int = 7) -> None:
        self.data = batches(count)
        self.position = 0
        self.resumed = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        torch.rand(1)
        if not self.resumed:
            self.position = 0
        self.resumed = False
        return self._rest()

    def _rest(self) -> Iterator[torch.Tensor]:
        while self.position < len(self.data):
            self.position += 1
            yield self.data[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        if state_dict["position"] > len(self.data):
            raise IndexError("beyond the end")
        self.position = state_dict.pop("position")
        self.resumed = True


class Promising(OwnState):
    def resume_grade(self) -> tuple[str, str]:
        return "bitwise", ""


def resumable() -> ResumableLoader:
    return ResumableLoader(torch.cat(batches()), batch_size=6)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [1, 3, 7, 8, 14])
@pytest.mark.parametrize("loader", [OwnState, Promising, resumable])
def test_a_loader_with_its_own_state_repeats_batches(loader: Any, step: int) -> None:
    """A loader that saves itself continues exactly, in an epoch and at its very end."""
    expected = simple_trainer(loader=loader())
    expected.train(0, 17)
    first = simple_trainer(loader=loader())
    first.session = StopAt(step)
    first.train(0, 17)
    second = simple_trainer(loader=loader())
    second.load_state_dict(first.session.state)
    second.train(step, 17)
    assert_same(second.state_dict(), expected.state_dict())


@pytest.mark.parametrize(
    ("loader", "grade", "reason"),
    [
        (resumable, "bitwise", ""),
        (Promising, "bitwise", ""),
        (OwnState, "same data", "OwnState.*doesn't say"),
        (batches, "position only", "list.*no state_dict"),
    ],
)
def test_a_resume_claims_too_much(loader: Any, grade: str, reason: str) -> None:
    """The grade is what the loader promises, and the reason names the loader."""
    trainer = simple_trainer(loader=loader())
    trainer.load_state_dict(through_a_file(trainer.state_dict()))
    assert trainer.restored_grade == grade
    assert (trainer.restored_reason == "") == (reason == "")
    assert re.search(reason, trainer.restored_reason)


def test_lost_random_numbers_count_as_bitwise() -> None:
    """Without random numbers in the state a resume is not bitwise."""
    trainer = simple_trainer(loader=resumable())
    state = trainer.state_dict()
    del state["rng"]
    trainer.load_state_dict(state)
    assert trainer.restored_grade == "same data"
    assert "random" in trainer.restored_reason


@pytest.mark.parametrize(("saved", "now"), [(resumable, batches), (batches, resumable)])
def test_another_kind_of_loader_starts_over_in_silence(saved: Any, now: Any) -> None:
    """A loader of another kind than the saved one is refused, or begins anew with a warning and says so."""
    state = simple_trainer(loader=saved()).state_dict()
    trainer = simple_trainer(loader=now())
    with pytest.raises(StateMismatch, match="data loader"):
        trainer.load_state_dict(state)
    trainer.load_state_dict(state, on_mismatch="warn")
    assert trainer.restored_grade == "position only"
    assert "starts over" in trainer.restored_reason
    trainer.train(0, 2)


def test_a_loader_that_refuses_its_position_fails_in_the_middle_of_training() -> None:
    """A loader that cannot take its position back is named when the state is loaded."""
    first = simple_trainer(loader=OwnState())
    first.train(0, 6)
    with pytest.raises(StateMismatch, match=r"OwnState.*IndexError: beyond the end"):
        simple_trainer(loader=OwnState(3)).load_state_dict(first.state_dict())


class TwoOptimizers(SimpleTrainer):
    def __init__(self, *args):
        super().__init__(*args)
        self.critic = torch.nn.Linear(2, 2)
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        self.alias = self.model
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.register_hooks([LRScheduler()])
        self.nets = [torch.nn.Linear(1, 1)]
        self.loss = torch.nn.MSELoss()

    def run_step(self):
        super().run_step()


class WithItsOwnState(TwoOptimizers):
    def state_dict(self):
        return super().state_dict() | {"critic": self.critic.state_dict()}


def test_a_second_optimizer_is_not_left_out_silently(caplog):
    """Told before the first step, and at resume: what is no attribute `model` or `optimizer` needs a state_dict."""

    def build(kind):
        trainer = simple_trainer()
        return kind(trainer.model, trainer.data_loader, trainer.optimizer)

    trainer = build(TwoOptimizers)
    trainer.train(0, 2)
    assert "critic (Linear), critic_optimizer (SGD), nets[0] (Linear) will not be saved" in caplog.text
    resumed = build(TwoOptimizers)
    resumed.load_state_dict(trainer.state_dict())
    assert (resumed.restored_grade, "critic_optimizer" in resumed.restored_reason) == ("position only", True)

    caplog.clear()
    build(WithItsOwnState).train(0, 2)
    assert not caplog.records


class Alone(SimpleTrainer):
    """Saves and loads in its own way, without asking the base class."""

    def state_dict(self):
        return {"step": 3, "model": self.model.state_dict()}

    def load_state_dict(self, state, **options):
        self.model.load_state_dict(state["model"])


def test_a_trainer_that_loads_without_the_base_class_is_never_called_bitwise():
    """Its data position, random numbers and hooks are gone."""
    trainer = simple_trainer()
    alone = Alone(trainer.model, trainer.data_loader, trainer.optimizer)
    alone.load_state_dict(alone.state_dict())
    assert alone.restored_grade == "position only"
    assert "Alone" in alone.restored_reason


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own, when it imports inductor
@pytest.mark.parametrize(
    ("options", "grade"),
    [
        ({"backend": "aot_eager"}, "bitwise"),
        ({"dynamic": False}, "bitwise"),
        ({}, "same data"),
        ({"dynamic": True}, "same data"),
        (None, "same data"),
    ],
)
def test_kernels_that_depend_on_what_came_first_are_called_bitwise(options: dict[str, Any] | None, grade: str) -> None:
    """Inductor's kernels for dynamic shapes depend on the shapes met before, which a resumed process has not met."""

    def compiled() -> SimpleTrainer:
        model: Any = Net()
        if options is None:
            model.compile()  # in place; compiles at its first call, which this test does without
        else:
            model = torch.compile(model, **options)
        return SimpleTrainer(model, ResumableLoader(torch.randn(8, 4), 2), torch.optim.SGD(model.parameters(), lr=0.1))

    state = through_a_file(compiled().state_dict())
    resumed = compiled()
    resumed.load_state_dict(state)
    assert (resumed.restored_grade, "dynamic=False" in resumed.restored_reason) == (grade, grade == "same data")
