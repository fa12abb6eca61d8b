"""The model and the optimizer take back exactly what was saved, or refuse it in words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.trainers import assert_same, batches, through_a_file
from torch import nn

from trainerd.trainer import model_state, optimizer_state
from trainerd.trainer.errors import StateMismatch
from trainerd.trainer.simple import SimpleTrainer


class Two(nn.Module):
    def __init__(self, names: str = "ab") -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            batch = layer(batch)
        return batch.square().mean()


def trained(model: nn.Module, order: Callable[[Any], Any] = list) -> SimpleTrainer:
    trainer = SimpleTrainer(model, batches(), torch.optim.Adam(order(model.parameters())))
    trainer.train(0, 2)
    return trainer


@pytest.mark.parametrize(
    ("names", "order"),
    [("ab", lambda p: list(p)[::-1]), ("ac", list), ("abc", list), ("a", list)],
    ids=["reordered", "renamed", "added", "removed"],
)
def test_moments_go_to_the_wrong_parameters(names: str, order: Callable[[Any], Any]) -> None:
    """Other parameters, or the same in another order, are refused with the saved and the present list."""
    saved = trained(Two("ab")).state_dict()["optimizer"]
    model = Two(names)
    optimizer = torch.optim.Adam(order(model.parameters()))
    with pytest.raises(StateMismatch) as caught:
        optimizer_state.check(optimizer, saved, model_state.parameter_names(model))
    assert "Saved: [a.weight, a.bias, b.weight, b.bias]" in str(caught.value)
    now = ", ".join(order([name for name, _ in model.named_parameters()]))
    assert f"Now: [{now}]" in str(caught.value)


def test_another_optimizers_state_is_taken() -> None:
    """State of SGD is refused by Adam, whose options it lacks."""
    model = Two()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    names = model_state.parameter_names(model)
    with pytest.raises(StateMismatch, match="betas"):
        optimizer_state.check(torch.optim.Adam(model.parameters()), optimizer_state.capture(sgd, names), names)


@pytest.mark.parametrize(("parameters", "moments"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_moments_are_cast_to_the_parameters_dtype(parameters: torch.dtype, moments: torch.dtype) -> None:
    """Moments of another dtype than their parameter keep it, and their bits; so does every other kind of state."""
    model = Two().to(parameters)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(parameter.shape).to(moments),
            "exp_avg_sq": torch.rand(parameter.shape).to(moments),
            "flags": torch.tensor([True, False]),
            "counts": torch.arange(3),
            "nested": {"name": "row", "pair": (torch.rand(2, dtype=torch.float64), None), "list": [1, "x"]},
            "nothing": None,
        }
    names = model_state.parameter_names(model)
    saved = through_a_file(optimizer_state.capture(optimizer, names))
    other = torch.optim.Adam(model.parameters())
    optimizer_state.check(other, saved, names)
    optimizer_state.load(other, saved)
    assert_same(optimizer_state.capture(other, names), saved)
    loaded = other.state[next(model.parameters())]["exp_avg"]
    assert loaded.data_ptr() != saved["state"][0]["exp_avg"].data_ptr()


def test_a_resumed_optimizer_takes_no_further_group() -> None:
    """Names are in the state only: the optimizer stays as it was built."""
    model = Two()
    saved = trained(model).state_dict()["optimizer"]
    optimizer = torch.optim.Adam(model.parameters())
    optimizer_state.load(optimizer, saved)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert "param_names" not in optimizer.param_groups[0]


def test_the_optimizers_own_names_hide_a_wrapper() -> None:
    """An optimizer built with names of a wrapped model is matched by the model's own, and keeps its names."""
    wrapped = nn.DataParallel(Two())
    optimizer = torch.optim.Adam(wrapped.named_parameters())
    saved = optimizer_state.capture(optimizer, model_state.parameter_names(wrapped))
    assert saved["param_groups"][0]["param_names"][0] == "a.weight"
    bare = Two()
    optimizer_state.check(torch.optim.Adam(bare.parameters()), saved, model_state.parameter_names(bare))
    optimizer_state.load(optimizer, saved)
    assert optimizer.param_groups[0]["param_names"][0] == "module.a.weight"


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def wrapped_twice() -> nn.Module:
    model = Two()
    model.a = compiled(model.a)
    return nn.DataParallel(compiled(model))


