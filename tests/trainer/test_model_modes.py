"""What a hook set in the model at some iteration is still set after a resume."""

import logging

import pytest
import torch
from support.trainers import assert_same, batches, seed, through_a_file

from trainerd.trainer import HookBase, SimpleTrainer, model_modes


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 4)

    def forward(self, batch):
        return (self.head(self.norm(self.body(batch))) - batch).square().mean()


class FreezeBodyAt(HookBase):
    def after_step(self):
        if self.trainer.iter == 3:
            self.trainer.model.body.requires_grad_(False)
            self.trainer.model.norm.eval()


def build():
    seed(2)
    model = Net()
    trainer = SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    trainer.register_hooks([FreezeBodyAt()])
    return trainer


def test_layers_frozen_by_a_hook_stay_frozen_after_a_resume(caplog):
    """Otherwise they would be trained again, and BatchNorm would update, without a word."""
    undisturbed = build()
    undisturbed.train(0, 10)
    trainer = build()
    trainer.train(0, 6)
    resumed = build()
    with caplog.at_level(logging.INFO, "trainerd"):
        resumed.load_state_dict(through_a_file(trainer.state_dict()))
    assert "body.weight frozen" in caplog.text
    assert "norm in evaluation mode" in caplog.text
    resumed.train(6, 10)
    assert_same(resumed.state_dict(), undisturbed.state_dict())


def test_layers_thawed_by_a_hook_stay_thawed():
    """The other direction: the code freezes at the beginning, the state was saved after the thaw."""
    saved = model_modes.capture(Net())
    model = Net()
    model.body.requires_grad_(False)
    model.eval()
    assert len(model_modes.restore(model, saved)) == 6
    assert model_modes.capture(model) == {"frozen": [], "evaluating": []}
    assert model_modes.restore(model, saved) == []


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_names_do_not_depend_on_wrappers(wrap):
    """A state saved with a wrapper sets the bare model, and the other way round."""
    model = Net()
    model.norm.eval()
    model.head.bias.requires_grad_(False)
    bare = model_modes.capture(model)
    assert bare == {"frozen": ["head.bias"], "evaluating": ["norm"]}
    assert model_modes.capture(wrap(model)) == bare
    other = wrap(Net())
    assert sorted(model_modes.restore(other, bare)) == ["head.bias frozen", "norm in evaluation mode"]
