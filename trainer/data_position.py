"""Where in its data a training stands: batches are counted when they are handed to the step, never when prefetched."""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, Literal

from trainerd.trainer import randomness
from trainerd.trainer.errors import StateMismatch

Grade = Literal["bitwise", "same data", "position only"]


def is_resumable(loader: object) -> bool:
    """Say whether a loader can give and take its own position."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


class DataPosition:
    """An endless iterator over a loader, epoch after epoch, that can be saved and brought back to where it stood.

    A loader with `state_dict` and `load_state_dict` restores itself. Any other is iterated again from the random
    numbers its epoch began with, and the batches that were handed out before are fetched and skipped.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.epoch = 0
        self.batches = 0
        self._iterator: Iterator[Any] | None = None
        self._epoch_began_with: randomness.RawStates | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next batch, of the next epoch when this one is over; RuntimeError from a loader without any."""
        if self._iterator is None:
            self._iterator = self._start_epoch()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.epoch += 1
            self.batches = 0
            self._iterator = self._start_epoch()
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise RuntimeError(
                    f"The data loader ({_name(self.loader)}) gave no batch in epoch {self.epoch}: it is empty, or an "
                    "iterator that can be used only once. Give the trainer something that can be iterated again."
                ) from None
        self.batches += 1
        return batch

    def _start_epoch(self) -> Iterator[Any]:
        if not is_resumable(self.loader):
            self._epoch_began_with = randomness.capture_raw()
        return iter(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's own state; for any other loader epoch, batches handed out, and how the epoch began."""
        if is_resumable(self.loader):
            # Our own counts stay out: a loader may call the end of one epoch the beginning of the next.
            return {"loader": self.loader.state_dict(), "begun": self._iterator is not None}  # type: ignore[attr-defined]
        state: dict[str, Any] = {"epoch": self.epoch, "batches": self.batches}
        if self._epoch_began_with is not None:
            state["epoch_began_with"] = randomness.to_plain(self._epoch_began_with)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the saved position and create the iterator; this draws random numbers, so restore those afterwards."""
        self._iterator = None
        if "loader" in state:
            self.prepare(state)
            if state["begun"]:
                self._iterator = iter(self.loader)
        else:
            self.epoch, self.batches = state["epoch"], state["batches"]
            if self.batches:
                self._skip(state)

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Hand a loader its own saved state, without iterating yet; StateMismatch when it refuses it."""
        if "loader" not in state:
            return
        try:
            # A copy: loaders keep and change what they are given, and this may be handed out once more.
            self.loader.load_state_dict(deepcopy(state["loader"]))  # type: ignore[attr-defined]
        except Exception as error:
            raise StateMismatch(
                f"The data loader ({_name(self.loader)}) could not take its saved position back: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _skip(self, state: Mapping[str, Any]) -> None:
        if "epoch_began_with" in state:
            randomness.restore(state["epoch_began_with"])
        self._iterator = self._start_epoch()
        for skipped in range(self.batches):
            try:
                next(self._iterator)
            except StopIteration:
                raise StateMismatch(
                    f"The data loader ({_name(self.loader)}) ended after {skipped} batches, but {self.batches} of "
                    f"epoch {self.epoch} were trained on when the state was saved: its data has changed."
                ) from None

    def next_samples(self) -> list[int] | None:
        """Return the sample indices of the batch that comes next, without fetching it; None if the loader can't say."""
        look = getattr(self.loader, "next_samples", None)
        return look() if callable(look) else None

    def mismatch(self, state: Mapping[str, Any]) -> str:
        """Say why a saved state and this loader are of different kinds; empty when they are of one."""
        if "loader" in state and not is_resumable(self.loader):
            return f"the data loader that was saved gave its own state, and this one ({_name(self.loader)}) takes none"
        if "loader" not in state and is_resumable(self.loader):
            return (
                f"the data loader that was saved gave no state of its own, and this one ({_name(self.loader)}) needs it"
            )
        return ""

    def grade(self) -> tuple[Grade, str]:
        """Return how exactly this loader comes back, and why not higher."""
        if not is_resumable(self.loader):
            return "position only", (
                f"the data loader ({_name(self.loader)}) has no state_dict, so batches already trained on are fetched "
                "again and skipped, and their order cannot be checked"
            )
        promised = getattr(self.loader, "resume_grade", None)
        if promised is None:
            return "same data", f"the data loader ({_name(self.loader)}) doesn't say whether it resumes bitwise"
        grade, reason = promised() if callable(promised) else promised
        return grade, reason


def _name(loader: object) -> str:
    return type(loader).__qualname__
