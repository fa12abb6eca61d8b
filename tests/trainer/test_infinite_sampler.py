"""InfiniteSampler: an endless stream that every rank has its share of, and that begins anywhere."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainerd.trainer import InfiniteSampler


def first(sampler: InfiniteSampler, count: int) -> list[int]:
    return list(itertools.islice(iter(sampler), count))


@given(st.integers(1, 20), st.integers(0, 2**64 - 1), st.integers(1, 5), st.booleans())
def test_a_sample_is_left_out_of_a_pass(size: int, seed: int, world_size: int, shuffle: bool) -> None:
    """Ranks together have permutations of all samples, one after another, and no other order than the seed's."""
    passes = 3
    each = -(-size * passes // world_size)
    ranks = [
        first(InfiniteSampler(size, shuffle, seed, rank=rank, world_size=world_size), each)
        for rank in range(world_size)
    ]
    stream = [index for together in zip(*ranks, strict=True) for index in together]
    for number in range(passes):
        one = stream[number * size : (number + 1) * size]
        assert sorted(one) == list(range(size))
        assert shuffle or one == list(range(size))
    assert stream[:each] == first(InfiniteSampler(size, shuffle, seed), each)


@given(st.integers(1, 15), st.integers(0, 60), st.integers(0, 1))
def test_a_resumed_stream_begins_elsewhere(size: int, consumed: int, rank: int) -> None:
    """An iterator goes on from its state, and a new one from where the sampler is told to start."""
    options = {"seed": 3, "rank": rank, "world_size": 2}
    whole = first(InfiniteSampler(size, **options), consumed + 20)
    sampler = InfiniteSampler(size, **options)
    iterator = iter(sampler)
    assert list(itertools.islice(iterator, consumed)) == whole[:consumed]
    other = iter(InfiniteSampler(size, **options))
    other.load_state_dict(iterator.state_dict())
    assert list(itertools.islice(other, 20)) == whole[consumed:]
    sampler.start_at(consumed)
    again = InfiniteSampler(size, **options)
    again.load_state_dict(sampler.state_dict())
    assert first(again, 20) == whole[consumed:] == sampler.indices(consumed, 20)


def test_passes_come_in_one_order() -> None:
    """Each pass and each seed has its own; a drawn seed follows torch's generator."""
    passes = first(InfiniteSampler(50, seed=1), 100)
    assert passes[:50] != passes[50:]
    assert passes[:50] != first(InfiniteSampler(50, seed=2), 50)
    torch.manual_seed(5)
    one = InfiniteSampler(50)
    torch.manual_seed(5)
    assert InfiniteSampler(50).seed == one.seed != InfiniteSampler(50).seed


def test_arguments_that_leave_nothing() -> None:
    """Refused with what is allowed."""
    for arguments, problem in (
        ({"size": 0}, "size is 0"),
        ({"size": 5, "seed": -1}, "seed is -1"),
        ({"size": 5, "seed": 2**64}, "less than 2\\*\\*64"),
        ({"size": 5, "seed": 1, "rank": 2, "world_size": 2}, "rank is 2 of world_size 2"),
        ({"size": 5, "rank": 1, "world_size": 2}, "the ranks cannot agree on a seed"),
    ):
        with pytest.raises(ValueError, match=f"InfiniteSampler: .*{problem}"):
            InfiniteSampler(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shuffle was True, now False"):
        InfiniteSampler(5, shuffle=False).load_state_dict(InfiniteSampler(5).state_dict())
    with pytest.raises(ValueError, match="start at is -1"):
        InfiniteSampler(5).start_at(-1)


def test_a_loop_of_ones_own_saves_the_beginning() -> None:
    """The state counts what the newest iterator handed out."""
    sampler = InfiniteSampler(5, seed=3)
    iterator = iter(sampler)
    whole = [next(iterator) for _ in range(7)]
    state = sampler.state_dict()
    whole += [next(iterator) for _ in range(7)]
    resumed = InfiniteSampler(5, seed=3)
    resumed.load_state_dict(state)
    assert first(resumed, 7) == whole[7:]
    assert first(sampler, 7) == whole[:7]


def test_a_changed_seed_goes_unnoticed() -> None:
    """A seed that the code gives must be the saved one; a drawn one is replaced by it."""
    state = InfiniteSampler(5, seed=3).state_dict()
    with pytest.raises(ValueError, match="seed was 3, now 4"):
        InfiniteSampler(5, seed=4).load_state_dict(state)
    drawn = InfiniteSampler(5)
    drawn.load_state_dict(state)
    assert drawn.seed == 3
