"""Where in its data a training stands: batches are counted when they are handed to the step, never when prefetched."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainerd.trainer.errors import StateMismatch
from trainerd.trainer.loader_way import Grade, name_of
from trainerd.trainer.loader_ways import way_of

__all__ = ["DataPosition", "Grade"]

_KINDS = {
    "loader": "gave its own state",
    "sampler": "was a DataLoader over an InfiniteSampler",
    "dataset": "was a DataLoader over an iterable dataset with state",
    "batches": "gave no state of its own",
}


class DataPosition:
    """An endless iterator over a loader, epoch after epoch, that can be saved and brought back to where it stood."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.epoch = 0
        self.batches = 0
        self._way = way_of(loader)
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next batch, of the next epoch when this one is over; RuntimeError from a loader without any."""
        if self._iterator is None:
            self._iterator = self._way.begin_epoch()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.epoch += 1
            self.batches = 0
            self._iterator = self._way.begin_epoch()
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise RuntimeError(
                    f"The data loader ({name_of(self.loader)}) gave no batch in epoch {self.epoch}: it is empty, or an "
                    "iterator that can be used only once. Give the trainer something that can be iterated again."
                ) from None
        self.batches += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position, in the form of the loader's kind."""
        return self._way.capture(self.epoch, self.batches, self._iterator)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the saved position and create the iterator; this draws random numbers, so restore those afterwards.

        StateMismatch when it was saved for another kind of loader.
        """
        if reason := self.mismatch(state):
            raise StateMismatch(f"The saved position does not fit: {reason}.")
        self._iterator = None
        self.epoch, self.batches = state.get("epoch", 0), state.get("batches", 0)
        self._iterator = self._way.restore(state)

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Hand the loader its saved position, without iterating yet; StateMismatch when it refuses it."""
        self._way.prepare(state)

    def next_samples(self) -> list[int] | None:
        """Return the sample indices of the batch that comes next, without fetching it; None if they are unknown."""
        return self._way.next_samples(self.batches)

    def mismatch(self, state: Mapping[str, Any]) -> str:
        """Say why a saved position and this loader are of different kinds; empty when they are of one."""
        saved = next((key for key in _KINDS if key in state), "batches")
        if saved == self._way.key:
            return ""
        return (
            f"the data loader that was saved {_KINDS[saved]}, and this one ({name_of(self.loader)}) "
            f"{_KINDS[self._way.key].replace('was', 'is').replace('gave', 'gives')}"
        )

    def grade(self) -> tuple[Grade, str]:
        """Return how exactly this loader comes back, and why not higher."""
        return self._way.grade()
