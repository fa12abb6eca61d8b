"""Which samples make up which batch: a pure function of the seed, the epoch and a few settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainerd.trainer.sample_randomness import MASK_64, ORDER, BatchRequest, mixed

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt


def permutation(seed: int, epoch: int, samples: int) -> npt.NDArray[np.int64]:
    """Return a permutation of `range(samples)`, int64, that depends on (seed, epoch, samples) alone.

    Sample i gets the i-th number of a SplitMix64 stream as its key, and the samples are sorted by key.
    Neither torch nor NumPy promises the same shuffle in every release, and runs outlive releases.
    """
    keys = np.arange(1, samples + 1, dtype=np.uint64)
    keys *= np.uint64(0x9E3779B97F4A7C15)
    keys += np.uint64(mixed(seed, ORDER, epoch))
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(0xBF58476D1CE4E5B9)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(31)
    # The mix is a bijection, so no two keys are equal and the kind of sort cannot matter.
    return np.argsort(keys)


@dataclass(frozen=True)
class SampleOrder:
    """The order of every epoch, as one rank sees it.

    With `drop_last` each rank gets `samples // world_size` samples and drops its last incomplete batch.
    Without, the epoch is filled up from its own beginning until every rank has as many (as
    `DistributedSampler` does).
    """

    samples: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    rank: int
    world_size: int

    @property
    def samples_per_rank(self) -> int:
        """Samples of one rank in an epoch, before an incomplete batch is dropped."""
        if self.drop_last:
            return self.samples // self.world_size
        return -(-self.samples // self.world_size)

    @property
    def batches_per_epoch(self) -> int:
        """Batches of one epoch, the same on every rank."""
        if self.drop_last:
            return self.samples_per_rank // self.batch_size
        return -(-self.samples_per_rank // self.batch_size)

    def indices(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return this rank's sample indices of an epoch, int64, in the order in which they are trained on."""
        in_turn = np.arange(self.samples)
        order = permutation(self.seed, epoch, self.samples) if self.shuffle else in_turn
        return np.resize(order, self.samples_per_rank * self.world_size)[self.rank :: self.world_size]

    def batches(self, epoch: int, first: int) -> Iterator[BatchRequest]:
        """Yield the batches of an epoch from number `first` on."""
        indices = self.indices(epoch)
        for batch in range(first, self.batches_per_epoch):
            start = batch * self.batch_size
            yield BatchRequest(epoch, indices[start : start + self.batch_size].tolist())


def checked_order(
    samples: int,
    *,
    batch_size: Any,
    shuffle: bool,
    seed: Any,
    drop_last: bool,
    rank: int | None,
    world_size: int | None,
) -> SampleOrder:
    """Return the order that a loader's arguments ask for; ranks not given come from torch.distributed.

    Raises `ValueError` when a setting is out of range or no batch is left to train on.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if world_size is None:
        world_size = torch.distributed.get_world_size() if distributed else 1
    if rank is None:
        rank = torch.distributed.get_rank() if distributed else 0
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank} of world_size {world_size}; ranks go from 0 to world_size - 1.")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size is {batch_size!r}; ResumableLoader needs a whole number of at least 1.")
    if not isinstance(seed, int) or not 0 <= seed <= MASK_64:
        raise ValueError(f"seed is {seed!r}; ResumableLoader needs a whole number from 0 to 2**64 - 1.")
    if samples == 0:
        raise ValueError("The dataset is empty (len 0): there is nothing to train on.")
    order = SampleOrder(samples, batch_size, bool(shuffle), seed, bool(drop_last), rank, world_size)
    if order.batches_per_epoch == 0:
        raise ValueError(
            f"drop_last leaves no batch at all: {samples} samples on {world_size} rank(s) do not fill one "
            f"batch of {batch_size}. Use drop_last=False or a smaller batch_size."
        )
    return order
