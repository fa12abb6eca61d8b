"""The ranks of a training: who am I, how many are we, and a way to bring plain objects together."""

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_world_size() -> int:
    """Return the number of ranks; 1 when torch.distributed is not initialised."""
    return dist.get_world_size() if _is_distributed() else 1


def get_rank() -> int:
    """Return this process's rank; 0 when torch.distributed is not initialised."""
    return dist.get_rank() if _is_distributed() else 0


def is_main_process() -> bool:
    """Say whether this is rank 0."""
    return get_rank() == 0


def gather(data: Any, dst: int = 0) -> list[Any]:
    """Return every rank's `data` in the order of ranks on rank `dst`, an empty list elsewhere. Every rank must call it.

    `data` is pickled on its way, so it goes between the processes of one training only.
    """
    if get_world_size() == 1:
        return [data]
    group = _object_group(dist.group.WORLD)
    gathered = [None] * get_world_size() if get_rank() == dst else None
    dist.gather_object(data, gathered, dst=dst, group=group)
    return gathered or []


@lru_cache(maxsize=1)
def _object_group(world: Any) -> Any:
    """Objects travel over CPU memory; NCCL would send them through the device and wait for it."""
    return dist.new_group(backend="gloo") if dist.get_backend(world) == "nccl" else world


def shared_random_seed() -> int:
    """Return a random number from 0 to 2**63 - 1, the same on every rank. Every rank must call it.

    It is drawn from torch's generator of rank 0, so that a seeded program draws the same one each time.
    """
    seed = [int(torch.randint(2**63 - 1, (), dtype=torch.int64))]
    if get_world_size() > 1:
        dist.broadcast_object_list(seed, src=0, group=_object_group(dist.group.WORLD))
    return seed[0]
