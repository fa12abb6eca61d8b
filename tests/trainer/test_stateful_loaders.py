"""Every kind of loader, killed and resumed: what its grade promises is what comes."""

import gc
import itertools
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from support.loaders import STREAMS, Numbers, StaysAtItsEnd, Stream, build, ids
from support.states import assert_same
from support.trainers import StopAt, seed, through_a_file
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from trainerd.trainer import InfiniteSampler, StateMismatch
from trainerd.trainer.data_position import DataPosition

STEPS = 14  # of 4 batches an epoch: three epochs and a half

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own


def stateful(*arguments: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(*arguments, **options)


def infinite(**options: Any) -> InfiniteSampler:
    return InfiniteSampler(10, **options)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(int(torch.randint(2**62, ())))


def sure(kind: type[Stream], size: int = 10) -> Stream:
    return type(f"Sure{kind.__name__}", (kind,), {"resume_grade": ("bitwise", "")})(size)  # type: ignore[no-any-return]


BITWISE: dict[str, Callable[[], Any]] = {
    "infinite sampler": lambda: DataLoader(Numbers(), 3, sampler=infinite(seed=4)),
    "infinite sampler, seed drawn": lambda: DataLoader(Numbers(), 3, sampler=infinite()),
    "infinite sampler in a batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(infinite(seed=4), 3, drop_last=True)
    ),
    "infinite sampler, no batches": lambda: DataLoader(Numbers(), None, sampler=infinite(seed=4, shuffle=False)),
    "torchdata": lambda: stateful(Numbers(), batch_size=3, shuffle=True),
    "torchdata, generator": lambda: stateful(Numbers(), batch_size=3, shuffle=True, generator=generator()),
    "torchdata, infinite sampler": lambda: stateful(Numbers(), batch_size=3, sampler=infinite()),
    "torchdata, infinite sampler in torch's batch sampler": lambda: stateful(
        Numbers(), batch_sampler=BatchSampler(infinite(), 3, drop_last=False)
    ),
    **{f"sure {one.__name__}": lambda one=one: DataLoader(sure(one), 3) for one in STREAMS},
    **{f"torchdata, sure {one.__name__}": lambda one=one: stateful(sure(one), batch_size=3) for one in STREAMS},
}
SAME_DATA: dict[str, Callable[[], Any]] = {
    "infinite sampler, workers": lambda: DataLoader(Numbers(), 3, sampler=infinite(seed=4), num_workers=2),
    **{f"{one.__name__}, {n}": lambda one=one, n=n: DataLoader(one(n), 3) for one in STREAMS for n in (10, 12)},
    "iterable dataset with state, incomplete batches dropped": lambda: DataLoader(Stream(), 3, drop_last=True),
    "iterable dataset with state, no batches": lambda: DataLoader(Stream(), None),
    "torchdata, workers": lambda: stateful(Numbers(), batch_size=3, shuffle=True, num_workers=2),
    "torchdata, generator, workers": lambda: stateful(
        Numbers(), batch_size=3, shuffle=True, generator=generator(), num_workers=2, snapshot_every_n_steps=3
    ),
    "torchdata, infinite sampler, workers": lambda: stateful(
        Numbers(), batch_size=3, sampler=infinite(seed=4), num_workers=2
    ),
    **{f"torchdata, {one.__name__}": lambda one=one: stateful(one(), batch_size=3) for one in STREAMS},
    "torchdata, sure iterable, workers": lambda: stateful(sure(StaysAtItsEnd), batch_size=3, num_workers=2),
}
# Repeated exactly as well, if nothing but the global streams and the loader's generators decides over the order.
POSITION_ONLY: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: DataLoader(Numbers(), 3, shuffle=True),
    "shuffle, generator": lambda: DataLoader(Numbers(), 3, shuffle=True, generator=generator()),
    "torchdata, torch's sampler": lambda: stateful(Numbers(), batch_size=3, sampler=RandomSampler(Numbers())),
    "torchdata, torch's batch sampler": lambda: stateful(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers(), generator=generator()), 3, drop_last=False)
    ),
    "torchdata, iterable, workers": lambda: stateful(StaysAtItsEnd(), batch_size=3, num_workers=2),
}
KILLS = [[1], [3], [4], [5], [8], [2, 3], [4, 8, 12], [3, 4, 5, 13]]
SOME_KILLS = [[3], [1, 2, 4, 5]]


def in_another_process(make: Callable[[], Any]) -> Any:
    """A loader that was made after other random numbers."""
    seed(77)
    return make()


