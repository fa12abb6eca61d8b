"""Hooks that come with the trainer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainerd.trainer.hook_base import HookBase
    from trainerd.trainer.hooks.checkpointers import BestCheckpointer, PeriodicCheckpointer
    from trainerd.trainer.hooks.lr_scheduler import LRScheduler

__all__ = ["BestCheckpointer", "HookBase", "LRScheduler", "PeriodicCheckpointer"]

_HOMES = {
    "BestCheckpointer": "trainerd.trainer.hooks.checkpointers",
    "HookBase": "trainerd.trainer.hook_base",
    "LRScheduler": "trainerd.trainer.hooks.lr_scheduler",
    "PeriodicCheckpointer": "trainerd.trainer.hooks.checkpointers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
