"""Gradients kept in bounds before the update."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from trainerd.trainer.hook_base import HookBase
from trainerd.trainer.optimizer_state import named_optimizers


class GradientClip(HookBase):
    """Clips gradients between the backward pass and the update, and writes their norm as the scalar "grad_norm".

    Args:
        max_norm: scale all gradients down together so that their norm is at most this.
        norm_type: which norm, 2.0 by default, `inf` for the largest element.
        max_value: clip each element to [-max_value, max_value] instead.
        error_if_nonfinite: raise RuntimeError when the norm is NaN or infinite.
        parameters: whose gradients; when left out those that the trainer's optimizers update, or else its model's.
            Others are cleared by nobody, and may still hold what earlier iterations left.

    With an AMPTrainer the gradients are unscaled first. The norm stays on the device until metrics are written.
    """

    def __init__(
        self,
        max_norm: float | None = None,
        *,
        norm_type: float = 2.0,
        max_value: float | None = None,
        error_if_nonfinite: bool = False,
        parameters: Iterable[torch.Tensor] | None = None,
    ) -> None:
        if (max_norm is None) == (max_value is None):
            raise ValueError("GradientClip needs one of max_norm and max_value, and not both.")
        bound = max_norm if max_value is None else max_value
        if bound is not None and not bound > 0:
            raise ValueError(f"GradientClip clips to a bound above 0, not {bound}.")
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.max_value = max_value
        self._error_if_nonfinite = error_if_nonfinite
        self._parameters = None if parameters is None else list(parameters)

    def after_backward(self) -> None:
        """Clip; write the norm if metrics are written in this iteration."""
        trainer: Any = self.trainer
        trainer.unscale_gradients()
        parameters = self._parameters if self._parameters is not None else _optimized(trainer)
        if self.max_norm is None:
            assert self.max_value is not None
            clip_grad_value_(parameters, self.max_value)
            return
        norm = clip_grad_norm_(parameters, self.max_norm, self.norm_type, self._error_if_nonfinite)
        if (trainer.iter + 1) % getattr(trainer, "gather_metric_period", 1) == 0:
            trainer.storage.put_scalar("grad_norm", norm)

    def hyperparameters(self) -> dict[str, Any]:
        """Return the bounds."""
        return {"max_norm": self.max_norm, "norm_type": self.norm_type, "max_value": self.max_value}


def _optimized(trainer: Any) -> list[torch.Tensor]:
    groups = [
        group for one in named_optimizers(getattr(trainer, "optimizer", None)).values() for group in one.param_groups
    ]
    return [one for group in groups for one in group["params"]] or list(trainer.model.parameters())
