"""The usual step in automatic mixed precision, on any device that autocast knows."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trainerd.trainer.environment import device_of
from trainerd.trainer.events import get_event_storage
from trainerd.trainer.simple import Losses, Optimizers, SimpleTrainer


class AMPTrainer(SimpleTrainer):
    """Like SimpleTrainer, with the forward pass under autocast and the loss scaled for the backward pass.

    Args:
        model: on one device; DataParallel, and DistributedDataParallel over several devices, are refused.
        data_loader: as in SimpleTrainer.
        optimizer: as in SimpleTrainer.
        gather_metric_period: as in SimpleTrainer.
        zero_grad_before_forward: as in SimpleTrainer.
        grad_scaler: scales the loss; by default a `torch.amp.GradScaler` of the model's device, which only scales in
            float16, as bfloat16 has the range of float32. Its state belongs to the trainer's.
        precision: what autocast computes in, `torch.float16` or `torch.bfloat16`.
        log_grad_scaler: put the scale into the scalar "[metric]grad_scaler" at every iteration.
        async_write_metrics: as in SimpleTrainer.
        gradient_accumulation_steps: as in SimpleTrainer.

    Hooks see scaled gradients in `after_backward` until one calls `trainer.unscale_gradients()`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        data_loader: Iterable[Any],
        optimizer: Optimizers,
        gather_metric_period: int = 1,
        zero_grad_before_forward: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        precision: torch.dtype = torch.float16,
        log_grad_scaler: bool = False,
        async_write_metrics: bool = False,
        *,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        _refuse_replicas(model)
        super().__init__(
            model,
            data_loader,
            optimizer,
            gather_metric_period,
            zero_grad_before_forward,
            async_write_metrics,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )
        device = device_of(model)
        if precision not in (torch.float16, torch.bfloat16):
            raise ValueError(f"precision is {precision!r}; autocast computes in torch.float16 or torch.bfloat16.")
        if not torch.amp.is_autocast_available(device):
            raise ValueError(f"The model is on {device!r}, which autocast does not know: use SimpleTrainer there.")
        if grad_scaler is not None and not all(hasattr(grad_scaler, name) for name in ("scale", "step", "update")):
            raise TypeError(
                f"grad_scaler is {grad_scaler!r}; it has to be a torch.amp.GradScaler, or None for a new one."
            )
        self.precision = precision
        self._device_type = device
        self._scaler_is_given = grad_scaler is not None
        self.grad_scaler = grad_scaler or self._default_scaler()
        self.log_grad_scaler = log_grad_scaler
        self._unscaled = False

    def _default_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self._device_type, enabled=self.precision == torch.float16)

    def _forward(self, data: Any) -> tuple[torch.Tensor, Losses]:
        with torch.autocast(self._device_type, dtype=self.precision):
            return super()._forward(data)

    def _backward(self, losses: torch.Tensor) -> None:
        self.grad_scaler.scale(losses).backward()  # type: ignore[no-untyped-call]

    def load_state_dict(self, state_dict: Mapping[str, Any], **options: Any) -> None:
        """Load a state as SimpleTrainer does; a step that failed half-way is forgotten."""
        super().load_state_dict(state_dict, **options)
        self._unscaled = False
        # What the scaler remembers of a step until its `update`, which did not come.
        getattr(self.grad_scaler, "_per_optimizer_states", {}).clear()

    def unscale_gradients(self) -> None:
        """Divide the gradients by the scale; further calls in the same iteration do nothing."""
        if not self._unscaled:
            self._unscaled = True
            for optimizer in self._optimizers():
                self.grad_scaler.unscale_(optimizer)

    def _update_parameters(self) -> None:
        if self.log_grad_scaler:
            get_event_storage().put_scalar("[metric]grad_scaler", self.grad_scaler.get_scale())
        for optimizer in self._optimizers():
            self.grad_scaler.step(optimizer)
        self.grad_scaler.update()
        self._unscaled = False

    def hyperparameters(self) -> dict[str, Any]:
        """Return the precision, by name, beside SimpleTrainer's."""
        return {**super().hyperparameters(), "precision": str(self.precision).removeprefix("torch.")}

    def take_hyperparameters(self, values: Any) -> None:
        """Take the settings that were decided on at resume."""
        as_dtypes = {name: getattr(torch, value) if name == "precision" else value for name, value in values.items()}
        super().take_hyperparameters(as_dtypes)
        if not self._scaler_is_given and self.grad_scaler.is_enabled() != (self.precision == torch.float16):
            self.grad_scaler = self._default_scaler()  # its state is loaded once more when training begins


def _refuse_replicas(model: object) -> None:
    """TypeError for a model that is replicated over several devices by one process."""
    several = isinstance(model, DistributedDataParallel) and len(model.device_ids or [None]) > 1
    if isinstance(model, DataParallel) or several:
        raise TypeError(
            f"AMPTrainer cannot train a {type(model).__qualname__} over several devices, whose replicas would compute "
            "without autocast: use one process per device with DistributedDataParallel."
        )
