"""A trainer that drives another one, as detectron2's DefaultTrainer does with its `_trainer`."""

import pytest
import torch
from support.trainers import assert_same, seed, through_a_file

from trainerd.trainer import HookBase, ResumableLoader, SimpleTrainer, TrainerBase


class Draws(HookBase):
    """Draws before each step, between the outer trainer's restore and the inner trainer's step."""

    def before_step(self):
        self.trainer.drawn = torch.rand(1)
        # A warm-up that sets the rate for this very step: the inner trainer must be whole before.
        self.trainer._trainer.optimizer.param_groups[0]["lr"] = 0.01 * (self.trainer.iter + 1)


class Outer(TrainerBase):
    def __init__(self, loader):
        super().__init__()
        seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3))
        self._trainer = SimpleTrainer(Loss(model), loader, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        self.register_hooks([Draws()])

    def run_step(self):
        self._trainer.iter = self.iter
        self._trainer.run_step()

    def state_dict(self):
        return super().state_dict() | {"_trainer": self._trainer.state_dict()}

    def load_state_dict(self, state_dict, **options):
        super().load_state_dict(state_dict, **options)
        self._trainer.load_state_dict(state_dict["_trainer"], **options)


class Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return (self.model(batch) - batch).square().mean()


LOADERS = {
    "resumable": lambda: ResumableLoader(DATA, batch_size=4, shuffle=True),
    "plain": lambda: torch.utils.data.DataLoader(DATA, batch_size=4, shuffle=True),
}
DATA = torch.randn(22, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", LOADERS)
def test_two_resumes_in_a_row_of_a_driven_trainer_change_nothing(kind):
    """The inner trainer never sees train(): its data position is put back all the same, and never saved stale."""
    undisturbed = Outer(LOADERS[kind]())
    undisturbed.train(0, 20)

    trainer = Outer(LOADERS[kind]())
    trainer.train(0, 4)
    for begin, end in ((4, 9), (9, 14), (14, 20)):
        saved = through_a_file(trainer.state_dict())
        trainer = Outer(LOADERS[kind]())
        trainer.load_state_dict(saved)
        assert trainer.restored_grade == {"resumable": "bitwise", "plain": "position only"}[kind]
        trainer.train(begin, end)
    one, other = undisturbed.state_dict(), trainer.state_dict()
    for key in ("model", "optimizer", "data"):
        assert_same(other["_trainer"][key], one["_trainer"][key], key)
    assert_same(other["rng"], one["rng"], "rng")
    assert_same(undisturbed.drawn, trainer.drawn)


def test_an_inner_trainer_that_was_not_loaded_does_not_lend_its_grade():
    """An outer trainer that forgets its inner one's state never claims an exact resume."""
    saved = Outer(LOADERS["resumable"]()).state_dict()
    outer = Outer(LOADERS["resumable"]())
    TrainerBase.load_state_dict(outer, saved)
    assert outer.restored_grade == "position only"


def test_a_broken_proof_of_a_driven_trainer_is_not_shown():
    """The grade that is shown is the inner trainer's, and falls with the fingerprints that the outer one saved."""
    trainer = Outer(LOADERS["resumable"]())
    trainer.train(0, 4)
    state = through_a_file(trainer.checkpoint_state())
    for broken in (False, True):
        if broken:
            state["fingerprints"]["parameters"] = "0" * 32
        resumed = Outer(LOADERS["resumable"]())
        resumed.load_state_dict(state)
        resumed.train(4, 5)
        assert resumed.restored_grade == ("position only" if broken else "bitwise")
        assert ("parameters and buffers" in resumed.restored_reason) == broken
