"""Random numbers of one sample: a pure function of (seed, epoch, index), whoever fetches it and whenever."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MASK_64 = (1 << 64) - 1
MASK_32 = (1 << 32) - 1

# First words of the three families of seeds, so that no order shares its stream with a sample.
ORDER = 1
SAMPLE = 2
COLLATE = 3


class MapDataset(Protocol):
    """What a map-style dataset offers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def splitmix64(value: int) -> int:
    """Return one step of SplitMix64: a bijection on 64-bit integers; every input bit moves every output bit.

    Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (OOPSLA 2014), with the constants of
    Vigna's public-domain splitmix64.c.
    """
    value = (value + 0x9E3779B97F4A7C15) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def mixed(*words: int) -> int:
    """Return a 64-bit seed from several words of up to 64 bits; their order matters.

    Words that differ only in the last one never collide, since each round is a bijection.
    """
    seed = 0
    for word in words:
        seed = splitmix64(seed ^ (word & MASK_64))
    return seed


def seed_global_streams(seed: int) -> None:
    """Seed Python's `random`, NumPy's legacy stream and torch's CPU stream from one 64-bit seed.

    Streams on accelerators are left alone: a loader process must not touch them.
    """
    random.seed(seed)
    # NumPy and torch run the same generator (MT19937) on a 32-bit seed: from the same half of ours they would
    # draw the same numbers.
    np.random.seed(seed & MASK_32)
    torch.default_generator.manual_seed(seed >> 32)


@contextmanager
def global_streams_kept() -> Iterator[None]:
    """Leave the three global streams as they were, whatever is seeded or drawn inside."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)


@dataclass(frozen=True)
class BatchRequest:
    """Names one batch: the samples of an epoch that make it up, in order."""

    epoch: int
    indices: Sequence[int]


@dataclass(frozen=True)
class SeededBatches:
    """A dataset of whole batches: each sample is fetched, and the batch collated, under a seed of its own.

    A dataset's `__getitems__` is not used: it would fetch several samples under one seed.
    """

    dataset: MapDataset
    collate: Callable[[list[Any]], Any]
    seed: int

    def __getitem__(self, request: BatchRequest) -> Any:
        samples_of_epoch = mixed(self.seed, SAMPLE, request.epoch)
        samples = []
        # Kept in loader processes too: a `worker_init_fn` may have put its own numbers there.
        with global_streams_kept():
            for index in request.indices:
                seed_global_streams(splitmix64(samples_of_epoch ^ index))
                samples.append(self.dataset[index])
            seed_global_streams(mixed(self.seed, COLLATE, request.epoch, request.indices[0]))
            return self.collate(samples)
