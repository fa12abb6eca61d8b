"""Situations in which a resume once ended with other bits, and said nothing."""

import pytest
import torch
from support.trainers import assert_same, batches, seed, simple_trainer, through_a_file

from trainerd.trainer import HookBase, HookStateError, SimpleTrainer


class Accumulating(SimpleTrainer):
    """Two iterations for one update, as people write it."""

    def run_step(self):
        (self.model(next(self._data_loader_iter)) / 2).backward()
        if self.iter % 2:
            self.optimizer.step()
            self.optimizer.zero_grad()


class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, batch):
        return (self.layer(batch) - batch).square().mean()


def accumulating():
    seed(1)
    model = Loss()
    return Accumulating(model, batches(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@pytest.mark.parametrize("stop", [4, 5])
def test_gradients_that_wait_for_their_update_survive(stop):
    """Half of the next update is in them; where there are none, none appear."""
    undisturbed = accumulating()
    undisturbed.train(0, 9)
    trainer = accumulating()
    trainer.train(0, stop)
    resumed = accumulating()
    resumed.load_state_dict(through_a_file(trainer.state_dict()))
    resumed.train(stop, 9)
    assert_same(resumed.state_dict(), undisturbed.state_dict())


def test_gradients_nobody_needs_again_are_not_saved():
    """SimpleTrainer's own step clears them first: the checkpoint does not grow by the size of the model."""
    trainer = simple_trainer()
    trainer.train(0, 2)
    assert "gradients" not in trainer.state_dict()


class Holds(HookBase):
    def __init__(self, state):
        self.held = state

    def state_dict(self):
        return self.held

    def load_state_dict(self, state_dict):
        self.held = state_dict


@pytest.mark.parametrize("state", [0, 0.0, False, "", [], (), torch.zeros(2), torch.zeros(0)], ids=repr)
def test_a_state_that_is_false_is_a_state(state):
    """A counter that arrived at zero is not a counter that was never saved."""
    trainer, resumed = simple_trainer(), simple_trainer()
    trainer.register_hooks([Holds(state)])
    resumed.register_hooks([Holds("fresh")])
    resumed.load_state_dict(through_a_file(trainer.state_dict()))
    assert_same(resumed._hooks[0].held, state)


@pytest.mark.parametrize("nothing", [None, {}])
def test_nothing_to_save_is_no_state(nothing):
    """As in detectron2, an empty dict is none."""
    trainer = simple_trainer()
    trainer.register_hooks([Holds(nothing)])
    assert trainer.state_dict()["hooks"] == {}


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_hook_may_hold_what_cannot_be_deep_copied():
    """A compressed sparse tensor was saved for hours and refused at the first resume."""
    trainer, resumed = simple_trainer(), simple_trainer()
    trainer.register_hooks([Holds(torch.eye(3).to_sparse_csr())])
    resumed.register_hooks([Holds(None)])
    resumed.load_state_dict(trainer.state_dict())
    assert torch.equal(resumed._hooks[0].held.to_dense(), torch.eye(3))


class Versioned(torch.nn.Linear):
    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: torch.compile(model, backend="eager")])
def test_a_module_with_a_newer_version_does_not_migrate_its_own_state(wrap):
    """The version is part of what load_state_dict is told, below wrappers too."""

    def build():
        seed(4)
        model = wrap(torch.nn.Sequential(Versioned(2, 2)))
        return SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), lr=0.1))

    trainer, resumed = build(), build()
    resumed.load_state_dict(through_a_file(trainer.state_dict()))
    assert_same(resumed.state_dict()["model"], trainer.state_dict()["model"])


class Average(HookBase):
    """Builds in before_train what it loads into."""

    def before_train(self):
        self.average = torch.zeros(2)

    def after_step(self):
        self.average += self.trainer.iter

    def state_dict(self):
        return {"average": self.average} if hasattr(self, "average") else {}

    def load_state_dict(self, state_dict):
        self.average.copy_(state_dict["average"])


def test_a_hook_that_builds_in_before_train_is_loaded_after_it():
    """The first load may fail there, the last one may not."""
    trainer, resumed = simple_trainer(), simple_trainer()
    trainer.register_hooks([Average()])
    resumed.register_hooks([Average()])
    trainer.train(0, 4)
    resumed.load_state_dict(through_a_file(trainer.state_dict()))
    resumed.train(4, 6)
    assert resumed._hooks[0].average.tolist() == [15, 15]


class Broken(Average):
    def load_state_dict(self, state_dict):
        raise KeyError("gone")


def test_a_hook_that_fails_again_after_before_train_stops_the_resume():
    """Named, and before the first step."""
    trainer, resumed = simple_trainer(), simple_trainer()
    trainer.register_hooks([Broken()])
    resumed.register_hooks([Broken()])
    trainer.train(0, 4)
    resumed.load_state_dict(through_a_file(trainer.state_dict()))
    with pytest.raises(HookStateError, match="Broken"):
        resumed.train(4, 6)
    assert resumed.step == 4
