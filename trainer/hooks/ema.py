"""An exponential moving average of the weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainerd.trainer.arguments import require_count
from trainerd.trainer.hook_base import HookBase
from trainerd.trainer.model_state import named_buffers, named_parameters, shown


class EMA(HookBase):
    """Averages the model's parameters: after each update `average = decay * average + (1 - decay) * parameter`.

    Averages lie on the parameters' device, in their type, but in float32 for float16 and bfloat16, whose steps are too
    coarse to average in. Use them with `averaged()`; in the saved state they stand under the parameters' names.

    Args:
        decay: between 0 and 1.
        every: average after every so many iterations.
        warmup: begin with smaller decays, the n-th update's being min(decay, (1 + n) / (10 + n)), so that the first
            weights are soon forgotten.
        use_buffers: average floating-point buffers as well, such as BatchNorm's statistics; otherwise `averaged()`
            leaves buffers as they are.
    """

    def __init__(
        self, decay: float = 0.999, *, every: int = 1, warmup: bool = False, use_buffers: bool = False
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"EMA: decay is {decay}; it lies between 0 and 1, such as 0.999.")
        require_count("EMA", "every", every)
        self.decay = decay
        self.every = every
        self.warmup = warmup
        self.use_buffers = use_buffers
        self.updates = 0
        self._averages: dict[str, torch.Tensor] = {}

    def before_train(self) -> None:
        """Begin with the weights as they are, unless there are averages already."""
        if not self._averages:
            self._averages = {name: _widened(value.detach()) for name, value in self._values().items()}

    @torch.no_grad()
    def after_step(self) -> None:
        """Take the new weights into the averages."""
        if (self.trainer.iter + 1) % self.every:
            return
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        values = self._values()
        averages = list(self._averages.values())
        new = [values[name].detach().to(average.dtype) for name, average in self._averages.items()]
        torch._foreach_lerp_(averages, new, 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Put the averages into the model for the length of a `with`, then the weights back, bit for bit."""
        values = self._values()
        kept = {name: value.detach().clone() for name, value in values.items()}
        try:
            _fill(values, self._averages)
            yield self._model
        finally:
            _fill(values, kept)

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = self.trainer.model  # type: ignore[attr-defined]
        return model

    def _values(self) -> dict[str, torch.Tensor]:
        """What is averaged, by its name without wrappers; tied parameters once."""
        values: dict[str, torch.Tensor] = {
            name: parameter for name, parameter in named_parameters(self._model) if parameter.is_floating_point()
        }
        if self.use_buffers:
            values |= {name: buffer for name, buffer in named_buffers(self._model) if buffer.is_floating_point()}
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by name, live, and the number of updates; nothing before the first training."""
        return {"updates": self.updates, "averages": dict(self._averages)} if self._averages else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take saved averages to where the parameters are; ValueError if they are those of another model."""
        values, saved = self._values(), state_dict["averages"]
        differing = [name for name in {**values, **saved} if _shape(values, name) != _shape(saved, name)]
        if differing:
            raise ValueError(
                f"the saved averages and this model differ in {shown(sorted(differing))}: build the model they are of"
            )
        # In the order of the model: averages are updated in pairs with it.
        self._averages = {name: saved[name].to(value.device, copy=True) for name, value in values.items()}
        self.updates = state_dict["updates"]

    def hyperparameters(self) -> dict[str, Any]:
        """Return how it is averaged."""
        return {"decay": self.decay, "every": self.every, "warmup": self.warmup, "use_buffers": self.use_buffers}


def _shape(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None


def _widened(value: torch.Tensor) -> torch.Tensor:
    coarse = value.dtype in (torch.float16, torch.bfloat16)
    return value.to(torch.float32 if coarse else value.dtype, copy=True)


@torch.no_grad()
def _fill(values: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> None:
    for name, value in values.items():
        value.copy_(new[name])
