"""How each kind of data loader is brought back to where it stood: one way for each kind."""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, Literal

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from trainerd.trainer import randomness
from trainerd.trainer.errors import StateMismatch
from trainerd.trainer.infinite_sampler import InfiniteSampler

Grade = Literal["bitwise", "same data", "position only"]

OWN_SEEDS = "loader processes draw random numbers from seeds of their own"


class Way:
    """One way to save and restore a position; this base describes what the ways below do."""

    key = ""  # the entry of a saved position that tells it was taken this way

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def begin_epoch(self) -> Iterator[Any]:
        """Return an iterator over a new epoch."""
        return iter(self._loader)

    def capture(self, epoch: int, batches: int, begun: bool) -> dict[str, Any]:
        """Return the position; `epoch` and `batches` count what was handed out, `begun`: there is an iterator."""
        raise NotImplementedError

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Take a saved position without iterating yet; StateMismatch when the loader refuses it."""

    def restore(self, state: Mapping[str, Any]) -> Iterator[Any] | None:
        """Return an iterator at a saved position, or None if no epoch had begun; may draw random numbers."""
        self.prepare(state)
        return iter(self._loader) if state["begun"] else None

    def grade(self) -> tuple[Grade, str]:
        """Return how exactly it comes back, and why not higher."""
        raise NotImplementedError

    def next_samples(self, batches: int) -> list[int] | None:
        """Return the indices of the next batch's samples without fetching it; None if they are unknown."""
        return None


def has_state(value: object) -> bool:
    """Say whether an object can give and take its own state."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def way_of(loader: Iterable[Any]) -> Way:
    """Return the best way that a loader allows."""
    if has_state(loader):
        return OwnState(loader)
    # Exactly: a subclass may fetch ahead, or batch in its own way.
    if type(loader) is DataLoader and loader.in_order:
        sampler, batch_size = _sampling(loader)
        if isinstance(sampler, InfiniteSampler) and batch_size:
            return SamplerState(loader, sampler, batch_size)
        if isinstance(loader.dataset, IterableDataset) and has_state(loader.dataset) and loader.num_workers == 0:
            return DatasetState(loader)
    return Skipping(loader)


def _sampling(loader: DataLoader[Any]) -> tuple[Any, int]:
    """Return the sampler of single indices, and how many of them make a batch; 0 if that cannot be told."""
    batches: Any = loader.batch_sampler
    if batches is None:
        return loader.sampler, 1
    return (batches.sampler, batches.batch_size) if type(batches) is BatchSampler else (None, 0)


class OwnState(Way):
    """A loader with `state_dict` and `load_state_dict`, such as ResumableLoader and torchdata's StatefulDataLoader."""

    key = "loader"

    def capture(self, epoch: int, batches: int, begun: bool) -> dict[str, Any]:
        # Our own counts stay out: a loader may call the end of one epoch the beginning of the next.
        return {self.key: self._loader.state_dict(), "begun": begun}

    def prepare(self, state: Mapping[str, Any]) -> None:
        _give(self._loader, "data loader", state[self.key])

    def grade(self) -> tuple[Grade, str]:
        promised = _promise(self._loader)
        if promised is not None:
            return promised
        if type(self._loader).__module__.partition(".")[0] == "torchdata":
            return _grade_of_torchdata(self._loader)
        return "same data", f"the data loader ({name_of(self._loader)}) doesn't say whether it resumes bitwise"

    def next_samples(self, batches: int) -> list[int] | None:
        look = getattr(self._loader, "next_samples", None)
        return look() if callable(look) else None


def _grade_of_torchdata(loader: Any) -> tuple[Grade, str]:
    if getattr(loader, "num_workers", 0):
        return "same data", f"StatefulDataLoader's {OWN_SEEDS}"
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return _promise(loader.dataset) or ("same data", _no_promise(loader.dataset))
    return "bitwise", ""


