"""What a trainer cannot work with is refused in words, when it is given."""

from typing import Any

import numpy as np
import pytest
import torch
from support.trainers import Net, batches, simple_trainer

from trainerd.trainer import AMPTrainer, SimpleTrainer, StateMismatch


class Returns(torch.nn.Module):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.result = result

    def forward(self, batch: torch.Tensor) -> Any:
        return self.result(self.layer(batch)) if callable(self.result) else self.result


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (None, "None"),
        ({}, "a dict with nothing in it"),
        ({"a": 1.0}, "a dict with a: an object of type float"),
        (lambda out: [out.mean()], "an object of type list"),
        (lambda out: out, r"a tensor of shape \(6, 1\)"),
        (lambda out: {"a": out, "b": out.mean()}, r"a dict with a: a tensor of shape \(6, 1\)"),
    ],
)
def test_a_model_that_returns_no_loss_fails_somewhere_in_torch(result: Any, found: str) -> None:
    """The message says what it returned, at which iteration, and what it has to return."""
    model = Returns(result)
    trainer = SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=f"The model returned {found}.* at iteration 0; it has to return its loss"):
        trainer.train(0, 1)


def test_parts_that_are_none_fail_in_mid_step() -> None:
    """Model, loader, optimizer and scaler are looked at when the trainer is built."""
    model = Net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    for arguments, problem in (
        ((None, batches(), optimizer), "model is None"),
        ((model, None, optimizer), "data_loader is None, which cannot be iterated"),
        ((model, batches(), "sgd"), "optimizer is an object of type str"),
        ((model, batches(), {}), "optimizer is a dict with nothing in it"),
        ((model, batches(), [optimizer, None]), "optimizer is None"),
        ((model, batches(), torch.optim.LBFGS(model.parameters())), "LBFGS computes the loss several times"),
    ):
        with pytest.raises(TypeError, match=f"SimpleTrainer: {problem}"):
            SimpleTrainer(*arguments)
    with pytest.raises(TypeError, match=r"has to be a torch\.amp\.GradScaler"):
        AMPTrainer(model, batches(), optimizer, grad_scaler="big")  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [None, [1], {"model": {}}])
def test_what_is_no_state_is_taken_for_one(state: Any) -> None:
    """A trainer's state is known by its `iteration`."""
    with pytest.raises(StateMismatch, match="This is no state of a trainer"):
        simple_trainer().load_state_dict(state)


def test_iterations_that_are_no_numbers() -> None:
    """NumPy's integers are; texts and fractions are not."""
    trainer = simple_trainer()
    trainer.train(np.int64(0), np.int32(2))  # type: ignore[arg-type]
    assert (trainer.step, type(trainer.max_iter)) == (2, int)
    for value in ("5", 2.0, -1, None):
        with pytest.raises(ValueError, match=r"train: max_iter is .*; iterations are counted from 0"):
            trainer.train(0, value)  # type: ignore[arg-type]
