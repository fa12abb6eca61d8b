"""What it takes to bring a data loader back to where it stood; `loader_ways` has one way for each kind of loader."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Literal

from trainerd.trainer.errors import StateMismatch
from trainerd.trainer.loader_workers import LoaderWorkers

Grade = Literal["bitwise", "same data", "position only"]

OWN_SEEDS = "loader processes draw random numbers from seeds of their own"


class Way:
    """One way to save and restore a position; this base describes what the ways do."""

    key = ""  # the entry of a saved position that tells it was taken this way

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._workers = LoaderWorkers(loader)

    def begin_epoch(self) -> Iterator[Any]:
        """Return an iterator over a new epoch."""
        return self._workers.iterate()

    def capture(self, epoch: int, batches: int, iterator: Iterator[Any] | None) -> dict[str, Any]:
        """Return the position; `epoch` and `batches` count what was handed out, `iterator` is the epoch's, if begun."""
        raise NotImplementedError

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Take a saved position without iterating yet; StateMismatch when the loader refuses it."""

    def restore(self, state: Mapping[str, Any]) -> Iterator[Any] | None:
        """Return an iterator at a saved position, or None if an epoch is to begin; may draw random numbers."""
        self.prepare(state)
        return self._workers.iterate() if state["begun"] else None

    def grade(self) -> tuple[Grade, str]:
        """Return how exactly it comes back, and why not higher."""
        raise NotImplementedError

    def next_samples(self, batches: int) -> list[int] | None:
        """Return the indices of the next batch's samples without fetching it; None if they are unknown."""
        return None


def has_state(value: object) -> bool:
    """Say whether an object can give and take its own state."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def has_ended(iterator: Any) -> bool:
    """Say whether an iterator of a DataLoader without processes is at its stream's end; torch keeps that private."""
    return bool(getattr(getattr(iterator, "_dataset_fetcher", None), "ended", False))


def give(taker: Any, what: str, state: Any) -> None:
    """Let an object load its state; StateMismatch, with its own error in words, when it refuses."""
    try:
        # A copy: loaders keep and change what they are given, and this may be handed out once more.
        taker.load_state_dict(deepcopy(state))
    except Exception as error:
        raise refused(taker, what, error) from error


def refused(taker: Any, what: str, error: Exception) -> StateMismatch:
    """Return the error for a position that an object does not take."""
    return StateMismatch(
        f"The {what} ({name_of(taker)}) could not take its saved position back: {type(error).__name__}: {error}"
    )


def promise(value: Any) -> tuple[Grade, str] | None:
    """Return the grade that a loader or dataset promises by `resume_grade`, and why not more; None if it does not."""
    promised = getattr(value, "resume_grade", None)
    if promised is None:
        return None
    grade, reason = promised() if callable(promised) else promised
    return grade, reason


def no_promise(dataset: Any) -> str:
    """Return the reason for "same data" of a dataset that saves itself."""
    return f"the dataset ({name_of(dataset)}) doesn't say whether it resumes bitwise"


def name_of(value: object) -> str:
    """Return a value's class, for messages."""
    return type(value).__qualname__
