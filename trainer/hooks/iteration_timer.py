"""How long an iteration takes."""

import logging
import time

from trainerd.trainer.arguments import require_count
from trainerd.trainer.hook_base import HookBase

logger = logging.getLogger(__name__)


class IterationTimer(HookBase):
    """Writes each iteration's seconds as the scalar "time", and logs the average at the end.

    Timed is what lies between this hook's `before_step` and its `after_step`: register it first to have the other hooks
    in it. Saves come after all hooks and are not in it. The first `warmup_iter` iterations of a `train` call are left
    out.
    """

    def __init__(self, warmup_iter: int = 3) -> None:
        require_count("IterationTimer", "warmup_iter", warmup_iter, least=0)
        self._warmup_iter = warmup_iter
        self._began = 0.0
        self._train_began = 0.0
        self._seconds = 0.0
        self._timed = 0

    def before_train(self) -> None:
        """Start counting afresh."""
        self._train_began = time.perf_counter()
        self._seconds, self._timed = 0.0, 0

    def before_step(self) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def after_step(self) -> None:
        """Write the seconds since `before_step`."""
        if self.trainer.iter - self.trainer.start_iter < self._warmup_iter:
            return
        seconds = time.perf_counter() - self._began
        self._seconds += seconds
        self._timed += 1
        self.trainer.storage.put_scalar("time", seconds)

    def after_train(self) -> None:
        """Log what the iterations took, and what everything took."""
        if self._timed:
            trained = self.trainer.iter - self.trainer.start_iter
            total = time.perf_counter() - self._train_began
            logger.info("%d iterations in %.1f s; one took %.4f s", trained, total, self._seconds / self._timed)