@pytest.mark.parametrize("make", [wrapped_twice, lambda: nn.DataParallel(Two()), lambda: compiled(Two())])
def test_a_wrapper_changes_the_names_in_the_file(make: Callable[[], nn.Module]) -> None:
    """A wrapped model saves under its bare names, and loads what a bare one saved, at any nesting."""
    bare, wrapped = Two(), make()
    assert list(model_state.capture(wrapped)) == list(bare.state_dict())
    wrapped.load_state_dict(model_state.fit(wrapped, bare.state_dict()))
    assert_same(model_state.capture(wrapped), model_state.capture(bare))
    assert set(model_state.parameter_names(wrapped).values()) == {name for name, _ in bare.named_parameters()}


def test_a_file_with_wrapped_names_does_not_load() -> None:
    """Names that another program saved with wrappers in them are found."""
    bare = Two()
    saved = {f"module._orig_mod.{name}": value for name, value in bare.state_dict().items()}
    assert list(model_state.fit(Two(), saved)) == list(bare.state_dict())


def test_a_submodule_called_module_loses_its_name() -> None:
    """Only wrappers are cut: a user's own attribute of that name stays."""
    model = nn.Module()
    model.module = nn.Linear(1, 1)
    assert list(model_state.capture(model)) == ["module.weight", "module.bias"]


def test_a_model_that_does_not_fit_is_half_loaded() -> None:
    """Everything that does not fit is listed, and nothing is touched."""
    saved = Two("abd").state_dict()
    saved["a.weight"] = saved["a.weight"][:2]
    saved["b.bias"] = saved["b.bias"].double()
    trainer = SimpleTrainer(Two("abc"), batches(), torch.optim.SGD(Two().parameters(), lr=0.1))
    state = through_a_file(trainer.state_dict())
    with pytest.raises(StateMismatch) as caught:
        trainer.load_state_dict(state | {"model": saved})
    text = str(caught.value)
    for part in (
        "missing in the saved state: c.bias, c.weight",
        "unknown to this model: d.bias, d.weight",
        "a.weight (saved (2, 4), now (4, 4))",
        "b.bias (saved torch.float64, now torch.float32)",
    ):
        assert part in text
    assert_same(trainer.state_dict()["model"], state["model"])


def test_tied_weights_come_apart() -> None:
    """Tied weights are one tensor after a resume."""
    model = Two()
    model.b.weight = model.a.weight
    trainer = trained(model)
    state = through_a_file(trainer.state_dict())
    other = Two()
    other.b.weight = other.a.weight
    resumed = SimpleTrainer(other, batches(), torch.optim.Adam(other.parameters()))
    resumed.load_state_dict(state)
    assert other.b.weight is other.a.weight
    assert_same(resumed.state_dict(), state)


def test_a_group_without_parameters_shifts_the_others() -> None:
    """It keeps its place and its options, and the moments of the groups after it their parameters."""

    def make() -> torch.optim.Optimizer:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(3)) for _ in range(2)]
        groups = [{"params": weights[:1]}, {"params": [], "lr": 0.5}, {"params": weights[1:], "momentum": 0.5}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    optimizer = make()
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.ones(3)
    optimizer.step()
    resumed = make()
    optimizer_state.check(resumed, optimizer_state.capture(optimizer, {}), {})
    optimizer_state.load(resumed, optimizer_state.capture(optimizer, {}))
    assert [group["lr"] for group in resumed.param_groups] == [0.1, 0.5, 0.1]
    assert [group["momentum"] for group in resumed.param_groups] == [0.9, 0.9, 0.5]
    assert all(len(resumed.state[group["params"][0]]) == 1 for group in resumed.param_groups if group["params"])
