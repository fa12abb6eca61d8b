"""How each kind of data loader is brought back to where it stood: one way for each kind."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainerd.trainer import loader_samplers, randomness
from trainerd.trainer.errors import StateMismatch
from trainerd.trainer.infinite_sampler import InfiniteSampler
from trainerd.trainer.loader_way import (
    OWN_SEEDS,
    Grade,
    Way,
    give,
    has_ended,
    has_state,
    name_of,
    no_promise,
    promise,
    refused,
)
from trainerd.trainer.torchdata_way import TorchdataState, is_torchdatas, restores_order


def way_of(loader: Iterable[Any]) -> Way:
    """Return the best way that a loader allows."""
    torchdatas = is_torchdatas(loader)
    # Exactly: a subclass may fetch ahead, or batch in its own way.
    if torchdatas or type(loader) is DataLoader:
        return _way_of_dataloader(loader, torchdatas)
    return OwnState(loader) if has_state(loader) else Skipping(loader, f"{_the(loader)} has no state_dict")


def _way_of_dataloader(loader: Any, torchdatas: bool) -> Way:
    if loader.num_workers and not loader.in_order:
        return Skipping(loader, f"{_the(loader)} hands out batches in any order (in_order=False)")
    sampler, batch_size = loader_samplers.sampling(loader)
    dataset = loader.dataset
    # Exactly, again. With torchdata, a dataset of its own state comes back with the loader's.
    if type(sampler) is InfiniteSampler and batch_size and not (torchdatas and has_state(dataset)):
        return SamplerState(loader, sampler, batch_size)
    if torchdatas and restores_order(loader):
        return TorchdataState(loader)
    if torchdatas:
        return Skipping(loader, f"the sampler ({name_of(sampler)}) of {_the(loader)} has no state_dict")
    if isinstance(dataset, IterableDataset) and has_state(dataset):
        if not loader.num_workers:
            return DatasetState(loader)
        hint = "its processes fetch ahead of what is trained on; torchdata's StatefulDataLoader would save their state"
        return Skipping(loader, f"{_the(loader)} has no state_dict, and {hint}")
    return Skipping(loader, f"{_the(loader)} has no state_dict")


def _the(loader: Any) -> str:
    return f"the data loader ({name_of(loader)})"


class OwnState(Way):
    """A loader with `state_dict` and `load_state_dict`, such as ResumableLoader."""

    key = "loader"

    def capture(self, epoch: int, batches: int, iterator: Iterator[Any] | None) -> dict[str, Any]:
        # Our own counts stay out: a loader may call the end of one epoch the beginning of the next.
        return {self.key: self._loader.state_dict(), "begun": iterator is not None}

    def prepare(self, state: Mapping[str, Any]) -> None:
        give(self._loader, "data loader", state[self.key])

    def restore(self, state: Mapping[str, Any]) -> Iterator[Any] | None:
        self.prepare(state)
        try:
            return self._workers.iterate() if state["begun"] else None
        except Exception as error:
            raise refused(self._loader, "data loader", error) from error

    def grade(self) -> tuple[Grade, str]:
        return promise(self._loader) or ("same data", f"{_the(self._loader)} doesn't say whether it resumes bitwise")

    def next_samples(self, batches: int) -> list[int] | None:
        look = getattr(self._loader, "next_samples", None)
        return look() if callable(look) else None


class SamplerState(Way):
    """A DataLoader over an InfiniteSampler: the position is batches times their size, nothing is fetched twice."""

    key = "sampler"

    def __init__(self, loader: DataLoader[Any], sampler: InfiniteSampler, batch_size: int) -> None:
        super().__init__(loader)
        self._sampler = sampler
        self._batch_size = batch_size
        self._first = sampler.first

    def begin_epoch(self) -> Iterator[Any]:
        self._first = self._sampler.first
        self._sampler.continue_at(self._first)
        return self._workers.iterate()

    def capture(self, epoch: int, batches: int, iterator: Iterator[Any] | None) -> dict[str, Any]:
        # The sampler itself is ahead of the step by what loader processes have fetched.
        order = {**self._sampler.state_dict(), "start": self._place(batches)}
        return {self.key: order, "first": self._first, "batches": batches, "begun": iterator is not None}

    def prepare(self, state: Mapping[str, Any]) -> None:
        start = state[self.key]["start"]
        if start - state["first"] != state["batches"] * self._batch_size:
            raise StateMismatch(
                f"The saved position counts {state['batches']} batches and {start - state['first']} samples of this "
                f"rank, but a batch has {self._batch_size} here: set batch_size back, or start afresh."
            )
        first = self._sampler.first
        give(self._sampler, "sampler", state[self.key])
        if state["begun"]:
            # Only this training goes on there: another one over the same sampler begins where the code says.
            self._sampler.start_at(first)
            self._sampler.continue_at(start)
        self._first = state["first"]

    def grade(self) -> tuple[Grade, str]:
        return ("same data", f"{name_of(self._loader)}'s {OWN_SEEDS}") if self._loader.num_workers else ("bitwise", "")

    def next_samples(self, batches: int) -> list[int] | None:
        return self._sampler.indices(self._place(batches), self._batch_size)

    def _place(self, batches: int) -> int:
        return self._first + batches * self._batch_size


class DatasetState(Way):
    """A DataLoader without processes over an iterable dataset that has state: nothing is fetched ahead."""

    key = "dataset"

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._dataset: Any = loader.dataset

    def capture(self, epoch: int, batches: int, iterator: Iterator[Any] | None) -> dict[str, Any]:
        return {
            self.key: self._dataset.state_dict(),
            "epoch": epoch,
            "batches": batches,
            "begun": iterator is not None,
            # An incomplete last batch was made by reaching the end, which the dataset may take for a new beginning.
            "ended": has_ended(iterator),
            "settings": loader_samplers.settings(self._loader),
        }

    def prepare(self, state: Mapping[str, Any]) -> None:
        loader_samplers.check(self._loader, state["settings"])
        give(self._dataset, "dataset", state[self.key])

    def restore(self, state: Mapping[str, Any]) -> Iterator[Any] | None:
        iterator = super().restore(state)
        if iterator is None or not state["ended"]:
            return iterator
        try:
            next(iterator)
        except StopIteration:
            return iterator
        self.prepare(state)  # it has gone back to its beginning by itself: what it gave belongs to the next epoch
        return None

    def grade(self) -> tuple[Grade, str]:
        return promise(self._loader) or promise(self._dataset) or ("same data", no_promise(self._dataset))


class Skipping(Way):
    """Any other loader: its epoch begins again with the random numbers it began with, and what was used is skipped."""

    key = "batches"

    def __init__(self, loader: Iterable[Any], why: str) -> None:
        super().__init__(loader)
        self._why = why
        self._epoch_began_with: tuple[randomness.RawStates, dict[str, Any]] | None = None

    def begin_epoch(self) -> Iterator[Any]:
        self._epoch_began_with = randomness.capture_raw(), loader_samplers.capture(self._loader)
        return self._workers.iterate()

    def capture(self, epoch: int, batches: int, iterator: Iterator[Any] | None) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": epoch, "batches": batches}
        samplers = loader_samplers.capture(self._loader)
        if self._epoch_began_with is not None:
            streams, samplers = self._epoch_began_with
            state["epoch_began_with"] = randomness.to_plain(streams)
        return state | ({"samplers": samplers} if samplers else {})

    def restore(self, state: Mapping[str, Any]) -> Iterator[Any] | None:
        loader_samplers.restore(self._loader, state.get("samplers", {}))
        if not state["batches"]:
            return None
        if "epoch_began_with" in state:
            randomness.restore(state["epoch_began_with"])
        iterator = self.begin_epoch()
        for skipped in range(state["batches"]):
            try:
                next(iterator)
            except StopIteration:
                raise StateMismatch(
                    f"The data loader ({name_of(self._loader)}) ended after {skipped} batches, but {state['batches']} "
                    f"of epoch {state['epoch']} were trained on when the state was saved: its data has changed."
                ) from None
        return iterator

    def grade(self) -> tuple[Grade, str]:
        return "position only", (
            f"{self._why}, so batches already trained on are fetched again and skipped, and their order cannot be "
            "checked"
        )
