"""Every kind of loader, killed and resumed: what its grade promises is what comes."""

import gc
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from support.loaders import Numbers, Stream, build, ids
from support.states import assert_same
from support.trainers import StopAt, seed, through_a_file
from torch.utils.data import BatchSampler, DataLoader

from trainerd.trainer import InfiniteSampler, StateMismatch
from trainerd.trainer.data_position import DataPosition

STEPS = 14  # of 4 batches an epoch: three epochs and a half

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own


def stateful(*arguments: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(*arguments, **options)


def infinite(**options: Any) -> InfiniteSampler:
    return InfiniteSampler(10, **options)


BITWISE: dict[str, Callable[[], Any]] = {
    "infinite sampler": lambda: DataLoader(Numbers(), 3, sampler=infinite(seed=4)),
    "infinite sampler, seed drawn": lambda: DataLoader(Numbers(), 3, sampler=infinite()),
    "infinite sampler in a batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(infinite(seed=4), 3, drop_last=True)
    ),
    "infinite sampler, no batches": lambda: DataLoader(Numbers(), None, sampler=infinite(seed=4, shuffle=False)),
    "torchdata": lambda: stateful(Numbers(), batch_size=3, shuffle=True),
    "torchdata, infinite sampler": lambda: stateful(Numbers(), batch_size=3, sampler=infinite(seed=4)),
}
SAME_DATA: dict[str, Callable[[], Any]] = {
    "infinite sampler, workers": lambda: DataLoader(Numbers(), 3, sampler=infinite(seed=4), num_workers=2),
    "iterable dataset with state": lambda: DataLoader(Stream(), 3),
    "iterable dataset with state, incomplete batches dropped": lambda: DataLoader(Stream(), 3, drop_last=True),
    "iterable dataset with state, no batches": lambda: DataLoader(Stream(), None),
    "torchdata, workers": lambda: stateful(Numbers(), batch_size=3, shuffle=True, num_workers=2),
    "torchdata, infinite sampler, workers": lambda: stateful(
        Numbers(), batch_size=3, sampler=infinite(seed=4), num_workers=2
    ),
    "torchdata, iterable": lambda: stateful(Stream(), batch_size=3),
    "torchdata, iterable, workers": lambda: stateful(Stream(12), batch_size=3, num_workers=2),
}
KILLS = [[1], [3], [4], [5], [8], [2, 3], [4, 8, 12], [3, 4, 5, 13]]


def trained_with_kills(make: Callable[[], Any], kills: list[int]) -> tuple[Any, list[Any]]:
    trainer, seen, start = build(make), [], 0
    for stop in kills:
        trainer.session = StopAt(stop)
        trainer.train(start, STEPS)
        seen += trainer.model.batches
        trainer_state, start = trainer.session.state, stop
        trainer = build(make)
        seed(99)  # whatever the new process has drawn meanwhile
        trainer.load_state_dict(trainer_state)
    trainer.train(start, STEPS)
    return trainer, seen + trainer.model.batches


@pytest.mark.parametrize("kind", BITWISE)
def test_a_bitwise_loader_repeats_or_changes_a_sample(kind: str) -> None:
    """Killed in mid-epoch, at its end, before its first batch, twice in one: samples and their random numbers."""
    expected = build(BITWISE[kind])
    expected.train(0, STEPS)
    for kills in KILLS:
        trainer, seen = trained_with_kills(BITWISE[kind], kills)
        assert (trainer.restored_grade, trainer.restored_reason) == ("bitwise", "")
        assert seen == expected.model.batches
        assert_same(trainer.model.state_dict(), expected.model.state_dict())


@pytest.mark.parametrize("kind", SAME_DATA)
def test_a_loader_of_the_same_data_repeats_or_leaves_out_a_sample(kind: str) -> None:
    """The order is exact; why the grade is not higher is said."""
    expected = build(SAME_DATA[kind])
    expected.train(0, STEPS)
    for kills in KILLS[::2] if "workers" in kind else KILLS:
        trainer, seen = trained_with_kills(SAME_DATA[kind], kills)
        assert trainer.restored_grade == "same data"
        assert trainer.restored_reason
        assert ids(seen) == ids(expected.model.batches)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Numbers(), 3),
        lambda: DataLoader(Stream(), 3, num_workers=1),
        lambda: DataLoader(Numbers(), 3, sampler=infinite(seed=4), num_workers=1, in_order=False),
    ],
)
def test_a_position_is_called_more_than_it_is(make: Callable[[], Any]) -> None:
    """Batches that are fetched again and skipped prove nothing about their order."""
    trainer = build(make)
    trainer.train(0, 2)
    resumed = build(make)
    resumed.load_state_dict(through_a_file(trainer.state_dict()))
    assert resumed.restored_grade == "position only"
    is_stream = isinstance(resumed.data_loader.dataset, Stream)
    assert ("StatefulDataLoader" in resumed.restored_reason) == is_stream


