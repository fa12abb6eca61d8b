"""BatchNorm statistics over many batches, in place of the moving average that training leaves behind."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainerd.trainer import randomness
from trainerd.trainer.arguments import require_count
from trainerd.trainer.data_position import DataPosition
from trainerd.trainer.hook_base import HookBase

if TYPE_CHECKING:
    from trainerd.trainer.base import TrainerBase

logger = logging.getLogger(__name__)

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class PreciseBN(HookBase):
    """Computes the running mean and variance of BatchNorm layers anew, over `num_iter` batches of a loader.

    With n_b values per channel in batch b, their mean m_b and their biased variance v_b, and N the sum of all n_b:
    mean = sum(n_b * m_b) / N, variance = (sum(n_b * (v_b + m_b**2)) / N - mean**2) * N / (N - 1), which is the mean and
    the unbiased variance of all values together. See "Rethinking 'Batch' in BatchNorm" (Wu, Johnson, 2021), section 3.

    The model is called in training mode, without gradients; only the layers' running statistics change. Random numbers
    drawn meanwhile are put back. Where the loader stands belongs to the state.

    Args:
        period: iterations between computations; 0: only at the end, which has one in any case.
        model: the model to call with each batch; layers in evaluation mode or without statistics are left alone.
        data_loader: iterated without end, as a trainer does; not the loader that training uses.
        num_iter: batches to use each time.
    """

    def __init__(self, period: int, model: nn.Module, data_loader: Iterable[Any], num_iter: int) -> None:
        require_count("PreciseBN", "period", period, least=0)
        require_count("PreciseBN", "num_iter", num_iter)
        self._period = period
        self._model = model
        self._data = DataPosition(data_loader)
        self.num_iter = num_iter

    def after_step(self) -> None:
        """Compute the statistics if it is time to."""
        done = self.trainer.iter + 1
        if done >= self.trainer.max_iter or (self._period > 0 and done % self._period == 0):
            self._compute()
        else:
            self.trainer.at_step_end(self._compute_at_early_end)

    def _compute_at_early_end(self, trainer: "TrainerBase") -> None:
        if trainer.stopped_early:
            self._compute()

    def _compute(self) -> None:
        with self.trainer.phase("statistics"):
            self.update_stats()

    def update_stats(self) -> None:
        """Compute the statistics now."""
        layers = [one for one in self._model.modules() if isinstance(one, BATCH_NORMS) and _has_statistics(one)]
        if not layers:
            logger.warning("the model has no BatchNorm layer in training mode, so there are no statistics to compute")
            return
        sums = {layer: _Sums.of(layer) for layer in layers}
        streams = randomness.capture_raw()
        with torch.no_grad(), _observed(self._model, sums):
            for _ in range(self.num_iter):
                self._model(next(self._data))
        randomness.restore_raw(streams)
        for layer, found in sums.items():
            if found.count:  # a layer that the model does not use has seen nothing
                found.write(layer)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands."""
        return {"data": self._data.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the loader to where it stood."""
        self._data.load_state_dict(state_dict["data"])

    def hyperparameters(self) -> dict[str, Any]:
        """Return the number of batches."""
        return {"num_iter": self.num_iter}


@dataclass
class _Sums:
    """Sums per channel over all values seen, in float64."""

    count: int
    total: torch.Tensor
    squares: torch.Tensor

    @classmethod
    def of(cls, layer: Any) -> "_Sums":
        zeros = torch.zeros_like(layer.running_mean, dtype=torch.float64)
        return cls(0, zeros, zeros.clone())

    def see(self, values: torch.Tensor) -> None:
        per_channel = values.transpose(0, 1).flatten(1).double()
        self.count += per_channel.shape[1]
        self.total += per_channel.sum(1)
        self.squares += per_channel.square().sum(1)

    def write(self, layer: Any) -> None:
        mean = self.total / self.count
        variance = (self.squares / self.count - mean.square()).clamp_(min=0) * (self.count / max(self.count - 1, 1))
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(variance)


def _has_statistics(layer: Any) -> bool:
    return layer.training and layer.track_running_stats and layer.running_mean is not None


@contextmanager
def _observed(model: nn.Module, sums: Mapping[Any, _Sums]) -> Iterator[None]:
    """See what goes into the layers, and keep every buffer of the model as it is."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    handles = [
        layer.register_forward_hook(lambda _layer, inputs, _output, found=found: found.see(inputs[0]))
        for layer, found in sums.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for buffer, value in kept:
            buffer.copy_(value)
