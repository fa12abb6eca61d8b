"""Profiles of chosen iterations."""

import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from trainerd.trainer.hook_base import HookBase

if TYPE_CHECKING:
    from trainerd.trainer.base import TrainerBase

logger = logging.getLogger(__name__)

Predicate = Callable[["TrainerBase"], bool]


class _Profiler(HookBase):
    """Runs a profiler from `before_step` to `after_step` of the iterations that a predicate chooses."""

    def __init__(self, enable_predicate: Predicate, output_dir: str) -> None:
        if not callable(enable_predicate):
            raise TypeError(f"{type(self).__name__}: enable_predicate is {enable_predicate!r}, which cannot be called.")
        self._enable_predicate = enable_predicate
        self._output_dir = output_dir
        self._running: Any = None

    def _make(self) -> Any:
        raise NotImplementedError

    def _write(self, profile: Any) -> None:
        raise NotImplementedError

    def before_step(self) -> None:
        """Start profiling if this iteration is chosen."""
        if self._enable_predicate(self.trainer):
            self._running = self._make()
            self._running.__enter__()

    def after_step(self) -> None:
        """Stop profiling, and write what was found."""
        if self._running is not None:
            profile = self._stop()
            os.makedirs(self._output_dir, exist_ok=True)
            self._write(profile)

    def after_train(self) -> None:
        """Stop a profiler that a failing iteration has left running."""
        if self._running is not None:
            self._stop()

    def _stop(self) -> Any:
        profile, self._running = self._running, None
        profile.__exit__(None, None, None)
        return profile


class TorchProfiler(_Profiler):
    """Profiles chosen iterations with `torch.profiler.profile`.

    Args:
        enable_predicate: called with the trainer before each iteration; true: profile it.
        output_dir: where traces go, made when the first one is written.
        activities: as in torch.profiler.profile; CPU, and CUDA if there is any, when left out.
        save_tensorboard: write traces for TensorBoard's profiler page into `log` in `output_dir`; otherwise one
            Chrome trace per iteration, `profiler_iter<N>.json`.
    """

    def __init__(
        self,
        enable_predicate: Predicate,
        output_dir: str,
        *,
        activities: Iterable[torch.profiler.ProfilerActivity] | None = None,
        save_tensorboard: bool = True,
    ) -> None:
        super().__init__(enable_predicate, output_dir)
        self._activities = None if activities is None else list(activities)
        self._save_tensorboard = save_tensorboard

    def _make(self) -> Any:
        return torch.profiler.profile(
            activities=self._activities, record_shapes=True, profile_memory=True, with_stack=True, with_flops=True
        )

    def _write(self, profile: Any) -> None:
        if self._save_tensorboard:
            torch.profiler.tensorboard_trace_handler(os.path.join(self._output_dir, "log"))(profile)
        else:
            profile.export_chrome_trace(os.path.join(self._output_dir, f"profiler_iter{self.trainer.iter}.json"))


class AutogradProfiler(_Profiler):
    """Profiles chosen iterations with `torch.autograd.profiler`, one Chrome trace each: `profiler_iter<N>.json`.

    Args:
        enable_predicate: called with the trainer before each iteration; true: profile it.
        output_dir: where traces go, made when the first one is written.
        use_cuda: time what runs on CUDA devices as well, if there are any.
    """

    def __init__(self, enable_predicate: Predicate, output_dir: str, *, use_cuda: bool = True) -> None:
        super().__init__(enable_predicate, output_dir)
        self._use_cuda = use_cuda

    def _make(self) -> Any:
        device = "cuda" if self._use_cuda and torch.cuda.is_available() else None
        return torch.autograd.profiler.profile(use_device=device)

    def _write(self, profile: Any) -> None:
        profile.export_chrome_trace(os.path.join(self._output_dir, f"profiler_iter{self.trainer.iter}.json"))
