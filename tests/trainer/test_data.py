"""ResumableLoader: the order, the position, and what it refuses."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from trainerd.trainer.data import ResumableLoader
from trainerd.trainer.sample_order import permutation
from trainerd.trainer.sample_randomness import ORDER, mixed, splitmix64


class Noisy:
    """Samples that carry their index and one draw from each global stream, the transform's included."""

    def __init__(self, samples: int = 13, transform=None) -> None:
        self.samples = samples
        self.transform = transform

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int):
        if index >= self.samples:
            raise IndexError(index)
        drawn = [random.random(), float(np.random.standard_normal()), float(torch.rand(()))]
        sample = torch.tensor([float(index), *drawn], dtype=torch.float64)
        return self.transform(sample) if self.transform else sample


def jitter(sample: torch.Tensor) -> torch.Tensor:
    return sample + torch.randn(4, dtype=torch.float64) * random.gauss(0, 1) + np.random.rand()


def noisy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(()) + random.random() + np.random.rand()


def loader(dataset=None, **changes) -> ResumableLoader:
    arguments = {"batch_size": 3, "shuffle": True, "seed": 5} | changes
    return ResumableLoader(dataset if dataset is not None else Noisy(transform=jitter), **arguments)


def epochs(of: ResumableLoader, count: int) -> list[torch.Tensor]:
    return [batch for _ in range(count) for batch in of]


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def global_streams():
    name, keys, position, has_gauss, gauss = np.random.get_state()
    return random.getstate(), name, keys.tolist(), position, has_gauss, gauss, torch.get_rng_state().tolist()


@given(samples=st.integers(1, 200), batch_size=st.integers(1, 20), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=50, deadline=None)
def test_no_sample_is_left_out_or_seen_twice_in_a_shuffled_epoch(samples, batch_size, seed):
    """Each epoch is a permutation of all samples, in batches of the size asked for."""
    of = ResumableLoader(range(samples), batch_size, shuffle=True, seed=seed)
    for _ in range(2):
        batches = list(of)
        assert len(batches) == len(of)
        assert all(len(batch) == batch_size for batch in batches[:-1])
        assert sorted(torch.cat(batches).tolist()) == list(range(samples))


def test_epochs_do_not_repeat_each_others_order():
    """Another epoch or another seed is another order."""
    first, second = (torch.cat(list(of)).tolist() for of in [loader(range(50))] * 2)
    other_seed = torch.cat(list(loader(range(50), seed=6))).tolist()
    assert first != second
    assert first != other_seed


def test_an_order_in_use_never_changes_between_releases():
    """Golden values: a run that resumes under a newer trainerd meets the order that it left."""
    of = ResumableLoader(range(10), 10, shuffle=True, seed=1234)
    assert next(iter(of)).tolist() == [1, 4, 0, 9, 8, 5, 2, 7, 6, 3]
    assert next(iter(of)).tolist() == [0, 8, 2, 3, 9, 1, 5, 4, 7, 6]


def test_splitmix64_is_the_published_one():
    """First outputs of splitmix64.c seeded with 1234567, and the vectorised keys agree with it."""
    golden_gamma = 0x9E3779B97F4A7C15
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64(1234567 + step * golden_gamma) for step in range(4)] == published
    first = mixed(7, ORDER, 3)
    by_key = sorted(range(100), key=lambda sample: splitmix64(first + sample * golden_gamma))
    assert permutation(7, 3, 100).tolist() == by_key


def test_without_shuffle_samples_come_in_their_own_order():
    """shuffle=False is the dataset's order, epoch after epoch."""
    of = ResumableLoader(range(7), 3)
    for _ in range(2):
        assert [batch.tolist() for batch in of] == [[0, 1, 2], [3, 4, 5], [6]]


