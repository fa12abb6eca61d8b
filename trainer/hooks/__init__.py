"""Hooks that come with the trainer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainerd.trainer.hook_base import HookBase
    from trainerd.trainer.hooks.callback import CallbackHook
    from trainerd.trainer.hooks.checkpointers import BestCheckpointer, PeriodicCheckpointer
    from trainerd.trainer.hooks.early_stopping import EarlyStopping
    from trainerd.trainer.hooks.ema import EMA
    from trainerd.trainer.hooks.eval_hook import EvalHook
    from trainerd.trainer.hooks.gradient_clip import GradientClip
    from trainerd.trainer.hooks.iteration_timer import IterationTimer
    from trainerd.trainer.hooks.lr_scheduler import LRScheduler
    from trainerd.trainer.hooks.memory_stats import TorchMemoryStats
    from trainerd.trainer.hooks.periodic_writer import PeriodicWriter
    from trainerd.trainer.hooks.precise_bn import PreciseBN
    from trainerd.trainer.hooks.profiler import AutogradProfiler, TorchProfiler

__all__ = [
    "EMA",
    "AutogradProfiler",
    "BestCheckpointer",
    "CallbackHook",
    "EarlyStopping",
    "EvalHook",
    "GradientClip",
    "HookBase",
    "IterationTimer",
    "LRScheduler",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "PreciseBN",
    "TorchMemoryStats",
    "TorchProfiler",
]

_HOMES = {
    "AutogradProfiler": "trainerd.trainer.hooks.profiler",
    "BestCheckpointer": "trainerd.trainer.hooks.checkpointers",
    "CallbackHook": "trainerd.trainer.hooks.callback",
    "EMA": "trainerd.trainer.hooks.ema",
    "EarlyStopping": "trainerd.trainer.hooks.early_stopping",
    "EvalHook": "trainerd.trainer.hooks.eval_hook",
    "GradientClip": "trainerd.trainer.hooks.gradient_clip",
    "HookBase": "trainerd.trainer.hook_base",
    "IterationTimer": "trainerd.trainer.hooks.iteration_timer",
    "LRScheduler": "trainerd.trainer.hooks.lr_scheduler",
    "PeriodicCheckpointer": "trainerd.trainer.hooks.checkpointers",
    "PeriodicWriter": "trainerd.trainer.hooks.periodic_writer",
    "PreciseBN": "trainerd.trainer.hooks.precise_bn",
    "TorchMemoryStats": "trainerd.trainer.hooks.memory_stats",
    "TorchProfiler": "trainerd.trainer.hooks.profiler",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
