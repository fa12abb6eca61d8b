"""Metrics that are written some iterations late, so that the training thread never waits for the device."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainerd.trainer import comm

MOST_WAITING = 16  # how far the device may fall behind before training waits for it after all

Write = Callable[[Mapping[str, torch.Tensor], float, int, str], None]


def must_wait(losses: Mapping[str, torch.Tensor]) -> bool:
    """Say whether reading the losses now would wait for a device."""
    for loss in losses.values():  # noqa: SIM110 - a generator would cost more than all the rest
        if not loss.is_cpu:
            return True
    return False


@dataclass(frozen=True)
class _Waiting:
    losses: Mapping[str, torch.Tensor]  # on their way to the CPU
    data_time: float
    iteration: int
    prefix: str
    arrived: torch.cuda.Event | None


class LateMetrics:
    """Losses in the order of their iterations; no thread, so errors are raised where training can see them."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, losses: Mapping[str, torch.Tensor], data_time: float, iteration: int, prefix: str) -> None:
        """Start moving losses to the CPU, to be written when they are there."""
        arrived = None
        detached = {name: loss.detach() for name, loss in losses.items()}
        device = next((loss.device for loss in detached.values() if loss.is_cuda), None)
        if device is not None:
            # Into pinned memory, which torch takes for a copy that nobody waits for.
            detached = {name: loss.to("cpu", non_blocking=True) for name, loss in detached.items()}
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(torch.cuda.current_stream(device))
        self._waiting.append(_Waiting(detached, data_time, iteration, prefix, arrived))

    def write(self, write: Write) -> None:
        """Write what has arrived, oldest first; what `write` raises goes through, and that entry is gone."""
        # Ranks must agree on what they write together, and only one of them may see that it has arrived.
        several_ranks = comm.get_world_size() > 1
        while self._waiting:
            oldest = self._waiting[0]
            must = several_ranks or len(self._waiting) > MOST_WAITING
            if oldest.arrived is not None and not must and not oldest.arrived.query():  # type: ignore[no-untyped-call]
                return
            self._write_oldest(write)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return what waits, oldest first: a save must not change which metrics are written when."""
        for one in self._waiting:
            if one.arrived is not None:
                one.arrived.synchronize()
        return [
            {"losses": dict(one.losses), "data_time": one.data_time, "iteration": one.iteration, "prefix": one.prefix}
            for one in self._waiting
        ]

    def load_state_dict(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Wait with what `state_dict` returned."""
        self._waiting = deque(
            _Waiting(one["losses"], one["data_time"], one["iteration"], one["prefix"], None) for one in state
        )

    def write_all(self, write: Write) -> None:
        """Wait for everything and write it."""
        while self._waiting:
            self._write_oldest(write)

    def _write_oldest(self, write: Write) -> None:
        oldest = self._waiting.popleft()
        if oldest.arrived is not None:
            oldest.arrived.synchronize()
        write(oldest.losses, oldest.data_time, oldest.iteration, oldest.prefix)
