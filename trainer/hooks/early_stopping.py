"""An end before max_iter, when a metric gets no better."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from trainerd.trainer.arguments import require_count
from trainerd.trainer.hook_base import HookBase

logger = logging.getLogger(__name__)


class EarlyStopping(HookBase):
    """Ends the training when a metric has not improved for `patience` evaluations.

    Everything that happens at the end happens then: the last save, evaluations, `after_train` with success. Register it
    after the hook that writes the metric. A run that was ended this way trains nothing more when it is started again,
    unless `patience` has been raised.

    Args:
        metric: the scalar to look at; each new value of it is an evaluation.
        patience: evaluations without improvement that end the training.
        mode: "min" or "max".
        min_delta: an improvement is a difference of more than this. NaN never improves.
    """

    def __init__(self, metric: str, patience: int, *, mode: str = "min", min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f'EarlyStopping: mode is "min" or "max", not {mode!r}.')
        require_count("EarlyStopping", "patience", patience)
        if not min_delta >= 0:
            raise ValueError(f"EarlyStopping: min_delta is {min_delta}; it is a distance, 0 or more.")
        self.metric = metric
        self.patience = patience
        self.mode = mode
        self.min_delta = min_delta
        self.best: float | None = None
        self.best_iteration = -1
        self._bad_evaluations = 0
        self._seen = -1  # the iteration of the newest value that was looked at

    def before_train(self) -> None:
        """End at once if patience was used up before."""
        self._stop_if_used_up()

    def after_step(self) -> None:
        """Look at the metric if there is a new value."""
        value, iteration = self.trainer.storage.latest().get(self.metric, (math.nan, self._seen))
        if iteration <= self._seen:
            return
        self._seen = iteration
        if self._improves(value):
            self.best, self.best_iteration, self._bad_evaluations = value, iteration, 0
        else:
            self._bad_evaluations += 1
            self._stop_if_used_up()

    def _improves(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        return value < self.best - self.min_delta if self.mode == "min" else value > self.best + self.min_delta

    def _stop_if_used_up(self) -> None:
        if self._bad_evaluations >= self.patience:
            best = "was never a number" if self.best is None else f"was best in iteration {self.best_iteration}"
            value = "" if self.best is None else f" ({self.best:.6g})"
            self.trainer.stop_early(f"{self.metric} {best}{value}, {self._bad_evaluations} evaluations ago")

    def after_train(self) -> None:
        """Tell if the metric never came."""
        if self._seen < 0 and self.trainer.iter == self.trainer.max_iter:
            logger.warning("no scalar %s was ever put, so nothing could end the training early", self.metric)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and how long ago it was."""
        return {
            "best": self.best,
            "best_iteration": self.best_iteration,
            "bad_evaluations": self._bad_evaluations,
            "seen": self._seen,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting from what `state_dict` returned."""
        self.best, self.best_iteration = state_dict["best"], state_dict["best_iteration"]
        self._bad_evaluations, self._seen = state_dict["bad_evaluations"], state_dict["seen"]

    def hyperparameters(self) -> dict[str, Any]:
        """Return what is looked at, and how; patience may be changed at will."""
        return {"metric": self.metric, "mode": self.mode, "min_delta": self.min_delta}
