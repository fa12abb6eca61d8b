"""Learning rates by any torch scheduler, resumed exactly."""

from collections import Counter
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from trainerd.trainer.base import HookBase


class LRScheduler(HookBase):
    """Steps a torch scheduler after every iteration and writes the learning rate just used as the scalar "lr".

    Args:
        optimizer: the one whose rate is written; the trainer's own when left out.
        scheduler: a torch scheduler; `trainer.scheduler` when left out, which may be made as late as in another hook's
            `before_train`. `LRScheduler(scheduler)` works as well.
    """

    def __init__(
        self,
        optimizer: Optimizer | lr_scheduler.LRScheduler | None = None,
        scheduler: lr_scheduler.LRScheduler | None = None,
    ) -> None:
        if isinstance(optimizer, lr_scheduler.LRScheduler):
            if scheduler is not None:
                raise TypeError("LRScheduler takes an optimizer and a scheduler, not two schedulers")
            optimizer, scheduler = None, optimizer
        self._optimizer = optimizer
        self._scheduler = _accepted(scheduler)
        self._shown_group = 0

    @property
    def scheduler(self) -> lr_scheduler.LRScheduler | None:
        """The scheduler, as soon as there is one."""
        return self._scheduler or _accepted(getattr(self.trainer, "scheduler", None))

    def before_train(self) -> None:
        """Find the optimizer and the group whose rate is shown."""
        if self._optimizer is None:
            self._optimizer = self.trainer.optimizer  # type: ignore[attr-defined]
        self._shown_group = self.get_best_param_group_id(self._optimizer)

    def after_step(self) -> None:
        """Write the rate that this iteration used, then go on to the next one."""
        scheduler = self.scheduler
        if scheduler is None:
            raise RuntimeError("LRScheduler has no scheduler: pass one, or set trainer.scheduler before training")
        assert self._optimizer is not None
        rate = self._optimizer.param_groups[self._shown_group]["lr"]
        self.trainer.storage.put_scalar("lr", rate, smoothing_hint=False)
        scheduler.step()

    @staticmethod
    def get_best_param_group_id(optimizer: Optimizer) -> int:
        """Return the group that stands for all: the largest, or the commonest rate if each has one parameter."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if max(sizes) > 1:
            return sizes.index(max(sizes))
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        return rates.index(Counter(rates).most_common(1)[0][0])

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state; nothing as long as there is no scheduler."""
        scheduler = self.scheduler
        return {} if scheduler is None else scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scheduler's state; a scheduler that is still to be made gets it after `before_train`."""
        scheduler = self.scheduler
        if scheduler is not None:
            scheduler.load_state_dict(state_dict)


def _accepted(scheduler: Any) -> lr_scheduler.LRScheduler | None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        raise TypeError(
            "LRScheduler cannot step ReduceLROnPlateau, which needs a metric at every step: step it in your own hook."
        )
    if scheduler is None or isinstance(scheduler, lr_scheduler.LRScheduler):
        return scheduler
    raise TypeError(f"LRScheduler takes a torch scheduler, not {type(scheduler).__qualname__}")
