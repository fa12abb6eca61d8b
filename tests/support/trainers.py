"""Small trainers that use every source of randomness, and the comparison of what they end with."""

import io
import random
from typing import Any

import numpy as np
import torch
from torch import nn

from trainerd.trainer.base import HookBase
from trainerd.trainer.session import NullSession
from trainerd.trainer.simple import SimpleTrainer


class Net(nn.Module):
    """Dropout, BatchNorm and tied weights; the loss also depends on Python's and NumPy's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.last(self.drop(self.norm(self.first(batch))))
        noise = random.random() + float(np.random.rand())
        return {"fit": (out - batch).square().mean(), "noise": out.mean() * noise}


class Recorder(HookBase):
    """Keeps what every iteration trained on and ended with; a test's eyes, without state of its own."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, float]] = []

    def after_step(self) -> None:
        loss = self.trainer.storage.history("total_loss").latest()
        self.rows.append((self.trainer.iter, loss, float(self.trainer.optimizer.param_groups[0]["lr"])))


class StopAt(NullSession):
    """A session that takes the state at `step`, as a file would hold it, and stops there."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.state: dict[str, Any] = {}
        self.marks: list[tuple[str, int]] = []

    def mark(self, phase: str, step: int) -> None:
        self.marks.append((phase, step))

    def end_of_step(self, trainer: Any) -> bool:
        if trainer.iter + 1 != self.step:
            return False
        assert trainer.step == self.step
        self.state = through_a_file(trainer.state_dict())
        return True


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Write a state with torch.save and read it without running any pickled code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def batches(count: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(6, 4, generator=generator) for _ in range(count)]


def simple_trainer(**options: Any) -> SimpleTrainer:
    seed(1)
    model = Net()
    loader = options.pop("loader", None) or batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return SimpleTrainer(model, loader, optimizer, **options)


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Compare two states bit for bit; the clock's readings are left out."""
    assert type(one) is type(other), path
    if isinstance(one, dict):
        keys = [key for key in one if key != "data_time"]
        assert keys == [key for key in other if key != "data_time"], path
        for key in keys:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{path}.{index}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert one.shape == other.shape, path
        left, right = (t.detach().contiguous().flatten().view(torch.uint8).tolist() for t in (one, other))
        assert left == right, path
    else:
        assert one == other, path
