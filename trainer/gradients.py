"""Gradients that outlive a step: an iteration of the user's own may add up several before it uses them."""

from collections.abc import Mapping

import torch
from torch import nn

from trainerd.trainer.model_state import named_parameters


def capture(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the live gradients there are, by the parameters' names without wrappers."""
    return {name: parameter.grad for name, parameter in named_parameters(model) if parameter.grad is not None}


def restore(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Give every parameter a copy of its saved gradient, or none."""
    for name, parameter in named_parameters(model):
        parameter.grad = saved[name].to(parameter.device, copy=True) if name in saved else None