@given(
    samples=st.integers(1, 100),
    batch_size=st.integers(1, 8),
    world_size=st.integers(1, 7),
    drop_last=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_no_rank_waits_for_a_batch_that_another_does_not_have(samples, batch_size, world_size, drop_last):
    """Ranks have equally many batches; their shards are disjoint (but for the filling-up) and cover all."""
    if drop_last and samples // world_size < batch_size:
        return
    shards = [
        [
            batch.tolist()
            for batch in ResumableLoader(
                range(samples), batch_size, True, drop_last=drop_last, rank=rank, world_size=world_size
            )
        ]
        for rank in range(world_size)
    ]
    sizes = [[len(batch) for batch in shard] for shard in shards]
    assert all(size == sizes[0] for size in sizes)
    seen = sorted(sample for shard in shards for batch in shard for sample in batch)
    if drop_last:
        assert len(set(seen)) == len(seen)
        assert all(len(batch) == batch_size for shard in shards for batch in shard)
    else:
        assert set(seen) == set(range(samples))
        assert len(seen) - samples < world_size


def test_ranks_are_taken_from_torch_distributed(tmp_path):
    """In an initialised process group nothing needs to be said about ranks."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert loader().state_dict()["world_size"] == 1
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("position", range(12))
def test_resume_at_every_position_equals_the_undisturbed_run(position):
    """Wherever a run of two epochs is cut (their ends included), a fresh loader yields exactly the rest."""
    whole = epochs(loader(), 3)
    before = loader()
    batches = itertools.chain.from_iterable(itertools.repeat(before))
    head = list(itertools.islice(batches, position))
    state = before.state_dict()
    after = loader()
    after.load_state_dict(state)
    tail = list(itertools.islice(itertools.chain.from_iterable(itertools.repeat(after)), 15 - position))
    assert_same(head + tail, whole)
    assert after.state_dict() == {**state, "epoch": 3, "batch": 0}


def test_state_at_the_end_of_an_epoch_is_the_beginning_of_the_next():
    """The last batch handed out ends the epoch, whether or not the loop has noticed."""
    of = loader()
    iterator = iter(of)
    for _ in range(len(of)):
        next(iterator)
    assert (of.state_dict()["epoch"], of.state_dict()["batch"]) == (1, 0)
    with pytest.raises(StopIteration):
        next(iterator)
    assert (of.state_dict()["epoch"], of.state_dict()["batch"]) == (1, 0)


def test_a_foreign_count_at_the_end_of_an_epoch_does_not_give_an_empty_epoch():
    """A position saved as "all batches of epoch 0" goes on with epoch 1."""
    of = loader()
    of.load_state_dict({**of.state_dict(), "batch": len(of)})
    assert_same(list(of), epochs(loader(), 2)[len(of) :])


def test_after_a_break_no_batch_is_lost_or_repeated():
    """Breaking out and iterating again goes on in the same epoch."""
    of = loader()
    head = []
    for batch in of:
        head.append(batch)
        if len(head) == 2:
            break
    assert_same([*head, *of], epochs(loader(), 1))


def test_the_older_of_two_iterators_cannot_steal_batches():
    """Only the newest iterator hands out batches."""
    of = loader()
    older = iter(of)
    next(older)
    newer = iter(of)
    with pytest.raises(RuntimeError, match="newer one was made"):
        next(older)
    assert torch.equal(next(newer), epochs(loader(), 1)[1])


def test_an_iterator_from_before_load_state_dict_cannot_go_on():
    """Loading a position ends iterators that stand elsewhere."""
    of = loader()
    iterator = iter(of)
    next(iterator)
    of.load_state_dict(loader().state_dict())
    with pytest.raises(RuntimeError, match="position was loaded"):
        next(iterator)
    assert_same(list(of), epochs(loader(), 1))


def test_a_finished_iterator_stays_finished():
    """StopIteration is for good, also after newer iterators."""
    of = loader()
    iterator = iter(of)
    list(iterator)
    next(iter(of))
    assert next(iterator, None) is None


def test_fetching_leaves_the_programs_own_random_numbers_alone():
    """No global stream moves, whatever the dataset draws; a pending normal of NumPy's included."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    np.random.standard_normal()
    random.gauss(0, 1)
    before = global_streams()
    of = loader(collate_fn=noisy_collate)
    list(of)
    next(iter(of))
    of.state_dict()
    assert global_streams() == before


def test_a_failing_sample_leaves_the_programs_own_random_numbers_alone():
    """The streams are put back on the way out of an exception too."""
    before = global_streams()
    with pytest.raises(ZeroDivisionError):
        list(loader(Noisy(transform=lambda sample: 1 / 0)))
    assert global_streams() == before


def test_numpy_and_torch_do_not_draw_the_same_numbers():
    """Both run MT19937: seeded alike they would give correlated augmentations."""

    class Bits(Noisy):
        def __getitem__(self, index):
            return np.random.randint(0, 2**24), int(torch.randint(0, 2**24, ())), random.getrandbits(24)

    for batch in ResumableLoader(Bits(40), 40):
        for one, other in itertools.combinations(batch, 2):
            assert not torch.equal(one, other)
            assert (one == other).sum() <= 1


def test_an_exception_surfaces_as_itself_and_the_batch_can_be_tried_again():
    """The error is the dataset's own; the position stays before the batch that failed."""

    class FailsOnce(Noisy):
        failures = 1

        def __getitem__(self, index):
            if index == 4 and self.failures:
                self.failures -= 1
                raise LookupError("sample 4 is on a disk that is gone")
            return super().__getitem__(index)

    of = loader(FailsOnce(transform=jitter), shuffle=False)
    iterator = iter(of)
    head = [next(iterator)]
    with pytest.raises(LookupError, match="sample 4"):
        next(iterator)
    assert of.state_dict()["batch"] == 1
    with pytest.raises(RuntimeError, match="no longer valid"):
        next(iterator)
    assert_same([*head, *of], epochs(loader(shuffle=False), 1))


def test_a_stop_iteration_of_the_dataset_does_not_end_the_epoch():
    """Samples would be lost silently."""

    class Leaky(Noisy):
        def __getitem__(self, index):
            return next(iter([]))

    with pytest.raises(RuntimeError, match="dataset raised StopIteration in batch 0 of epoch 0"):
        list(loader(Leaky()))


def test_getitems_of_a_dataset_does_not_bypass_the_seeds():
    """torch's Subset fetches whole batches by __getitems__; each sample still has its own seed."""
    dataset = Noisy(transform=jitter)
    subset = torch.utils.data.Subset(dataset, range(len(dataset)))
    assert_same(epochs(loader(subset), 1), epochs(loader(dataset), 1))


@pytest.mark.parametrize(
    ("change", "name", "old", "new"),
    [
        ({"seed": 6}, "seed", "5", "6"),
        ({"shuffle": False}, "shuffle", "True", "False"),
        ({"batch_size": 4}, "batch_size", "3", "4"),
        ({"drop_last": True}, "drop_last", "False", "True"),
        ({"dataset": Noisy(14)}, "samples", "13", "14"),
        ({"world_size": 2, "rank": 1}, "world_size", "1", "2"),
    ],
)
def test_a_position_in_another_order_is_refused_with_both_values(change, name, old, new):
    """What defines the order must agree; the loader stays where it was."""
    of = loader(**change)
    with pytest.raises(ValueError, match=rf"\b{name} was {old}, now {new}\b"):
        of.load_state_dict({**loader().state_dict(), "batch": 1})
    assert of.state_dict()["batch"] == 0


def test_a_state_of_something_else_is_refused():
    """A state without the settings, or with an impossible position, is no position here."""
    of = loader()
    with pytest.raises(ValueError, match="seed was not recorded, now 5"):
        of.load_state_dict({"epoch": 0, "batch": 1})
    with pytest.raises(ValueError, match="batch 99 of epoch 0"):
        of.load_state_dict({**of.state_dict(), "batch": 99})


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dataset": Stream()}, TypeError, "Stream is none"),
        ({"dataset": iter([1])}, TypeError, "map-style dataset"),
        ({"dataset": []}, ValueError, "dataset is empty"),
        ({"batch_size": 14, "drop_last": True}, ValueError, "drop_last leaves no batch"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"batch_size": None}, ValueError, "batch_size is None"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank is 2 of world_size 2"),
        ({"sampler": [0]}, ValueError, "takes no sampler: the order"),
        ({"batch_sampler": [[0]]}, ValueError, "takes no batch_sampler"),
        ({"generator": torch.Generator()}, ValueError, "takes no generator"),
        ({"in_order": False}, ValueError, "takes no in_order"),
        ({"timeout": 3}, ValueError, "timeout=3 needs num_workers > 0"),
        ({"prefetch_factor": 2}, ValueError, "prefetch_factor"),
        ({"bach_size": 2}, TypeError, "no argument 'bach_size'"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_construction(arguments, error, message):
    """Not at the first batch, and not by looping for ever."""
    with pytest.raises(error, match=message):
        loader(**arguments)


def test_arguments_of_dataloader_at_their_defaults_are_accepted():
    """Code that passes DataLoader's defaults along still works."""
    loader(sampler=None, batch_sampler=None, generator=None, in_order=True)


def test_a_dataset_smaller_than_a_batch_is_one_batch():
    """Every epoch then has one short batch."""
    of = loader(Noisy(2), batch_size=8)
    assert [len(batch) for batch in epochs(of, 3)] == [2, 2, 2]


def test_the_state_survives_torch_save_without_pickle(tmp_path):
    """Plain Python values only."""
    torch.save(loader().state_dict(), tmp_path / "state.pt")
    loader().load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))


def test_a_resume_is_graded_bitwise():
    """The grade that the trainer prints."""
    assert loader().resume_grade == ("bitwise", "")