def trained_with_kills(make: Callable[[], Any], kills: list[int]) -> tuple[Any, list[Any]]:
    trainer, seen, start = build(make), [], 0
    for stop in kills:
        trainer.session = StopAt(stop)
        trainer.train(start, STEPS)
        seen += trainer.model.batches
        trainer_state, start = trainer.session.state, stop
        trainer = build(lambda: in_another_process(make))
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
    for kills in SOME_KILLS if "workers" in kind else KILLS:
        trainer, seen = trained_with_kills(SAME_DATA[kind], kills)
        assert trainer.restored_grade == "same data"
        assert trainer.restored_reason
        assert ids(seen) == ids(expected.model.batches)


@pytest.mark.parametrize("kind", BITWISE)
def test_a_state_from_before_the_first_batch_draws_twice(kind: str) -> None:
    """Taking it starts nothing and draws nothing, and what comes is what would have come."""
    expected = build(BITWISE[kind])
    expected.train(0, STEPS)
    trainer = build(BITWISE[kind])
    state = through_a_file(trainer.state_dict())
    trainer.train(0, STEPS)
    assert trainer.model.batches == expected.model.batches
    resumed = build(lambda: in_another_process(BITWISE[kind]))
    resumed.load_state_dict(state)
    resumed.train(0, STEPS)
    assert resumed.model.batches == expected.model.batches
    assert resumed.restored_grade == "bitwise"


@pytest.mark.parametrize("kind", POSITION_ONLY)
def test_a_replayed_epoch_is_another_one(kind: str) -> None:
    """Without a state for their order, epochs are replayed, generators included; more is not promised."""
    expected = build(POSITION_ONLY[kind])
    expected.train(0, STEPS)
    for kills in SOME_KILLS:
        trainer, seen = trained_with_kills(POSITION_ONLY[kind], kills)
        assert trainer.restored_grade == "position only"
        assert "no state_dict" in trainer.restored_reason or "doesn't say how" in trainer.restored_reason
        assert ids(seen) == ids(expected.model.batches)


def test_a_distributed_sampler_forgets_its_epoch() -> None:
    """What `set_epoch` set holds after a resume."""

    def make() -> DataLoader[Any]:
        sampler = DistributedSampler(Numbers(), num_replicas=2, rank=1)
        return DataLoader(Numbers(), 2, sampler=sampler)

    trainer = build(make)
    trainer.data_loader.sampler.set_epoch(5)
    trainer.train(0, 3)
    seen = trainer.model.batches
    resumed = build(make)
    resumed.load_state_dict(through_a_file(build_after(make, 5, 1)))
    resumed.train(1, 3)
    assert ids(resumed.model.batches) == ids(seen[1:])


def build_after(make: Callable[[], Any], epoch: int, steps: int) -> dict[str, Any]:
    trainer = build(make)
    trainer.data_loader.sampler.set_epoch(epoch)
    trainer.train(0, steps)
    return trainer.state_dict()


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Numbers(), 3),
        lambda: DataLoader(Stream(), 3, num_workers=1),
        lambda: DataLoader(Numbers(), 3, sampler=infinite(seed=4), num_workers=1, in_order=False),
        lambda: stateful(Numbers(), batch_size=3, num_workers=1, in_order=False),
    ],
)
def test_a_position_is_called_more_than_it_is(make: Callable[[], Any]) -> None:
    """Batches that are fetched again and skipped prove nothing about their order."""
    trainer = build(make)
    trainer.train(0, 2)
    resumed = build(make)
    resumed.load_state_dict(through_a_file(trainer.state_dict()))
    assert resumed.restored_grade == "position only"
    loader = resumed.data_loader
    is_stream = isinstance(loader.dataset, Stream)
    assert ("torchdata's StatefulDataLoader would save" in resumed.restored_reason) == is_stream
    assert ("(in_order=False)" in resumed.restored_reason) == (not loader.in_order)


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


@pytest.mark.parametrize(
    ("make", "other", "told"),
    [
        (
            lambda: stateful(Numbers(), batch_size=3, shuffle=True, num_workers=1),
            lambda: stateful(Numbers(), batch_size=3, shuffle=True),
            "num_workers was 1, now 0",
        ),
        (
            lambda: stateful(Numbers(), batch_size=3, shuffle=True),
            lambda: stateful(Numbers(11), batch_size=2),
            "batch_size was 3, now 2; samples was 10, now 11; sampler was RandomSampler, now SequentialSampler",
        ),
        (lambda: DataLoader(Stream(), 3), lambda: DataLoader(Stream(), 4), "batch_size was 3, now 4"),
        (
            lambda: DataLoader(Numbers(), 3, sampler=infinite(seed=4)),
            lambda: DataLoader(Numbers(), 3, sampler=infinite(seed=5)),
            "seed was 4, now 5",
        ),
    ],
)
def test_a_position_is_counted_with_other_settings(make: Any, other: Any, told: str) -> None:
    """Refused when the state is loaded, with both values."""
    trainer = build(make)
    trainer.train(0, 2)
    with pytest.raises(StateMismatch, match=re.escape(told)):
        build(other).load_state_dict(through_a_file(trainer.state_dict()))


