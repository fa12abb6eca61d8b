"""Hooks that ask for saves: every so many iterations, and whenever a metric is at its best."""

import contextlib
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trainerd.checkpoint.store import CheckpointStore
from trainerd.trainer.arguments import require_count
from trainerd.trainer.hook_base import HookBase
from trainerd.trainer.session import NULL_SESSION

if TYPE_CHECKING:
    from trainerd.trainer.base import TrainerBase

logger = logging.getLogger(__name__)


class Checkpointer(Protocol):
    """What fvcore's and detectron2's Checkpointer offer, and any object that can save under a name."""

    def save(self, name: str, **extra: Any) -> Any:
        """Save everything it holds, and `extra` beside it, under `name`."""


Target = Checkpointer | CheckpointStore | None


class PeriodicCheckpointer(HookBase):
    """Saves every `period` iterations and at the end, when all hooks have had their `after_step`.

    Args:
        checkpointer: a CheckpointStore with a term, which gets the trainer's whole state; or an object with fvcore's
            `save(name, **extra)`, called with `iteration`; or None: whoever watches over the trainer saves, which
            `trainerd run` does by itself at the intervals of its job, so there this adds to them.
        period: iterations between saves.
        max_iter: the iteration before which the last save falls due; the trainer's own when left out.
        max_to_keep: for fvcore's kind, so many of its files are kept, also across restarts.
        file_prefix: the names' first part, for fvcore's kind.
    """

    def __init__(
        self,
        checkpointer: Target = None,
        period: int = 1000,
        max_iter: int | None = None,
        max_to_keep: int | None = None,
        file_prefix: str = "model",
    ) -> None:
        require_count("PeriodicCheckpointer", "period", period)
        self._checkpointer = _accepted(checkpointer)
        if max_to_keep is not None:
            require_count("PeriodicCheckpointer", "max_to_keep", max_to_keep)
            if not hasattr(checkpointer, "save_dir"):
                raise TypeError(
                    "PeriodicCheckpointer: max_to_keep deletes files in the checkpointer's save_dir, and "
                    f"{type(checkpointer).__qualname__} has none. A CheckpointStore keeps by the rules of its Keep, a "
                    "job by checkpoint.keep."
                )
        self._period = period
        self._max_iter = max_iter
        self._max_to_keep = max_to_keep
        self._file_prefix = file_prefix
        self._recent: list[str] = []

    def before_train(self) -> None:
        """Tell if nobody is there to save."""
        if self._checkpointer is None:
            _warn_if_alone(self)

    def after_step(self) -> None:
        """Ask for a save, if one is due, when all hooks are done: one of them may end the training here."""
        self.trainer.at_step_end(self._ask)

    def _ask(self, trainer: "TrainerBase") -> None:
        if trainer.step % self._period == 0 or self._is_last(trainer):
            _ask_for_save(trainer, self._checkpointer, self._save)

    def _is_last(self, trainer: "TrainerBase") -> bool:
        return trainer.step in (trainer.max_iter, self._max_iter)

    def _save(self, checkpointer: Checkpointer) -> None:
        iteration = self.trainer.iter
        last = self._is_last(self.trainer)
        name = f"{self._file_prefix}_final" if last else f"{self._file_prefix}_{iteration:07d}"
        if self._max_to_keep is not None and not last:
            self._recent.append(name)  # before the save, whose file then knows of itself
        with self.trainer.phase("save"):
            checkpointer.save(name, iteration=iteration)
        while self._max_to_keep is not None and len(self._recent) > self._max_to_keep:
            self._delete(checkpointer.save_dir, self._recent.pop(0))  # type: ignore[attr-defined]

    def _delete(self, folder: str, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, f"{name}.pth"))

    def state_dict(self) -> dict[str, Any]:
        """Return the names of files that are still to be counted against `max_to_keep`."""
        return {"recent": list(self._recent)} if self._recent else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting from the saved names."""
        self._recent = list(state_dict["recent"])


class BestCheckpointer(HookBase):
    """Saves whenever a metric is better than ever, and keeps that checkpoint, whatever the retention rules say.

    Which one is best is part of the state: after a resume a worse value overwrites nothing. NaN and infinite values
    never count. Register it after the EvalHook whose metric it reads.

    Args:
        eval_period: look every so many iterations, and at the end; 0: only at the end.
        checkpointer: as in PeriodicCheckpointer. In a CheckpointStore, and with None under `trainerd run`, the best
            step's checkpoint is pinned.
        val_metric: the scalar to look at.
        mode: "max" or "min".
        file_prefix: the file's name, for fvcore's kind.
    """

    def __init__(
        self,
        eval_period: int,
        checkpointer: Target = None,
        val_metric: str = "",
        mode: str = "max",
        file_prefix: str = "model_best",
    ) -> None:
        if mode not in ("max", "min"):
            raise ValueError(f'BestCheckpointer: mode is "max" or "min", not {mode!r}.')
        if not val_metric:
            raise ValueError("BestCheckpointer: val_metric must name the scalar to look at.")
        require_count("BestCheckpointer", "eval_period", eval_period, least=0)
        self._period = eval_period
        self._checkpointer = _accepted(checkpointer)
        self._metric = val_metric
        self._mode = mode
        self._file_prefix = file_prefix
        self.best: float | None = None
        self.best_step: int | None = None
        self._seen = -1  # the iteration of the newest value that was looked at

    @property
    def pinned_steps(self) -> tuple[int, ...]:
        """The best step, whose checkpoint has to stay."""
        return () if self.best_step is None else (self.best_step,)

    def before_train(self) -> None:
        """Tell if nobody is there to save."""
        if self._checkpointer is None:
            _warn_if_alone(self)

    def after_step(self) -> None:
        """Look at the metric, if it is time to, when all hooks are done, and ask for a save if it is the best."""
        self.trainer.at_step_end(self._look)

    def _look(self, trainer: "TrainerBase") -> None:
        due = trainer.step >= trainer.max_iter or (self._period > 0 and trainer.step % self._period == 0)
        if due and self._is_best():
            _ask_for_save(trainer, self._checkpointer, self._save)

    def _is_best(self) -> bool:
        value, iteration = self.trainer.storage.latest().get(self._metric, (math.nan, self._seen))
        if iteration <= self._seen:
            return False
        self._seen = iteration
        if not math.isfinite(value):
            logger.warning("%s is %s at iteration %d: it cannot be the best", self._metric, value, iteration)
            return False
        if self.best is not None and (value <= self.best if self._mode == "max" else value >= self.best):
            return False
        self.best, self.best_step = value, self.trainer.iter + 1
        logger.info("%s is %.6g after step %d, the best so far", self._metric, value, self.best_step)
        return True

    def _save(self, checkpointer: Checkpointer) -> None:
        with self.trainer.phase("save"):
            checkpointer.save(self._file_prefix, iteration=self.trainer.iter)

    def after_train(self) -> None:
        """Tell if the metric never came."""
        if self._seen < 0 and self.trainer.iter == self.trainer.max_iter:
            logger.warning("no scalar %s was ever put, so no checkpoint is the best", self._metric)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its step, and how far the metric was read."""
        return {"best": self.best, "best_step": self.best_step, "seen": self._seen}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.best, self.best_step = state_dict["best"], state_dict["best_step"]
        self._seen = state_dict["seen"]

    def hyperparameters(self) -> dict[str, Any]:
        """Return the metric and which end of it is good: with another one the saved best means nothing."""
        return {"_metric": self._metric, "_mode": self._mode}


