"""Checks of what trainers, hooks and writers are given; each message names the owner, the argument and the way out."""

import inspect
import operator
from collections.abc import Mapping
from typing import Any

import torch

from trainerd.trainer.optimizer_state import named_optimizers


def require_count(owner: str, name: str, value: Any, least: int = 1) -> None:
    """ValueError unless `value` is a whole number of at least `least`."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{owner}: {name} is {value!r}; it has to be a whole number of at least {least}.")


def iteration(name: str, value: Any) -> int:
    """Return a number of iterations, also of NumPy's kind, as an int; ValueError for what is none."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"train: {name} is {value!r}; iterations are counted from 0.")
    return number


def require_parts(owner: str, model: Any, data_loader: Any, optimizer: Any) -> None:
    """TypeError for what no training could begin with."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{owner}: model is {described(model)}, and has to be a torch.nn.Module.")
    if not (hasattr(data_loader, "__iter__") or hasattr(data_loader, "__getitem__")):
        raise TypeError(f"{owner}: data_loader is {described(data_loader)}, which cannot be iterated.")
    each = named_optimizers(optimizer)
    wrong = [one for one in each.values() if not (hasattr(one, "step") and hasattr(one, "zero_grad"))]
    if not each or wrong:
        found = described(wrong[0] if wrong else optimizer)
        raise TypeError(f"{owner}: optimizer is {found}, and has to be a torch optimizer, or a dict or list of them.")
    for one in each.values():
        closure = inspect.signature(one.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise TypeError(
                f"{owner}: {type(one).__qualname__} computes the loss several times in a step and needs a closure: "
                "derive from TrainerBase and write a run_step of your own."
            )


def described(value: Any) -> str:
    """Return a value in words, as messages show it."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(f'{key}: {described(one)}' for key, one in value.items()) or 'nothing in it'}"
    return "None" if value is None else f"an object of type {type(value).__qualname__}"
