"""What runs in the processes of the test of metrics: importable, so that a fork server can find it."""

import itertools
import os
from typing import Any

import torch
from support.trainers import seed

from trainerd.trainer import comm, late_metrics
from trainerd.trainer.infinite_sampler import InfiniteSampler
from trainerd.trainer.simple import SimpleTrainer


class Slow(torch.nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": self.weight.sum() * (self.rank + 1), "b": (self.weight * batch).sum() * 0 + 2}


def rank_main(rank: int, port: int, late: bool, answers: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    late_metrics.must_wait = lambda _losses: True  # as on a device that computes beside us
    seed(1)
    model = Slow(rank)
    trainer = SimpleTrainer(
        model, [torch.ones(1)], torch.optim.SGD(model.parameters(), lr=0.0), async_write_metrics=late
    )
    trainer._next_batch = lambda: (torch.ones(1), 0.5 + rank)  # type: ignore[method-assign]
    trainer.train(0, 3)
    found = {name: history.values() for name, history in trainer.storage.histories().items()}
    gathered = comm.gather(rank * 10)
    torch.manual_seed(rank)
    sampler = InfiniteSampler(6)  # its seed is drawn, and has to be one for all
    indices = list(itertools.islice(iter(sampler), 3))
    answers.put((rank, comm.get_rank(), comm.get_world_size(), comm.is_main_process(), found, gathered, indices))
    torch.distributed.destroy_process_group()