def test_a_start_is_forgotten_when_training_begins() -> None:
    """Where the sampler is told to start, every training begins; a resumed one moves none that comes after it."""

    def make() -> DataLoader[Any]:
        sampler = infinite(seed=4)
        sampler.start_at(100)
        return DataLoader(Numbers(), 3, sampler=sampler)

    trainer = build(make)
    trainer.train(0, 4)
    expected = infinite(seed=4).indices(100, 12)
    assert list(itertools.chain(*ids(trainer.model.batches))) == expected
    resumed = build(make)
    resumed.load_state_dict(through_a_file(trainer.state_dict()))
    resumed.train(4, 5)
    assert list(itertools.chain(*ids(resumed.model.batches))) == infinite(seed=4).indices(112, 3)
    after = build(lambda: resumed.data_loader)
    after.train(0, 4)
    assert list(itertools.chain(*ids(after.model.batches))) == expected


def test_the_proof_names_samples_that_do_not_come() -> None:
    """What the position says comes next is what comes, for every batch; of other loaders nothing is known."""
    position = DataPosition(DataLoader(Numbers(), 4, sampler=infinite(seed=9), num_workers=2))
    for _ in range(8):
        said = position.next_samples()
        assert said == [int(row[0]) for row in next(position)]
    assert DataPosition(DataLoader(Numbers(), 4)).next_samples() is None
    assert DataPosition(DataLoader(Stream(), 4)).next_samples() is None


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("make", [DataLoader, stateful])
def test_loader_processes_outlive_their_trainer(make: Any, persistent: bool) -> None:
    """Dropped, even if its loader is kept, it ends the processes of loaders that are not ours; no cycle keeps them."""
    before = set(psutil.Process().children())  # of other tests: fork servers, compilers
    trainer = build(lambda: make(Numbers(), batch_size=3, num_workers=2, persistent_workers=persistent))
    loader = trainer.data_loader
    trainer.train(0, 2)
    processes = set(psutil.Process().children()) - before
    assert len(processes) == 2
    gc.disable()
    try:
        del trainer
    finally:
        gc.enable()
    assert not [process for process in processes if process.is_running()]
    again = build(lambda: loader)
    again.train(0, 2)
    assert len(again.model.batches) == 2


def test_a_trainer_takes_the_loader_processes_of_another() -> None:
    """Two trainers in turn over one loader with persistent processes: each has its own."""
    loader = DataLoader(Numbers(), 3, num_workers=1, persistent_workers=True)
    one, other = build(lambda: loader), build(lambda: loader)
    for step in range(6):
        one.train(step, step + 1)
        other.train(step, step + 1)
    del one
    other.train(6, 8)
    assert ids(other.model.batches) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]] * 2


KILLED = """
    import os, sys, time
    from torch.utils.data import DataLoader
    from trainerd.trainer.data_position import DataPosition
    {imports}

    class Stuck:
        def __len__(self):
            return 100
        def __getitem__(self, index):
            if index >= 2:
                time.sleep(3600)
            return os.getpid()

    position = DataPosition({loader}(Stuck(), num_workers=2, prefetch_factor=1))
    print(*[int(next(position)) for _ in range(2)], flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("loader", "imports"),
    [
        ("DataLoader", ""),
        ("StatefulDataLoader", "from torchdata.stateful_dataloader import StatefulDataLoader"),
    ],
)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_stuck_loader_process_outlives_a_killed_trainer(loader: str, imports: str, signum: signal.Signals) -> None:
    """The kernel ends processes in the middle of a fetch; a signal to them alone costs no step."""
    script = textwrap.dedent(KILLED.format(loader=loader, imports=imports))
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        pidfds = [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
        for pidfd in pidfds:
            signal.pidfd_send_signal(pidfd, signal.SIGUSR2)
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        assert process.poll() is None
        process.send_signal(signum)
        assert len(pidfds) == 2
        for pidfd in pidfds:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            assert poll.poll(60_000)
            os.close(pidfd)


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
