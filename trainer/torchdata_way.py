"""The way of torchdata's StatefulDataLoader: its own state, and what that leaves out."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, SequentialSampler

from trainerd.trainer import loader_samplers, randomness
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


def is_torchdatas(loader: Any) -> bool:
    """Say whether a loader is a StatefulDataLoader that iterates and saves as torchdata made it."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    if module is None or not isinstance(loader, module.StatefulDataLoader):
        return False
    ours = ("__iter__", "state_dict", "load_state_dict")
    return all(getattr(type(loader), name) is getattr(module.StatefulDataLoader, name) for name in ours)


def restores_order(loader: Any) -> bool:
    """Say whether a StatefulDataLoader's state holds the order of its samples, or there is no order to hold.

    It saves samplers that have state, and its own RandomSampler; any other it iterates again, in whatever order.
    """
    if isinstance(loader.dataset, IterableDataset):
        return True
    sampler, _ = loader_samplers.sampling(loader)
    own = type(loader.batch_sampler).__module__.startswith("torchdata.") or loader.batch_sampler in (None, sampler)
    return own and (has_state(sampler) or type(sampler) is SequentialSampler or _is_its_random_sampler(sampler))


def _is_its_random_sampler(sampler: Any) -> bool:
    kind = type(sampler)
    return (kind.__module__, kind.__name__) == ("torchdata.stateful_dataloader.sampler", "RandomSampler")


class TorchdataState(Way):
    """A StatefulDataLoader restores itself; its generators, and random numbers of a replayed stream, are added.

    Before the first batch it is not asked for its state: it would start its processes and draw a seed to answer.
    """

    key = "loader"

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._epoch_began_with: randomness.RawStates | None = None

    def begin_epoch(self) -> Iterator[Any]:
        if self._is_stream and not has_state(self._loader.dataset):
            self._epoch_began_with = randomness.capture_raw()
        return self._workers.iterate()

    def capture(self, epoch: int, batches: int, iterator: Iterator[Any] | None) -> dict[str, Any]:
        begun = iterator is not None
        state: dict[str, Any] = {
            self.key: self._loader.state_dict() if begun else None,
            "begun": begun,
            "settings": loader_samplers.settings(self._loader),
            "samplers": loader_samplers.capture(self._loader),
        }
        if not begun:
            state["parts"] = {name: part.state_dict() for name, part in self._parts_with_state().items()}
        if self._epoch_began_with is not None:
            state["epoch_began_with"] = randomness.to_plain(self._epoch_began_with)
        return state

    def prepare(self, state: Mapping[str, Any]) -> None:
        loader_samplers.check(self._loader, state.get("settings", {}))
        if state["begun"]:
            give(self._loader, "data loader", state[self.key])
            return
        for name, part in self._parts_with_state().items():
            if name in state.get("parts", {}):
                give(part, name, state["parts"][name])

    def restore(self, state: Mapping[str, Any]) -> Iterator[Any] | None:
        self.prepare(state)
        loader_samplers.restore(self._loader, state.get("samplers", {}))
        if not state["begun"]:
            return None
        if "epoch_began_with" in state:
            randomness.restore(state["epoch_began_with"])
        iterator: Iterator[Any] = self._iterate()
        if not self._loader.num_workers and self._is_stream and has_ended(iterator):
            iterator = self._at_the_end(iterator, state)
        # Once more: creating the iterator has drawn from the generators.
        loader_samplers.restore(self._loader, state.get("samplers", {}))
        return iterator

    def _at_the_end(self, iterator: Any, state: Mapping[str, Any]) -> Any:
        """Let a dataset that stands at its end notice it, else it would take the next epoch for this one's rest."""
        iterator._dataset_fetcher.ended = False
        try:
            next(iterator)
        except StopIteration:
            return iterator
        # It has gone back to its beginning by itself. What it gave belongs to the next epoch.
        self.prepare(state)
        return self._iterate()

    def _iterate(self) -> Any:
        try:
            return self._workers.iterate()
        except Exception as error:
            raise refused(self._loader, "data loader", error) from error

    def _parts_with_state(self) -> dict[str, Any]:
        parts = {"sampler": self._loader.sampler, "dataset": self._loader.dataset}
        return {name: part for name, part in parts.items() if has_state(part)}

    def grade(self) -> tuple[Grade, str]:
        promised = promise(self._loader)
        if promised is not None:
            return promised
        dataset = self._loader.dataset
        own_seeds = f"{name_of(self._loader)}'s {OWN_SEEDS}"
        if not self._is_stream:
            return ("same data", own_seeds) if self._loader.num_workers else ("bitwise", "")
        promised = promise(dataset)
        if promised is not None:
            return ("same data", own_seeds) if promised[0] == "bitwise" and self._loader.num_workers else promised
        if not has_state(dataset):
            return "position only", (
                f"the dataset ({name_of(dataset)}) has no state_dict, so samples already trained on are fetched again "
                "and skipped, and their order cannot be checked"
            )
        if self._loader.num_workers:
            return "position only", (
                f"the dataset ({name_of(dataset)}) doesn't say how it resumes: in loader processes, one that goes back "
                "to its beginning by itself repeats what a process has read to the end"
            )
        return "same data", no_promise(dataset)
