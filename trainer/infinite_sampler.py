"""An endless order of samples whose position is one number."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from trainerd.trainer import comm
from trainerd.trainer.arguments import require_count
from trainerd.trainer.sample_order import permutation
from trainerd.trainer.sample_randomness import MASK_64

ORDER_SETTINGS = ("seed", "size", "shuffle", "world_size")


class InfiniteSampler(Sampler[int]):
    """Hands out sample indices without end, one permutation of all samples after another; for training by iterations.

    A resumable form of detectron2's TrainingSampler: all ranks share one stream, a function of the seed alone, and each
    takes every `world_size`-th index of it. In a `torch.utils.data.DataLoader` a trainer resumes it at the very batch,
    without fetching anything twice; in torchdata's StatefulDataLoader it saves itself.

    Args:
        size: the number of samples.
        shuffle: whether each pass is a permutation, or 0 to size - 1 in order.
        seed: from 0 to 2**64 - 1. Left out, it is drawn from torch's generator, the same on all ranks, and a saved
            state brings its own.
        rank: this process's number; from torch.distributed when left out.
        world_size: the number of ranks; from torch.distributed when left out.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        size: int,
        shuffle: bool = True,
        seed: int | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        require_count("InfiniteSampler", "size", size)
        if seed is None and world_size is not None and world_size != comm.get_world_size():
            raise ValueError(
                f"InfiniteSampler: world_size is {world_size} and torch.distributed has {comm.get_world_size()}, so "
                "the ranks cannot agree on a seed. Give all of them the same one."
            )
        self._seed_is_given = seed is not None
        self.seed = comm.shared_random_seed() if seed is None else seed
        require_count("InfiniteSampler", "seed", self.seed, least=0)
        if self.seed > MASK_64:
            raise ValueError(f"InfiniteSampler: seed is {seed}; it has to be less than 2**64.")
        self.size = size
        self.shuffle = bool(shuffle)
        self.rank = comm.get_rank() if rank is None else rank
        self.world_size = comm.get_world_size() if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"InfiniteSampler: rank is {self.rank} of world_size {self.world_size}.")
        self.first = 0  # how many of this rank's indices a training leaves out that begins afresh
        self._start = 0
        self._handed_out = 0
        self._order_of: tuple[int, int] | None = None  # whose permutation is kept, that of one pass at a time

    def __iter__(self) -> "InfiniteIndices":
        self._handed_out = self._start
        return InfiniteIndices(self, self._start)

    def start_at(self, consumed: int) -> None:
        """Let iterators that are made from now on begin after so many of this rank's indices."""
        self.continue_at(consumed)
        self.first = consumed

    def continue_at(self, consumed: int) -> None:
        """Let the next iterators begin there; a training that begins afresh goes back to `first`."""
        require_count("InfiniteSampler", "the place to start at", consumed, least=0)
        self._start = self._handed_out = consumed

    def indices(self, consumed: int, count: int) -> list[int]:
        """Return `count` of this rank's indices, after the first `consumed` ones."""
        return [self.index(place) for place in range(consumed, consumed + count)]

    def index(self, place: int) -> int:
        """Return this rank's index number `place`."""
        epoch, offset = divmod(place * self.world_size + self.rank, self.size)
        if not self.shuffle:
            return offset
        if self._order_of != (self.seed, epoch):
            self._order, self._order_of = permutation(self.seed, epoch, self.size), (self.seed, epoch)
        return int(self._order[offset])

    def state_dict(self) -> dict[str, Any]:
        """Return how many indices the newest iterator handed out, and what defines the order; the same on all ranks."""
        return {"start": self._handed_out, **{name: getattr(self, name) for name in ORDER_SETTINGS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the saved sampler was, with its seed if none was given; ValueError if the order is another."""
        differing = [
            f"{name} was {state.get(name, 'not recorded')}, now {getattr(self, name)}"
            for name in ORDER_SETTINGS
            if state.get(name) != getattr(self, name) and (name != "seed" or self._seed_is_given or name not in state)
        ]
        if differing:
            raise ValueError(
                f"The saved position belongs to another order of samples ({'; '.join(differing)}): "
                "set it back, or start afresh."
            )
        self.start_at(state["start"])
        self.seed = state["seed"]


class InfiniteIndices(Iterator[int]):
    """One rank's indices from some place on."""

    def __init__(self, sampler: InfiniteSampler, consumed: int) -> None:
        self._sampler = sampler
        self._consumed = consumed

    def __next__(self) -> int:
        index = self._sampler.index(self._consumed)
        self._consumed += 1
        self._sampler._handed_out = self._consumed
        return index

    def state_dict(self) -> dict[str, Any]:
        """Return how many indices were handed out; torchdata saves iterators of samplers that have this."""
        return {"consumed": self._consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after so many indices."""
        self._consumed = self._sampler._handed_out = state["consumed"]