def _accepted(checkpointer: Any) -> Target:
    if checkpointer is None or callable(getattr(checkpointer, "save", None)):
        return checkpointer  # type: ignore[no-any-return]
    raise TypeError(
        f"A checkpointer is a CheckpointStore, an object with save(name, **extra), or None; "
        f"{type(checkpointer).__qualname__} is none of these."
    )


@dataclass(frozen=True)
class _SaveInStore:
    """A value, so that two hooks that want the same step in the same store save it once."""

    store: CheckpointStore

    def __call__(self, trainer: "TrainerBase") -> None:
        with trainer.phase("save"):
            state = trainer.checkpoint_state()
            metrics = {name: value for name, (value, _) in trainer.storage.latest().items()}
            self.store.save(trainer.step, state, pinned=trainer.pinned_steps(), metrics=metrics)


def _ask_for_save(trainer: "TrainerBase", target: Target, save: Callable[[Checkpointer], None]) -> None:
    if target is None:
        trainer.request_save()
    elif isinstance(target, CheckpointStore):
        trainer.at_step_end(_SaveInStore(target))
    else:
        trainer.at_step_end(lambda _: save(target))


def _warn_if_alone(hook: HookBase) -> None:
    if hook.trainer.session is NULL_SESSION:
        logger.warning(
            "%s has no checkpointer and nobody watches over this trainer, so nothing will be saved: "
            "pass a checkpointer, or train under `trainerd run`",
            type(hook).__qualname__,
        )
