"""The usual step: one batch or several, one loss, one update."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from trainerd.trainer import comm, late_metrics, resuming
from trainerd.trainer.arguments import described, require_count, require_parts
from trainerd.trainer.base import TrainerBase
from trainerd.trainer.data_position import DataPosition
from trainerd.trainer.events import get_event_storage
from trainerd.trainer.late_metrics import LateMetrics
from trainerd.trainer.optimizer_state import named_optimizers

Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | Sequence[torch.optim.Optimizer]
Losses = dict[str, torch.Tensor]


class SimpleTrainer(TrainerBase):
    """Trains a model that returns its loss: a tensor, or a dict of tensors that are summed.

    Args:
        model: called with a batch; put into training mode here.
        data_loader: iterated epoch after epoch. See DataPosition for how each kind is resumed.
        optimizer: a torch optimizer, or several, in a dict or a list, which then all step in every iteration.
        gather_metric_period: write metrics every so many iterations; only then the device is waited for.
        zero_grad_before_forward: clear gradients before the forward pass instead of before the backward pass.
        async_write_metrics: do not wait for the device: write metrics at a later iteration, when it has computed them;
            what goes wrong is raised then. On the CPU there is nothing to wait for.
        gradient_accumulation_steps: batches per iteration. Their gradients are averaged into one update, as of one
            batch with all their samples if they are equally large and the loss is a mean.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        data_loader: Iterable[Any],
        optimizer: Optimizers,
        gather_metric_period: int = 1,
        zero_grad_before_forward: bool = False,
        async_write_metrics: bool = False,
        *,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        super().__init__()
        require_parts(type(self).__qualname__, model, data_loader, optimizer)
        require_count(type(self).__qualname__, "gather_metric_period", gather_metric_period)
        require_count(type(self).__qualname__, "gradient_accumulation_steps", gradient_accumulation_steps)
        model.train()
        self.model = model
        self.data_loader = data_loader
        self.optimizer = optimizer
        self.gather_metric_period = gather_metric_period
        self.zero_grad_before_forward = zero_grad_before_forward
        self.async_write_metrics = async_write_metrics
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self._data: DataPosition = DataPosition(data_loader)
        self._late = LateMetrics()

    def run_step(self) -> None:
        """Fetch the data, compute loss and gradients, write metrics, update the model."""
        if not self.model.training:
            raise RuntimeError(
                f"The model is in eval mode at iteration {self.iter}: some hook called model.eval() and did not call "
                "model.train() afterwards."
            )
        if self._waiting is not None:
            resuming.put_back_as_driven(self)
        if self.async_write_metrics and self._late:
            self._late.write(self.write_metrics)
        if self.gradient_accumulation_steps > 1:
            loss_dict, data_time = self._accumulate_gradients(self.gradient_accumulation_steps)
        else:
            data, data_time = self._next_batch()
            if self.zero_grad_before_forward:
                self._zero_grad()
            losses, loss_dict = self._forward(data)
            if not self.zero_grad_before_forward:
                self._zero_grad()
            self._backward(losses)
        self.after_backward()
        self._write_metrics(loss_dict, data_time)
        self._update_parameters()

    def _accumulate_gradients(self, number: int) -> tuple[Losses, float]:
        """Average the gradients of several batches; return each loss's mean and the seconds spent waiting for data."""
        self._zero_grad()
        sums: Losses = {}
        data_time = 0.0
        for micro in range(number):
            data, seconds = self._next_batch()
            data_time += seconds
            with self._gradients_kept_local(last=micro == number - 1):
                losses, loss_dict = self._forward(data)
                self._backward(losses / number)
            for name, loss in loss_dict.items():
                sums[name] = sums[name] + loss.detach() if name in sums else loss.detach()
        return {name: total / number for name, total in sums.items()}, data_time

    def _next_batch(self) -> tuple[Any, float]:
        self.mark("data")
        began = time.perf_counter()
        data = next(self._data)
        seconds = time.perf_counter() - began
        self.mark("step")
        return data, seconds

    def _gradients_kept_local(self, *, last: bool) -> AbstractContextManager[None]:
        """Let DistributedDataParallel add gradients up over the ranks only once per iteration, with the last batch."""
        no_sync = None if last else getattr(self.model, "no_sync", None)
        return no_sync() if callable(no_sync) else nullcontext()

    def _forward(self, data: Any) -> tuple[torch.Tensor, Losses]:
        returned = self.model(data)
        loss_dict = {"total_loss": returned} if isinstance(returned, torch.Tensor) else returned
        try:
            first, *others = loss_dict.values()
            losses = sum(others, start=first) if others else first
        except (AttributeError, TypeError, ValueError):
            losses = None
        if not isinstance(losses, torch.Tensor) or losses.numel() != 1:
            raise TypeError(
                f"The model returned {described(returned)} at iteration {self.iter}; it has to return its loss, "
                "a tensor of one element, or a dict of such tensors."
            )
        return losses, loss_dict

    def _backward(self, losses: torch.Tensor) -> None:
        losses.backward()  # type: ignore[no-untyped-call]

    def _update_parameters(self) -> None:
        for optimizer in self._optimizers():
            optimizer.step()

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers():
            optimizer.zero_grad()

    def _optimizers(self) -> Iterable[torch.optim.Optimizer]:
        if isinstance(self.optimizer, torch.optim.Optimizer):
            return (self.optimizer,)
        return named_optimizers(self.optimizer).values()

    def hyperparameters(self) -> dict[str, Any]:
        """Return how many batches make up an iteration."""
        return {"gradient_accumulation_steps": self.gradient_accumulation_steps}

    @property
    def _data_loader_iter(self) -> Iterator[Any]:
        """The batches, without end; detectron2's name, which subclasses use in their own `run_step`."""
        return self._data

    def reset_data_loader(self, data_loader_builder: Callable[[], Iterable[Any]]) -> None:
        """Drop the data loader, then build another one and begin its first epoch."""
        del self.data_loader, self._data
        self.data_loader = data_loader_builder()
        self._data = DataPosition(self.data_loader)

    def _write_metrics(self, loss_dict: Mapping[str, torch.Tensor], data_time: float, prefix: str = "") -> None:
        if (self.iter + 1) % self.gather_metric_period:
            return
        if self.async_write_metrics and late_metrics.must_wait(loss_dict):
            self._late.add(loss_dict, data_time, self.iter, prefix)
        else:
            self.write_metrics(loss_dict, data_time, self.iter, prefix)

    @staticmethod
    def write_metrics(loss_dict: Mapping[str, torch.Tensor], data_time: float, cur_iter: int, prefix: str = "") -> None:
        """Put `data_time` (seconds), `total_loss` and each loss of a dict into the main process's open EventStorage.

        Of several ranks, each of which must call it, losses are averaged and `data_time` is the longest.
        FloatingPointError names the iteration and the losses when their sum is not finite.
        """
        losses = {name: loss.detach().item() for name, loss in loss_dict.items()}
        if comm.get_world_size() > 1:
            gathered = comm.gather((losses, data_time))
            if not gathered:
                return
            data_time = max(seconds for _, seconds in gathered)
            losses = {name: sum(each[name] for each, _ in gathered) / len(gathered) for name in losses}
        total = sum(losses.values())
        if not math.isfinite(total):
            each = ", ".join(f"{name}={value}" for name, value in losses.items())
            raise FloatingPointError(f"The loss is not finite at iteration {cur_iter}: {each}.")
        storage = get_event_storage()
        storage.put_scalar("data_time", data_time, cur_iter=cur_iter)
        storage.put_scalar(f"{prefix}total_loss", total, cur_iter=cur_iter)
        if len(losses) > 1:
            for name, value in losses.items():
                storage.put_scalar(name, value, cur_iter=cur_iter)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, the metrics that are still to be written included."""
        state = super().state_dict()
        if self._late:
            state["late_metrics"] = self._late.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], **options: Any) -> None:
        """Load a state as TrainerBase does, and the metrics that were still to be written."""
        super().load_state_dict(state_dict, **options)
        self._late.load_state_dict(state_dict.get("late_metrics", ()))

    def after_train(self) -> None:
        """Write the metrics that were put off, then call every hook's `after_train`."""
        try:
            self._late.write_all(self.write_metrics)
        finally:
            super().after_train()
