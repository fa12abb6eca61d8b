"""What CUDA's allocator holds, every so many iterations."""

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from trainerd.trainer.arguments import require_count
from trainerd.trainer.hook_base import HookBase

logger = logging.getLogger(__name__)

MEGABYTE = 2**20


class TorchMemoryStats(HookBase):
    """Logs the peaks of CUDA memory and writes `torch.cuda.memory_summary()` to `memory_iter<N>.txt`.

    Without CUDA it does nothing, which is said once. How often it has run is part of the state.

    Args:
        output_dir: where the summaries go, made when the first one is written.
        step_period: iterations between two of them; the last iteration has one, too.
        max_runs: after so many it stops.
    """

    def __init__(self, output_dir: str, step_period: int = 20, max_runs: int = 10) -> None:
        require_count("TorchMemoryStats", "step_period", step_period)
        self._output_dir = output_dir
        self._step_period = step_period
        self._max_runs = max_runs
        self._runs = 0

    def before_train(self) -> None:
        """Say if there is nothing to look at."""
        if not torch.cuda.is_available():
            logger.info("there is no CUDA device, so no memory statistics are written")

    def after_step(self) -> None:
        """Write a summary if it is time to."""
        done = self.trainer.iter + 1
        due = done % self._step_period == 0 or done >= self.trainer.max_iter
        if due and self._runs < self._max_runs and torch.cuda.is_available():
            self._runs += 1
            self._write(self.trainer.iter)

    def _write(self, iteration: int) -> None:
        reserved = torch.cuda.max_memory_reserved() / MEGABYTE
        allocated = torch.cuda.max_memory_allocated() / MEGABYTE
        logger.info("iteration %d: at most %.0f MB reserved, %.0f MB allocated", iteration, reserved, allocated)
        os.makedirs(self._output_dir, exist_ok=True)
        with open(os.path.join(self._output_dir, f"memory_iter{iteration}.txt"), "w", encoding="utf-8") as file:
            file.write(torch.cuda.memory_summary())
        torch.cuda.reset_peak_memory_stats()

    def state_dict(self) -> dict[str, Any]:
        """Return how often it has run."""
        return {"runs": self._runs}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting."""
        self._runs = state_dict["runs"]
