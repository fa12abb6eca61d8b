"""The training loop of detectron2, resumable to the bit: hooks, trainers, metrics and the whole state in one dict."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainerd.trainer.amp import AMPTrainer
    from trainerd.trainer.base import TrainerBase
    from trainerd.trainer.data import ResumableLoader
    from trainerd.trainer.errors import HookStateError, StateError, StateMismatch
    from trainerd.trainer.events import EventStorage, HistoryBuffer, get_event_storage
    from trainerd.trainer.hook_base import HookBase
    from trainerd.trainer.infinite_sampler import InfiniteSampler
    from trainerd.trainer.mismatch import OnMismatch
    from trainerd.trainer.randomness import seed_all_rng
    from trainerd.trainer.session import NULL_SESSION, NullSession, Session
    from trainerd.trainer.simple import SimpleTrainer
    from trainerd.trainer.tensorboard_writer import TensorboardXWriter
    from trainerd.trainer.terminal_writer import CommonMetricPrinter
    from trainerd.trainer.writers import EventWriter, JSONWriter

__all__ = [
    "NULL_SESSION",
    "AMPTrainer",
    "CommonMetricPrinter",
    "EventStorage",
    "EventWriter",
    "HistoryBuffer",
    "HookBase",
    "HookStateError",
    "InfiniteSampler",
    "JSONWriter",
    "NullSession",
    "OnMismatch",
    "ResumableLoader",
    "Session",
    "SimpleTrainer",
    "StateError",
    "StateMismatch",
    "TensorboardXWriter",
    "TrainerBase",
    "get_event_storage",
    "seed_all_rng",
]

_HOMES = {
    "AMPTrainer": "amp",
    "CommonMetricPrinter": "terminal_writer",
    "EventStorage": "events",
    "EventWriter": "writers",
    "HistoryBuffer": "events",
    "HookBase": "hook_base",
    "HookStateError": "errors",
    "InfiniteSampler": "infinite_sampler",
    "JSONWriter": "writers",
    "NULL_SESSION": "session",
    "NullSession": "session",
    "OnMismatch": "mismatch",
    "ResumableLoader": "data",
    "Session": "session",
    "SimpleTrainer": "simple",
    "StateError": "errors",
    "StateMismatch": "errors",
    "TensorboardXWriter": "tensorboard_writer",
    "TrainerBase": "base",
    "get_event_storage": "events",
    "seed_all_rng": "randomness",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
