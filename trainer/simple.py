"""The usual step: one batch, one loss, one optimizer."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from trainerd.trainer.base import TrainerBase
from trainerd.trainer.data_position import DataPosition
from trainerd.trainer.events import get_event_storage

UNWRITTEN_METRICS = 16  # how far the asynchronous writer may fall behind before the training waits for it


class SimpleTrainer(TrainerBase):
    """Trains a model that returns its loss: a tensor, or a dict of tensors that are summed.

    Args:
        model: called with a batch; put into training mode here.
        data_loader: iterated epoch after epoch. See DataPosition for how each kind is resumed.
        optimizer: a torch optimizer.
        gather_metric_period: write metrics every so many iterations; only then the device is waited for.
        zero_grad_before_forward: clear gradients before the forward pass instead of before the backward pass.
        async_write_metrics: write metrics in a thread; its errors are raised in the training thread at the next step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        data_loader: Iterable[Any],
        optimizer: torch.optim.Optimizer,
        gather_metric_period: int = 1,
        zero_grad_before_forward: bool = False,
        async_write_metrics: bool = False,
    ) -> None:
        super().__init__()
        model.train()
        self.model = model
        self.data_loader = data_loader
        self.optimizer = optimizer
        self.gather_metric_period = gather_metric_period
        self.zero_grad_before_forward = zero_grad_before_forward
        self.async_write_metrics = async_write_metrics
        self._data: DataPosition = DataPosition(data_loader)
        self._executor: ThreadPoolExecutor | None = None
        self._unwritten: deque[Future[None]] = deque()

    def run_step(self) -> None:
        """Fetch a batch, compute the loss and its gradients, write metrics, update the model."""
        if not self.model.training:
            raise RuntimeError(
                f"The model is in eval mode at iteration {self.iter}: some hook called model.eval() and did not call "
                "model.train() afterwards."
            )
        if self._to_restore is not None:
            self._restore_as_driven()
        if self._unwritten:
            self._raise_writer_errors()
        self.mark("data")
        began = time.perf_counter()
        data = next(self._data)
        data_time = time.perf_counter() - began
        self.mark("step")

        if self.zero_grad_before_forward:
            self.optimizer.zero_grad()
        loss_dict = self.model(data)
        if isinstance(loss_dict, torch.Tensor):
            losses = loss_dict
            loss_dict = {"total_loss": loss_dict}
        else:
            losses = sum(loss_dict.values())
        if not self.zero_grad_before_forward:
            self.optimizer.zero_grad()
        losses.backward()  # type: ignore[no-untyped-call]
        self.after_backward()
        self._write_metrics(loss_dict, data_time)
        self.optimizer.step()

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
        if not self.async_write_metrics:
            self.write_metrics(loss_dict, data_time, self.iter, prefix)
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="write-metrics")
        losses = {name: loss.detach() for name, loss in loss_dict.items()}
        self._unwritten.append(self._executor.submit(self.write_metrics, losses, data_time, self.iter, prefix))
        if len(self._unwritten) > UNWRITTEN_METRICS:
            self._unwritten.popleft().result()

    @staticmethod
    def write_metrics(loss_dict: Mapping[str, torch.Tensor], data_time: float, cur_iter: int, prefix: str = "") -> None:
        """Put `data_time` (seconds), `total_loss` and each loss of a dict into the open EventStorage.

        FloatingPointError names the iteration and the losses when their sum is not finite.
        """
        losses = {name: loss.detach().item() for name, loss in loss_dict.items()}
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

    def _raise_writer_errors(self) -> None:
        while self._unwritten and self._unwritten[0].done():
            self._unwritten.popleft().result()

    def _finish_writing(self) -> None:
        while self._unwritten:
            self._unwritten.popleft().result()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, after waiting for metrics that are still being written."""
        self._finish_writing()
        return super().state_dict()

    def after_train(self) -> None:
        """Wait for the metrics that are still being written, then call every hook's `after_train`."""
        try:
            self._finish_writing()
        finally:
            self._unwritten.clear()
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None
            super().after_train()
