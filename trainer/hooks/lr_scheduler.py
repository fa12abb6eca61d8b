"""Learning rates by any torch scheduler, resumed exactly."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from trainerd.trainer.hook_base import HookBase
from trainerd.trainer.plain_numbers import without_numpy

# What a scheduler's state holds beside its settings: where it stands.
_PROGRESS = {"last_epoch", "verbose", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "base_lrs"}
# What schedulers compute from their arguments when they are built, and follow instead of them.
_COMPUTED = {"_milestones", "_schedule_phases", "_anneal_func_type"}


class LRScheduler(HookBase):
    """Steps a torch scheduler after every iteration and writes the learning rate just used as a scalar.

    Args:
        optimizer: the one whose rate is written; the scheduler's own when left out.
        scheduler: a torch scheduler; `trainer.scheduler` when left out, which may be made as late as in another hook's
            `before_train`. `LRScheduler(scheduler)` works as well.
        metric: for ReduceLROnPlateau, the scalar it waits for; it steps in the iterations in which a new value of it
            has been put, such as those in which an EvalHook registered before this hook has run.
        scalar: the name under which the rate is written; give each hook another where there are several.
    """

    def __init__(
        self,
        optimizer: Optimizer | lr_scheduler.LRScheduler | None = None,
        scheduler: lr_scheduler.LRScheduler | None = None,
        *,
        metric: str = "",
        scalar: str = "lr",
    ) -> None:
        if isinstance(optimizer, lr_scheduler.LRScheduler):
            if scheduler is not None:
                raise TypeError("LRScheduler takes an optimizer and a scheduler, not two schedulers")
            optimizer, scheduler = None, optimizer
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise TypeError(f"LRScheduler takes a torch optimizer and a torch scheduler, not {optimizer!r}")
        self._optimizer = optimizer
        self._scheduler = _accepted(scheduler, metric)
        self._metric = metric
        self._metric_iteration = -1  # of the newest value that the scheduler has seen
        self._scalar = scalar
        self._shown_group = 0

    @property
    def scheduler(self) -> lr_scheduler.LRScheduler | None:
        """The scheduler, as soon as there is one."""
        return self._scheduler or _accepted(getattr(self.trainer, "scheduler", None), self._metric)

    def before_train(self) -> None:
        """Find the optimizer and the group whose rate is shown."""
        if self._optimizer is None:
            scheduler = self.scheduler
            self._optimizer = self.trainer.optimizer if scheduler is None else scheduler.optimizer  # type: ignore[attr-defined]
        self._shown_group = self.get_best_param_group_id(self._optimizer)

    def after_step(self) -> None:
        """Write the rate that this iteration used, then go on to the next one."""
        scheduler = self.scheduler
        if scheduler is None:
            raise RuntimeError("LRScheduler has no scheduler: pass one, or set trainer.scheduler before training")
        assert self._optimizer is not None
        rate = self._optimizer.param_groups[self._shown_group]["lr"]
        self.trainer.storage.put_scalar(self._scalar, rate, smoothing_hint=False)
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            self._step_on_plateau(scheduler)
        else:
            scheduler.step()

    def _step_on_plateau(self, scheduler: lr_scheduler.ReduceLROnPlateau) -> None:
        value, iteration = self.trainer.storage.latest().get(self._metric, (0.0, -1))
        if iteration > self._metric_iteration:
            self._metric_iteration = iteration
            scheduler.step(value)

    @staticmethod
    def get_best_param_group_id(optimizer: Optimizer) -> int:
        """Return the group that stands for all: the largest, or the commonest rate if each has one parameter."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if max(sizes) > 1:
            return sizes.index(max(sizes))
        # As they were built: rates that have moved would choose another group after a resume.
        rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        return rates.index(Counter(rates).most_common(1)[0][0])

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state; nothing as long as there is no scheduler."""
        scheduler = self.scheduler
        if scheduler is None:
            return {}
        seen = {"metric_iteration": self._metric_iteration} if self._metric else {}
        state: dict[str, Any] = without_numpy({**scheduler.state_dict(), **seen})
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scheduler's state; a scheduler that is still to be made gets it after `before_train`."""
        self._metric_iteration = state_dict.pop("metric_iteration", -1)
        scheduler = self.scheduler
        if scheduler is not None:
            scheduler.load_state_dict(state_dict)

    def hyperparameters(self) -> dict[str, Any]:
        """Return the scheduler's settings, as "T_max" or, of schedulers within it, "0.gamma"; and the class of each."""
        if self.scheduler is None:
            return {}
        classes = [type(scheduler).__qualname__ for scheduler in _all_of(self.scheduler)]
        return {**_settings(self.scheduler.state_dict()), "classes": classes}

    def take_rates(self) -> None:
        """Let the scheduler compute from the rates that the code gave the optimizer."""
        for scheduler in _all_of(self.scheduler) if self.scheduler is not None else ():
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [
                    group.get("initial_lr", group["lr"]) for group in scheduler.optimizer.param_groups
                ]

    def take_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Set the scheduler's settings."""
        if self.scheduler is None:
            return
        for name, value in values.items():
            *inner, attribute = name.split(".")
            scheduler = self.scheduler
            for index in inner:
                scheduler = scheduler._schedulers[int(index)]  # type: ignore[attr-defined]
            counted = isinstance(getattr(scheduler, attribute), Counter)  # the milestones of MultiStepLR
            setattr(scheduler, attribute, Counter(value) if counted else value)


def _settings(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    public = {name for name in state if name[0] != "_"} - _PROGRESS
    found = {prefix + name: value for name, value in state.items() if name in public | _COMPUTED}
    for name, value in found.items():
        if isinstance(value, Counter):
            found[name] = sorted(value.elements())
    for index, inner in enumerate(state.get("_schedulers", ())):
        found |= _settings(inner, f"{prefix}{index}.")
    return found


def _all_of(scheduler: lr_scheduler.LRScheduler) -> list[lr_scheduler.LRScheduler]:
    inner = getattr(scheduler, "_schedulers", ())
    return [scheduler, *(one for each in inner for one in _all_of(each))]


def _accepted(scheduler: Any, metric: str) -> lr_scheduler.LRScheduler | None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) and not metric:
        raise TypeError(
            "LRScheduler steps ReduceLROnPlateau by a metric: name the scalar, as in "
            'LRScheduler(scheduler, metric="validation/loss").'
        )
    if scheduler is None or isinstance(scheduler, lr_scheduler.LRScheduler):
        return scheduler
    raise TypeError(f"LRScheduler takes a torch scheduler, not {type(scheduler).__qualname__}")
