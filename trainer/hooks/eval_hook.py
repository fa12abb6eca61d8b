"""An evaluation every so many iterations."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainerd.trainer.arguments import require_count
from trainerd.trainer.hook_base import HookBase

if TYPE_CHECKING:
    from trainerd.trainer.base import TrainerBase


class EvalHook(HookBase):
    """Calls a function every `eval_period` iterations and at the end, and writes the numbers it returns.

    Args:
        eval_period: iterations between evaluations; 0: none in between.
        eval_function: called without arguments; returns None or a dict of numbers, which may be nested: they become
            scalars such as "validation/accuracy". It leaves the model in training mode.
        eval_after_train: evaluate after the last iteration, too. That happens in its `after_step`, so that the result
            is in the last saved state; it does not happen to a training that is interrupted.
    """

    def __init__(self, eval_period: int, eval_function: Callable[[], Any], eval_after_train: bool = True) -> None:
        require_count("EvalHook", "eval_period", eval_period, least=0)
        if not callable(eval_function):
            raise TypeError(f"EvalHook: eval_function is {eval_function!r}, which cannot be called.")
        self._period = eval_period
        self._function = eval_function
        self._after_train = eval_after_train
        self._evaluated_after = -1  # iterations

    def before_train(self) -> None:
        """Nothing is evaluated yet in this `train` call."""
        self._evaluated_after = -1

    def after_step(self) -> None:
        """Evaluate if it is time to."""
        done = self.trainer.iter + 1
        last = done >= self.trainer.max_iter
        if (last and self._after_train) or (not last and self._period > 0 and done % self._period == 0):
            self._evaluate(done)
        else:
            self.trainer.at_step_end(self._evaluate_early_end)

    def _evaluate_early_end(self, trainer: "TrainerBase") -> None:
        """Evaluate if a hook has ended the training in this step, so that the result is in the last state."""
        if trainer.stopped_early and self._after_train:
            self._evaluate(trainer.step)

    def after_train(self) -> None:
        """Evaluate a training that has reached its end some other way than through a step of this call."""
        trainer = self.trainer
        if self._after_train and trainer.iter == trainer.max_iter and self._evaluated_after != trainer.iter:
            self._evaluate(trainer.iter)

    def _evaluate(self, done: int) -> None:
        self._evaluated_after = done
        with self.trainer.phase("evaluation"):
            results = self._function()
        if results is None:
            return
        if not isinstance(results, Mapping):
            raise TypeError(f"eval_function returns a dict of numbers, or None, not {type(results).__qualname__}.")
        for name, value in _flat(results):
            self.trainer.storage.put_scalar(name, _number(name, value), smoothing_hint=False)


def _flat(results: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in results.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"eval_function returned {name} = {value!r}, a {type(value).__qualname__}; results are numbers, in dicts."
        ) from None