def test_a_promise_of_the_dataset_is_not_heard() -> None:
    """A dataset that says that it resumes bitwise is believed, as a loader is."""

    class Sure(Stream):
        resume_grade = "bitwise", ""

    for make in (lambda: DataLoader(Sure(), 3), lambda: stateful(Sure(), batch_size=3)):
        trainer = build(make)
        trainer.train(0, 2)
        resumed = build(make)
        resumed.load_state_dict(through_a_file(trainer.state_dict()))
        assert resumed.restored_grade == "bitwise"


def test_a_loader_of_another_kind_takes_the_position() -> None:
    """The kinds do not mix; the message names both."""
    makes = {
        "gave its own state": lambda: stateful(Numbers(), batch_size=3),
        "was a DataLoader over an InfiniteSampler": lambda: DataLoader(Numbers(), 3, sampler=infinite(seed=4)),
        "was a DataLoader over an iterable dataset with state": lambda: DataLoader(Stream(), 3),
        "gave no state of its own": lambda: DataLoader(Numbers(), 3),
    }
    for said, make in makes.items():
        trainer = build(make)
        trainer.train(0, 2)
        state = through_a_file(trainer.state_dict())
        for other in makes.values():
            if other is not make:
                with pytest.raises(StateMismatch, match=f"the data loader that was saved {said}, and this one"):
                    build(other).load_state_dict(state)


def test_another_batch_size_counts_other_samples() -> None:
    """Position and batch size must agree, and so must the sampler's settings."""
    trainer = build(lambda: DataLoader(Numbers(), 3, sampler=infinite(seed=4)))
    trainer.train(0, 5)
    state = through_a_file(trainer.state_dict())
    with pytest.raises(StateMismatch, match=r"counts 5 batches and 15 samples .* a batch has 4 here"):
        build(lambda: DataLoader(Numbers(), 4, sampler=infinite(seed=4))).load_state_dict(state)
    with pytest.raises(StateMismatch, match="size was 10, now 11"):
        build(lambda: DataLoader(Numbers(11), 3, sampler=InfiniteSampler(11))).load_state_dict(state)


def test_the_proof_names_samples_that_do_not_come() -> None:
    """What the position says comes next is what comes, for every batch; of other loaders nothing is known."""
    position = DataPosition(DataLoader(Numbers(), 4, sampler=infinite(seed=9), num_workers=2))
    for _ in range(8):
        said = position.next_samples()
        assert said == [int(row[0]) for row in next(position)]
    assert DataPosition(DataLoader(Numbers(), 4)).next_samples() is None
    assert DataPosition(DataLoader(Stream(), 4)).next_samples() is None


@pytest.mark.parametrize("make", [DataLoader, stateful])
def test_loader_processes_outlive_their_trainer(make: Any) -> None:
    """Dropping the trainer ends the processes of loaders that are not ours, persistent ones too."""
    for persistent in (False, True):
        before = set(psutil.Process().children())  # of other tests: fork servers, compilers
        trainer = build(
            lambda persistent=persistent: make(Numbers(), batch_size=3, num_workers=2, persistent_workers=persistent)
        )
        trainer.train(0, 2)
        loaders = set(psutil.Process().children()) - before
        assert len(loaders) == 2
        del trainer
        gc.collect()
        _, alive = psutil.wait_procs(loaders, timeout=20)
        assert not alive


def test_torchdatas_state_can_be_saved_in_a_checkpoint() -> None:
    """Its values are of kinds that the codec and torch.load(weights_only=True) know."""
    from trainerd.checkpoint import codec

    for workers in (0, 2):
        trainer = build(lambda workers=workers: stateful(Numbers(), batch_size=3, shuffle=True, num_workers=workers))
        trainer.train(0, 2)
        codec.check_inverse(trainer.state_dict())
        assert torch.equal(
            through_a_file(trainer.state_dict())["model"]["weight"], trainer.state_dict()["model"]["weight"]
        )
