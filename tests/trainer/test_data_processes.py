"""ResumableLoader with loader processes: the same batches, and processes that neither die early nor stay behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from trainerd.trainer.data import ResumableLoader

DEADLINE_SECONDS = 60


class Noisy:
    """Samples that carry their index, one draw from each global stream, and a noisy transform."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [random.random(), float(np.random.standard_normal()), float(torch.rand(()))]
        return torch.tensor([float(index), *drawn], dtype=torch.float64) * random.gauss(0, 1) + np.random.rand()


class WhoLoads(Noisy):
    """Samples that name the process that fetched them."""

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def noisy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(()) + random.random() + np.random.rand()


def disturb(worker_id: int) -> None:
    random.seed(worker_id)
    torch.manual_seed(worker_id)


def loader(num_workers: int = 0, dataset=None, **changes) -> ResumableLoader:
    arguments = {"batch_size": 3, "shuffle": True, "seed": 5, "collate_fn": noisy_collate} | changes
    return ResumableLoader(dataset or Noisy(), num_workers=num_workers, **arguments)


def take(of: ResumableLoader, count: int) -> list[torch.Tensor]:
    taken = []
    while len(taken) < count:
        for batch in of:
            taken.append(batch)
            if len(taken) == count:
                break
    return taken


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def ended(pidfd: int) -> bool:
    """Wait until the process behind `pidfd` has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(DEADLINE_SECONDS * 1000))


@pytest.mark.parametrize("changes", [{}, {"persistent_workers": True}, {"worker_init_fn": disturb}])
def test_loader_processes_do_not_change_a_bit(changes):
    """Two processes give the batches of none, over several epochs."""
    assert_same(take(loader(2, **changes), 12), take(loader(), 12))


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1)])
@pytest.mark.parametrize("position", [1, 5, 7])
def test_a_changed_number_of_processes_resumes_bitwise(before, after, position):
    """A run may come back on a machine with another number of cores; prefetched batches do not count."""
    whole = take(loader(), 12)
    cut = loader(before)
    head = take(cut, position)
    resumed = loader(after)
    resumed.load_state_dict(cut.state_dict())
    assert_same(head + take(resumed, 12 - position), whole)


def test_a_position_can_be_loaded_while_processes_prefetch():
    """What was prefetched for the old position is thrown away."""
    of = loader(2, persistent_workers=True)
    start = of.state_dict()
    take(of, 2)
    of.load_state_dict(start)
    assert_same(take(of, 7), take(loader(), 7))


def test_processes_leave_the_programs_own_random_numbers_alone():
    """Starting them draws nothing from the global streams."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    take(loader(2), 7)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_an_exception_in_a_loader_process_keeps_its_type_and_the_position():
    """The batch that failed is the next one to be tried."""

    class Fails(Noisy):
        def __getitem__(self, index):
            if index == 4:
                raise LookupError("sample 4 is gone")
            return super().__getitem__(index)

    of = loader(2, Fails(), shuffle=False)
    with pytest.raises(LookupError, match="sample 4 is gone"):
        list(of)
    assert of.state_dict()["batch"] == 1
    assert multiprocessing.active_children() == []


SPAWNING = """
import random
from trainerd.trainer.data import ResumableLoader

class Noisy:
    def __len__(self):
        return 5
    def __getitem__(self, index):
        return index + random.random()

if __name__ == "__main__":
    spawned = ResumableLoader(Noisy(), shuffle=True, num_workers=1, multiprocessing_context="spawn")
    assert [float(batch) for batch in spawned] == [float(batch) for batch in ResumableLoader(Noisy(), shuffle=True)]
"""


