"""Several batches for one update, several optimizers in one step."""

from typing import Any

import pytest
import torch
from support.trainers import Recorder, StopAt, assert_same, seed, through_a_file

from trainerd.trainer.amp import AMPTrainer
from trainerd.trainer.data import ResumableLoader
from trainerd.trainer.errors import StateMismatch
from trainerd.trainer.simple import SimpleTrainer


class Mean(torch.nn.Module):
    """A mean loss without BatchNorm or dropout, so that two halves add up to the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 3)
        self.head = torch.nn.Linear(3, 1)

    def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.head(self.body(batch).tanh())
        return {"square": out.square().mean(), "plain": out.mean()}


DATA = torch.randn(48, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def build(batch_size: int, accumulate: int, kind: type[SimpleTrainer] = SimpleTrainer, **options: Any) -> Any:
    seed(1)
    model = Mean().double() if kind is SimpleTrainer else Mean()
    data = DATA if kind is SimpleTrainer else DATA.float()
    loader = ResumableLoader(data, batch_size, shuffle=True, seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return kind(model, loader, optimizer, gradient_accumulation_steps=accumulate, **options)


@pytest.mark.parametrize("before_forward", [False, True])
def test_micro_batches_do_not_add_up_to_the_batch(before_forward: bool) -> None:
    """Four batches of 4 give the update, and the losses, of one batch of 16; one iteration is one update."""
    whole, parts = build(16, 1), build(4, 4, zero_grad_before_forward=before_forward)
    recorders = Recorder(), Recorder()
    whole.register_hooks([recorders[0]])
    parts.register_hooks([recorders[1]])
    whole.train(0, 7)
    parts.train(0, 7)
    assert parts.step == 7
    for name, value in whole.model.state_dict().items():
        assert torch.allclose(parts.model.state_dict()[name], value, rtol=1e-12, atol=1e-12)
    assert [row[1] for row in recorders[1].rows] == pytest.approx([row[1] for row in recorders[0].rows], rel=1e-12)


@pytest.mark.parametrize("kind", [SimpleTrainer, AMPTrainer])
def test_a_save_falls_into_the_middle_of_an_update(kind: type[SimpleTrainer]) -> None:
    """The end of a step is the end of an update: resumed there, training ends with the same bits."""
    expected = build(4, 3, kind)
    expected.train(0, 9)
    trainer = build(4, 3, kind)
    for start, stop in ((0, 2), (2, 5)):
        trainer.session = StopAt(stop)
        trainer.train(start, 9)
        assert trainer.session.state["data"]["loader"]["batch"] == 3 * stop % 12
        state = trainer.session.state
        trainer = build(4, 3, kind)
        trainer.load_state_dict(state)
    trainer.train(5, 9)
    assert trainer.restored_grade == "bitwise"
    assert_same(through_a_file(trainer.state_dict()), through_a_file(expected.state_dict()))


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2"])
def test_a_count_that_is_none(value: Any) -> None:
    """Counts of batches and periods are whole numbers of at least 1."""
    model = Mean()
    for name in ("gradient_accumulation_steps", "gather_metric_period"):
        with pytest.raises(ValueError, match=f"{name} is .*whole number of at least 1"):
            SimpleTrainer(model, [DATA], torch.optim.SGD(model.parameters(), lr=0.1), **{name: value})


def several(order: tuple[str, ...] = ("body", "head"), as_list: bool = False) -> SimpleTrainer:
    seed(1)
    model = Mean()
    made = {
        "body": torch.optim.AdamW(model.body.parameters(), lr=0.01),
        "head": torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9),
    }
    optimizers: Any = [made[name] for name in order] if as_list else {name: made[name] for name in order}
    return SimpleTrainer(model, ResumableLoader(DATA.float(), 8, seed=2), optimizers)


@pytest.mark.parametrize("as_list", [False, True])
def test_a_second_optimizers_state_is_lost(as_list: bool) -> None:
    """All optimizers step, and each one's state comes back under its name."""
    expected = several(as_list=as_list)
    expected.train(0, 9)
    trainer = several(as_list=as_list)
    trainer.session = StopAt(4)
    trainer.train(0, 9)
    state = trainer.session.state
    assert list(state["optimizer"]) == (["0", "1"] if as_list else ["body", "head"])
    resumed = several(as_list=as_list)
    resumed.load_state_dict(state)
    resumed.train(4, 9)
    assert resumed.restored_grade == "bitwise"
    assert_same(through_a_file(resumed.state_dict()), through_a_file(expected.state_dict()))


def test_states_of_optimizers_are_swapped() -> None:
    """Names decide: another order of a dict is the same, other names or numbers are refused."""
    trainer = several()
    trainer.train(0, 2)
    state = through_a_file(trainer.state_dict())
    turned = several(("head", "body"))
    turned.load_state_dict(state)
    assert turned.optimizer["head"].state[turned.model.head.weight]["momentum_buffer"] is not None
    with pytest.raises(StateMismatch, match=r"has the optimizers body, head, this trainer has the optimizers 0, 1"):
        several(as_list=True).load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"has the optimizers body, head, this trainer has one optimizer"):
        build(8, 1).load_state_dict({**state, "model": build(8, 1).model.state_dict()}, on_mismatch="saved")
