"""Datasets whose samples say which they are and carry random numbers, and a trainer that notes what it saw."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from support.trainers import seed
from torch.utils.data import Dataset, IterableDataset

from trainerd.trainer import SimpleTrainer


def sample(number: int) -> torch.Tensor:
    """The number, and one draw from each global stream."""
    return torch.tensor([float(number), random.random(), float(np.random.rand()), float(torch.rand(()))])


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return sample(index)


class Stream(IterableDataset[torch.Tensor]):
    """Numbers in order, with a position of its own; each worker has its share. At its end it begins anew by itself."""

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.position = 0
        self.resumed = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.rest()
        self.position = 0

    def rest(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        while first + self.position * stride < self.size:
            number = first + self.position * stride
            self.position += 1
            yield sample(number)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.resumed = True


class StaysAtItsEnd(Stream):
    """Begins anew when it is iterated again."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.begin()
        return self.rest()

    def begin(self) -> None:
        if not self.resumed:
            self.position = 0
        self.resumed = False


class StaysAtItsEndLazily(StaysAtItsEnd):
    """Begins anew when the first sample of another iteration is asked for."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.begin()
        yield from self.rest()


STREAMS = (Stream, StaysAtItsEnd, StaysAtItsEndLazily)


class Seen(torch.nn.Module):
    """A model that notes each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.batches: list[Any] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.batches.append(batch.reshape(-1, 4).tolist())
        return (batch * self.weight).mean() + torch.rand(()) * random.random() * float(np.random.rand())


def build(loader: Any) -> SimpleTrainer:
    """A trainer over what `loader()` returns, seeded before it is called."""
    seed(1)
    model = Seen()
    return SimpleTrainer(model, loader(), torch.optim.SGD(model.parameters(), lr=0.01))


def ids(batches: list[Any]) -> list[list[int]]:
    """The samples' numbers alone."""
    return [[int(row[0]) for row in batch] for batch in batches]
