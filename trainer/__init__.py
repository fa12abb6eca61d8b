"""The training loop of detectron2, resumable to the bit: hooks, trainers, metrics and the whole state in one dict."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainerd.trainer.base import HookBase, TrainerBase
    from trainerd.trainer.data import ResumableLoader
    from trainerd.trainer.errors import HookStateError, StateError, StateMismatch
    from trainerd.trainer.events import EventStorage, HistoryBuffer, get_event_storage
    from trainerd.trainer.randomness import seed_all_rng
    from trainerd.trainer.session import NULL_SESSION, NullSession, Session
    from trainerd.trainer.simple import SimpleTrainer

__all__ = [
    "NULL_SESSION",
    "EventStorage",
    "HistoryBuffer",
    "HookBase",
    "HookStateError",
    "NullSession",
    "ResumableLoader",
    "Session",
    "SimpleTrainer",
    "StateError",
    "StateMismatch",
    "TrainerBase",
    "get_event_storage",
    "seed_all_rng",
]

_HOMES = {
    "NULL_SESSION": "session",
    "EventStorage": "events",
    "HistoryBuffer": "events",
    "HookBase": "base",
    "HookStateError": "errors",
    "NullSession": "session",
    "ResumableLoader": "data",
    "Session": "session",
    "SimpleTrainer": "simple",
    "StateError": "errors",
    "StateMismatch": "errors",
    "TrainerBase": "base",
    "get_event_storage": "events",
    "seed_all_rng": "randomness",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
