"""A data loader whose position is two numbers, exact at every batch, for any number of loader processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from trainerd.trainer.loader_processes import LoaderProcesses, ProcessStart
from trainerd.trainer.sample_order import SampleOrder, checked_order
from trainerd.trainer.sample_randomness import BatchRequest, MapDataset, SeededBatches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# What defines the order of samples: a position means nothing where one of these differs.
ORDER_SETTINGS = ("seed", "shuffle", "batch_size", "drop_last", "samples", "world_size")

_REFUSED = {
    "sampler": "the order of samples is a function of (seed, epoch) alone, so that it can be resumed",
    "batch_sampler": "batches are cut from an order that is a function of (seed, epoch) alone",
    "generator": "the order comes from `seed`, and a generator's state would have to be saved beside it",
    "in_order": "batches in any order cannot be counted, so only in_order=True is possible",
}


class ResumableLoader:
    """Loads batches of a map-style dataset, and resumes at any batch bit for bit.

    Takes what `torch.utils.data.DataLoader` takes, except `sampler`, `batch_sampler`, `generator` and
    `in_order=False`. It differs from it in four ways:

    - The order of an epoch depends on (seed, epoch) only; with `shuffle` it is a permutation of all samples.
    - Python's `random`, NumPy's legacy stream and torch's CPU stream are seeded for each sample from
      (seed, epoch, index), and for each call of `collate_fn`. Batches are the same for every `num_workers`,
      and the program's own streams do not notice. Generator objects that a dataset keeps are not seeded:
      draw from the global streams, or seed the generator from them.
    - `iter(loader)` yields the *rest* of the current epoch: after a `break` the next loop goes on where the
      last one stopped. The epoch advances when its last batch is handed out.
    - There is one position, hence one valid iterator: a new one ends the older one.

    Each rank gets every `world_size`-th sample, and the same number of batches. Without `drop_last` the epoch
    is filled up from its own beginning until it divides by `world_size`; with it, the remainder is left out.
    `rank` and `world_size` come from torch.distributed when they are not given and it is initialised.

    Raises `ValueError` or `TypeError` when arguments contradict each other or leave no batch to train on.
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        **refused: Any,
    ) -> None:
        _refuse(refused)
        _require_map_style(dataset)
        if num_workers == 0 and timeout:
            raise ValueError(f"timeout={timeout} needs num_workers > 0: a fetch in this process has no end.")
        self.dataset = dataset
        self.num_workers = num_workers
        self._order = checked_order(
            len(dataset),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        self._remaining = _RemainingBatches(self._order)
        self._process_start = ProcessStart(worker_init_fn)
        self._loader: DataLoader[Any] = DataLoader(
            SeededBatches(dataset, collate_fn or default_collate, seed),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._remaining,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=self._process_start,
            multiprocessing_context=multiprocessing_context,
            # DataLoader draws a seed for its processes: from the global stream, unless it is given another.
            generator=torch.Generator(),
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        self._processes = LoaderProcesses()
        self._batches: Iterator[Any] | None = None  # where there is one, it stands exactly at our position
        self._turn = 0  # the number of the valid iterator

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._remaining.epoch

    @property
    def batch(self) -> int:
        """Batches of this epoch handed out so far: the number of the next one."""
        return self._remaining.first

    @property
    def batch_size(self) -> int:
        """Samples in a batch (the last one of an epoch may have fewer)."""
        return self._order.batch_size

    @property
    def resume_grade(self) -> tuple[str, str]:
        """What a resume reaches ("bitwise"), and why not more ("")."""
        return "bitwise", ""

    def next_samples(self) -> list[int]:
        """Return this rank's sample indices of the next batch, without fetching it."""
        return list(next(self._order.batches(self.epoch, self.batch)).indices)

    def __len__(self) -> int:
        """Batches of a whole epoch, wherever in it we are."""
        return self._order.batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        self._turn += 1
        return _RestOfEpoch(self, self._turn)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what defines the order; the same on every rank.

        Batches count when they are handed out, never when prefetched. After the last batch of an epoch the
        position is the next epoch's first batch.
        """
        settings = {name: getattr(self._order, name) for name in ORDER_SETTINGS}
        return {"epoch": self.epoch, "batch": self.batch, **settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; iterators that exist already become invalid.

        Raises `ValueError`, and stays where it was, when the position was saved in another order.
        """
        differing = [
            f"{name} was {state.get(name, 'not recorded')}, now {getattr(self._order, name)}"
            for name in ORDER_SETTINGS
            if name not in state or state[name] != getattr(self._order, name)
        ]
        if differing:
            raise ValueError(
                f"The saved data position belongs to another order of samples ({'; '.join(differing)}): "
                "from there on, some samples of the epoch would come twice and others never. Set it back, or start "
                "afresh. num_workers, prefetch_factor and the like may change."
            )
        epoch, batch = state.get("epoch", -1), state.get("batch", -1)
        if epoch < 0 or not 0 <= batch <= len(self):
            raise ValueError(
                f"The saved data position is batch {batch} of epoch {epoch}, but epochs count from 0 and "
                f"have {len(self)} batches here: it was not saved by a ResumableLoader, or was changed since."
            )
        self.close()
        self._move_to(epoch, batch)

    def close(self) -> None:
        """End the loader processes, persistent ones too; the next iteration starts new ones.

        Happens by itself when the loader is dropped and when the program ends.
        """
        self._turn += 1
        self._batches = None
        self._processes.close()
        self._loader._iterator = None  # else DataLoader would reuse persistent processes that have ended

    def _move_to(self, epoch: int, batch: int) -> None:
        if batch == len(self):
            epoch, batch = epoch + 1, 0
        self._remaining.epoch, self._remaining.first = epoch, batch

    def _next_batch(self) -> Any:
        if self._batches is None:
            self._batches = self._processes.start(self._loader, self._process_start)
        try:
            batch = next(self._batches)
        except StopIteration as error:
            self.close()
            raise RuntimeError(
                f"The dataset raised StopIteration in batch {self.batch} of epoch {self.epoch}, which has "
                f"{len(self)} batches; taken as its end it would lose samples. Raise another error."
            ) from error
        except BaseException:
            self.close()  # DataLoader would go on with the batch after the failed one
            raise
        self._move_to(self.epoch, self.batch + 1)
        if self.batch == 0:
            self._batches = None
            if not self._loader.persistent_workers:
                self._processes.close()
        return batch


class _RestOfEpoch:
    """Iterates over what is left of the epoch in which the loader was when this iterator was made."""

    def __init__(self, loader: ResumableLoader, turn: int) -> None:
        self._loader = loader
        self._turn = turn
        self._epoch = loader.epoch
        self._finished = False

    def __iter__(self) -> _RestOfEpoch:
        return self

    def __next__(self) -> Any:
        if self._finished:
            raise StopIteration
        if self._turn != self._loader._turn:
            raise RuntimeError(
                "This iterator of a ResumableLoader is no longer valid: a newer one was made, a position was "
                "loaded, a batch could not be fetched, or the loader was closed. A new iter(loader) goes on "
                "at the loader's position."
            )
        batch = self._loader._next_batch()
        self._finished = self._loader.epoch != self._epoch
        return batch


class _RemainingBatches:
    """DataLoader's sampler: what is left of an epoch at the moment DataLoader asks."""

    def __init__(self, order: SampleOrder) -> None:
        self.order = order
        self.epoch = 0
        self.first = 0

    def __iter__(self) -> Iterator[BatchRequest]:
        return self.order.batches(self.epoch, self.first)

    def __len__(self) -> int:
        return self.order.batches_per_epoch - self.first


def _as_it_is(batch: Any) -> Any:
    return batch


def _refuse(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in _REFUSED:
            raise TypeError(f"ResumableLoader has no argument {name!r}.")
        if value is not None and not (name == "in_order" and value is True):
            raise ValueError(f"ResumableLoader takes no {name}: {_REFUSED[name]}.")


def _require_map_style(dataset: object) -> None:
    map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not map_style:
        raise TypeError(
            f"ResumableLoader needs a map-style dataset (with __len__ and __getitem__), and "
            f"{type(dataset).__name__} is none: a stream cannot be entered at an arbitrary place. For "
            "iterable datasets use a loader with its own state_dict and load_state_dict, such as torchdata's "
            "StatefulDataLoader."
        )