def test_a_spawned_loader_process_gives_the_same_batches(tmp_path):
    """Nothing depends on what a fork inherits."""
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING)
    subprocess.run([sys.executable, str(script)], check=True, timeout=DEADLINE_SECONDS)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_signal_to_the_whole_group_does_not_cost_the_step_in_progress(signum):
    """Schedulers signal every process of a job: loader processes ignore what others than the trainer send."""
    of = loader(1, WhoLoads(), batch_size=1, collate_fn=None, prefetch_factor=1)
    iterator = iter(of)
    process = int(next(iterator))
    subprocess.run([sys.executable, "-c", f"import os; os.kill({process}, {int(signum)})"], check=True)
    assert {int(batch) for batch in iterator} == {process}


def test_a_signal_while_processes_start_does_not_cost_them():
    """What arrives between the fork and the set-up of a process waits for the set-up."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def tell_mask(worker_id: int) -> None:
        raise LookupError(f"blocked: {signal.pthread_sigmask(signal.SIG_BLOCK, [])}")

    with pytest.raises(LookupError, match="SIGTERM"):
        next(iter(loader(1, worker_init_fn=tell_mask)))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_the_trainers_own_sigterm_ends_a_loader_process():
    """DataLoader's last resort, terminate(), still works."""
    of = loader(1, WhoLoads(), batch_size=1, collate_fn=None)
    process = int(next(iter(of)))
    pidfd = os.pidfd_open(process)
    os.kill(process, signal.SIGTERM)
    assert ended(pidfd)
    os.close(pidfd)
    of.close()


@pytest.mark.parametrize("end", ["close", "drop"])
def test_processes_end_with_the_loader(end):
    """Closed or dropped (without a garbage collection), in the middle of an epoch."""
    gc.disable()
    try:
        of = loader(2, persistent_workers=True)
        take(of, 2)
        assert len(multiprocessing.active_children()) == 2
        if end == "close":
            of.close()
        else:
            del of
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()


def test_a_closed_loader_goes_on_where_it_was():
    """close() frees the processes and nothing else."""
    of = loader(2, persistent_workers=True)
    head = take(of, 2)
    of.close()
    assert_same(head + take(of, 5), take(loader(), 7))
    of.close()


TRAINER = """
    import os, sys, time
    import torch.utils.data
    from trainerd.trainer.data import ResumableLoader

    class Stuck:
        def __len__(self):
            return 1000
        def __getitem__(self, index):
            if index >= {workers}:
                {stuck}
            return os.getpid()

    # Not more than one batch ahead, so that the first of each process has arrived before it gets stuck.
    loader = ResumableLoader(Stuck(), num_workers={workers}, persistent_workers={persistent}, prefetch_factor=1)
    batches = iter(loader)
    print(*[int(next(batches)) for _ in range({workers})], flush=True)
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.1  # DataLoader's patience when it ends processes
    {after}
"""


def trainer(**parts: object) -> subprocess.Popen[str]:
    source = textwrap.dedent(TRAINER.format(**parts))
    return subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def loader_processes_of(process: subprocess.Popen[str]) -> list[int]:
    return [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]


def test_loader_processes_do_not_outlive_a_killed_trainer():
    """SIGKILL of the trainer ends processes that are deep in a fetch."""
    with trainer(workers=2, stuck="time.sleep(3600)", persistent=False, after="sys.stdin.read()") as process:
        pidfds = loader_processes_of(process)
        process.kill()
        assert len(pidfds) == 2
        assert all(ended(pidfd) for pidfd in pidfds)
        for pidfd in pidfds:
            os.close(pidfd)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_stuck_loader_process_does_not_keep_the_program_from_ending(persistent):
    """A fetch that never returns and holds the interpreter is killed when the program ends."""
    # A second process would find the queue's lock taken, if the first gets stuck before it could release it.
    holds_the_lock = "import ctypes; ctypes.PyDLL(None).sleep(3600)"
    with trainer(workers=1, stuck=holds_the_lock, persistent=persistent, after="pass") as process:
        try:
            _, errors = process.communicate(timeout=DEADLINE_SECONDS)
        finally:
            process.kill()
        assert (process.returncode, errors) == (0, "")