class SamplerState(Way):
    """A DataLoader over an InfiniteSampler: the position is batches times their size, nothing is fetched twice."""

    key = "sampler"

    def __init__(self, loader: DataLoader[Any], sampler: InfiniteSampler, batch_size: int) -> None:
        super().__init__(loader)
        self._sampler = sampler
        self._batch_size = batch_size

    def begin_epoch(self) -> Iterator[Any]:
        self._sampler.start_at(0)
        return iter(self._loader)

    def capture(self, epoch: int, batches: int, begun: bool) -> dict[str, Any]:
        # The sampler itself is ahead of the step by what loader processes have fetched.
        start = batches * self._batch_size
        return {self.key: {**self._sampler.state_dict(), "start": start}, "batches": batches, "begun": begun}

    def prepare(self, state: Mapping[str, Any]) -> None:
        _give(self._sampler, "sampler", state[self.key])
        if state[self.key]["start"] != state["batches"] * self._batch_size:
            raise StateMismatch(
                f"The saved position counts {state['batches']} batches and {state[self.key]['start']} samples of this "
                f"rank, but a batch has {self._batch_size} here: set batch_size back, or start afresh."
            )

    def grade(self) -> tuple[Grade, str]:
        return ("same data", f"DataLoader's {OWN_SEEDS}") if self._loader.num_workers else ("bitwise", "")

    def next_samples(self, batches: int) -> list[int] | None:
        return self._sampler.indices(batches * self._batch_size, self._batch_size)


class DatasetState(Way):
    """A DataLoader without processes over an iterable dataset that has state: nothing is fetched ahead."""

    key = "dataset"

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._dataset: Any = loader.dataset

    def capture(self, epoch: int, batches: int, begun: bool) -> dict[str, Any]:
        return {self.key: self._dataset.state_dict(), "epoch": epoch, "batches": batches, "begun": begun}

    def prepare(self, state: Mapping[str, Any]) -> None:
        _give(self._dataset, "dataset", state[self.key])

    def grade(self) -> tuple[Grade, str]:
        return _promise(self._loader) or _promise(self._dataset) or ("same data", _no_promise(self._dataset))


class Skipping(Way):
    """Any other loader: its epoch begins again with the random numbers it began with, and what was used is skipped."""

    key = "batches"

    def __init__(self, loader: Iterable[Any]) -> None:
        super().__init__(loader)
        self._epoch_began_with: randomness.RawStates | None = None

    def begin_epoch(self) -> Iterator[Any]:
        self._epoch_began_with = randomness.capture_raw()
        return iter(self._loader)

    def capture(self, epoch: int, batches: int, begun: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": epoch, "batches": batches}
        if self._epoch_began_with is not None:
            state["epoch_began_with"] = randomness.to_plain(self._epoch_began_with)
        return state

    def restore(self, state: Mapping[str, Any]) -> Iterator[Any] | None:
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
        dataset = getattr(self._loader, "dataset", None)
        reason = (
            f"the data loader ({name_of(self._loader)}) has no state_dict, so batches already trained on are fetched "
            "again and skipped, and their order cannot be checked"
        )
        if isinstance(dataset, IterableDataset) and has_state(dataset):
            reason += "; torchdata's StatefulDataLoader would save the dataset's own state"
        return "position only", reason


def _give(taker: Any, what: str, state: Any) -> None:
    try:
        # A copy: loaders keep and change what they are given, and this may be handed out once more.
        taker.load_state_dict(deepcopy(state))
    except Exception as error:
        raise StateMismatch(
            f"The {what} ({name_of(taker)}) could not take its saved position back: {type(error).__name__}: {error}"
        ) from error


def _promise(value: Any) -> tuple[Grade, str] | None:
    promised = getattr(value, "resume_grade", None)
    if promised is None:
        return None
    grade, reason = promised() if callable(promised) else promised
    return grade, reason


def _no_promise(dataset: Any) -> str:
    return f"the dataset ({name_of(dataset)}) doesn't say whether it resumes bitwise"


def name_of(value: object) -> str:
    """Return a value's class, for messages."""
    return type(value).__qualname__
