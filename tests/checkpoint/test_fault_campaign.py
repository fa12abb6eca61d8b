"""Every storage call of a run with three saves and two prunes goes wrong in every way, one at a time.

After a restart the resumed step is never older than the last one reported committed, nothing half counts, and no debris
outlives the next save.
"""

import contextlib
import itertools
import os

import pytest
import torch
from support.faults import CRASHED, FaultyRequests, FaultyStorage, in_child
from support.states import assert_same

from trainerd.checkpoint import guarantees
from trainerd.checkpoint.errors import CheckpointError
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.retention import Keep
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore

KEEP = Keep(last=2)


def state_of(step):
    """One tensor that never changes, one that does, and a value."""
    return {"frozen": torch.arange(40.0), "w": torch.full((9, 3), float(step)), "n": step}


def three_saves_and_two_prunes(storage, committed):
    """What a training does; the steps that were reported committed go into the pipe `committed`."""
    owner = RunOwner.acquire(storage)
    store = CheckpointStore(storage, term=owner.ensure_term(0), keep=KEEP)
    for step in (1, 2, 3):
        try:
            store.save(step, state_of(step))
        except CheckpointError:
            continue  # as a training does: the next save is tried
        os.write(committed, bytes([step]))
        if step > 1:
            store.prune()
    owner.release()


def run_with_fault(storage, at, fault):
    """The run in a process of its own; its exit status, the calls it made (when it lived), the steps it reported."""
    reading, writing = os.pipe()
    calls_reading, calls_writing = os.pipe()

    def child():
        faulty = FaultyStorage(storage, at, fault)
        try:
            three_saves_and_two_prunes(faulty, writing)
        except CheckpointError:
            return 1
        finally:
            os.write(calls_writing, faulty.calls.to_bytes(4, "little"))
        return 0

    status = in_child(child)
    for descriptor in (writing, calls_writing):
        os.close(descriptor)
    with os.fdopen(reading, "rb") as steps, os.fdopen(calls_reading, "rb") as calls:
        return status, int.from_bytes(calls.read(), "little"), list(steps.read())


@contextlib.contextmanager
def reported_steps():
    """A pipe for the steps of a run in this process."""
    reading, writing = os.pipe()

    class Steps:
        def __init__(self):
            self.writing = writing

        def read(self):
            os.set_blocking(reading, False)
            return list(os.read(reading, 100))

    try:
        yield Steps()
    finally:
        os.close(reading)
        os.close(writing)


def check_restart(place, reported):
    """A new daemon resumes from no older step than was reported, then saves once and leaves no debris."""
    storage = open_storage(*place)
    owner = RunOwner.acquire(storage)
    store = CheckpointStore(storage, keep=KEEP)
    loaded = store.load()
    resumed = 0 if loaded is None else loaded.step
    assert resumed >= max(reported, default=0)
    if loaded is not None:
        assert loaded.skipped == (), "a fault leaves debris, never a damaged checkpoint"
        assert_same(loaded.state, state_of(resumed))
    assert {info.state for info in store.verify()} <= {"valid", "incomplete"}
    store.term = owner.ensure_term(resumed)
    store.save(4, state_of(4))
    verified = list(store.verify())
    assert {info.state for info in verified} == {"valid"}
    assert verified[-1].step == 4
    assert_same(store.load().state, state_of(4))
    owner.release()


# Each fault takes some of the calls, each fault others; `make campaign` takes them all.
ALL = os.environ.get("TRAINERD_FAULTS") == "all"
STRIDES = {"local": 1, "s3": 7, "sftp": 7} if ALL else {"local": 5, "s3": 97, "sftp": 97}


@pytest.mark.parametrize("fault", FaultyStorage.FAULTS)
@pytest.mark.parametrize("kind", STRIDES)
def test_no_fault_of_any_storage_call_loses_a_committed_step(servers, kind, fault):
    """The calls of the run in turn: on a local disk, on an object store that has no rename, and by SFTP."""
    stride = STRIDES[kind]
    count = 0
    for at in itertools.count(1 + FaultyStorage.FAULTS.index(fault) * 9 % stride, stride):
        place = servers.place(kind)
        status, calls, reported = run_with_fault(open_storage(*place), at, fault)
        assert status in (0, 1, CRASHED)
        check_restart(place, reported)
        if status != CRASHED and calls < at:
            break
        count += 1
    print(f"{count} calls, {kind}, {fault}")
    assert (count + 1) * stride > 80


@pytest.mark.parametrize("fault", FaultyRequests.FAULTS)
def test_a_single_request_that_goes_wrong_is_made_again(servers, fault):
    """Requests of the run in turn, on S3: each heals, and every step is reported committed."""
    stride = 3 if ALL else 97
    count = 0
    for at in itertools.count(1 + FaultyRequests.FAULTS.index(fault) * 9, stride):
        place = servers.place("s3")
        with reported_steps() as committed:
            storage = FaultyRequests(*place, guarantees.S3, at=at, fault=fault)
            three_saves_and_two_prunes(storage, committed.writing)
            assert committed.read() == [1, 2, 3]
        check_restart(place, [3])
        if storage.requests < at:
            break
        count += 1
    print(f"{count} requests, {fault}")
    assert count * stride > 80
