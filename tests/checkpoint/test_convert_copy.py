"""A copy of a run is that run: same states, same history; and at no instant something else."""

import itertools
import shutil
import tracemalloc
from dataclasses import replace

import pytest
import torch
from support.faults import CRASHED, CrashingStorage, CrashingSystem, in_child
from support.states import assert_same

from trainerd.checkpoint import copy_run, durable, listing, open_storage, reader, terms, verifying
from trainerd.checkpoint.convert.errors import NotConverted
from trainerd.checkpoint.errors import NoCheckpoint, RunOwned
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.retention import Keep
from trainerd.checkpoint.store import CheckpointStore

KEEP = Keep(last=10)


def state_of(step, term):
    return {"w": torch.full((9, 3), float(step)), "half": torch.ones(3, dtype=torch.bfloat16), "of": [step, term]}


def train(storage, steps, resumed_from=None, pinned=()):
    """One daemon's term: it resumes from a step and saves others."""
    owner = RunOwner.acquire(storage)
    term = owner.ensure_term(resumed_from or 0)
    store = CheckpointStore(storage, term=term, keep=KEEP)
    for step in steps:
        store.save(step, state_of(step, term), pinned=pinned)
    owner.release()


@pytest.fixture
def source(tmp_path):
    """Term 1 saved 10, 20, 30; term 2 resumed from 20, saved 25; term 3 resumed from 25, saved 28."""
    storage = open_storage(str(tmp_path / "source"))
    train(storage, [10, 20, 30])
    train(storage, [25], 20)
    train(storage, [28], 25, pinned=[10])
    return storage


def committed_and_counting(storage):
    """The committed checkpoints on the lineage, newest first."""
    return [name for name in reader.candidates(storage) if name in terms.committed(storage)]


def resumable(storage):
    """The steps that count, with the states of the terms that they were saved in."""
    found = {}
    for name in committed_and_counting(storage):
        loaded = CheckpointStore(storage).load(name.step)
        assert_same(loaded.state, state_of(name.step, name.term))
        found[name.step] = name.term
    return found


COUNTING = {28: 3, 25: 2, 20: 1, 10: 1}


def test_a_copy_lacks_something_or_tells_another_history(source, tmp_path):
    """States, steps, terms, times, pins, tickets and the id; superseded checkpoints are not brought."""
    copy = open_storage(str(tmp_path / "copy"))
    copied = copy_run(source, copy)
    assert [(one.step, one.term, one.fate) for one in copied] == [(s, t, "copied") for s, t in COUNTING.items()]
    assert resumable(copy) == COUNTING
    assert terms.read_tickets(copy) == terms.read_tickets(source)
    assert terms.read_run(copy) == terms.read_run(source)
    of_source = [info for info in listing.list_checkpoints(source) if info.state == "valid"]
    # A copy's checkpoints share no files, so each has all its bytes for itself.
    assert [replace(info, unique_bytes=0) for info in listing.list_checkpoints(copy)] == [
        replace(info, unique_bytes=0) for info in of_source
    ]
    assert next(info for info in of_source if info.step == 10).pinned
    assert all(info.state == "valid" for info in verifying.verify_checkpoints(copy))


def test_a_file_is_larger_than_the_destination_takes(source, tmp_path, monkeypatch):
    """Data files are cut anew by what the destination guarantees."""
    copy = Small(open_storage(str(tmp_path / "copy")))
    copy_run(source, copy)
    assert resumable(copy) == COUNTING
    files = list((tmp_path / "copy/checkpoints/step-000000028.t3").glob("*.safetensors"))
    assert len(files) > 1


class Small:
    """The real storage, which takes files of 64 bytes of elements only, and has no lock."""

    def __init__(self, storage):
        import dataclasses

        self._storage = storage
        self.guarantees = dataclasses.replace(storage.guarantees, file_bytes=64, life_lock=False)

    def __getattr__(self, name):
        return getattr(self._storage, name)


def test_a_copy_holds_the_whole_checkpoint_in_memory(tmp_path):
    """One chunk of one tensor at a time, however many there are."""
    storage = open_storage(str(tmp_path / "source"))
    owner = RunOwner.acquire(storage)
    state = {str(n): torch.full((10**6,), float(n)) for n in range(20)}
    CheckpointStore(storage, term=owner.ensure_term(0)).save(1, state)
    owner.release()
    tracemalloc.start()
    copy_run(storage, open_storage(str(tmp_path / "copy")))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * 4 * 10**6
    assert_same(CheckpointStore(open_storage(str(tmp_path / "copy"))).load().state, state)


def test_a_second_copy_copies_again_or_misses_what_is_new(source, tmp_path):
    """Only what the run has gained; the history follows."""
    copy = open_storage(str(tmp_path / "copy"))
    copy_run(source, copy)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "copy/checkpoints").rglob("*.safetensors")}
    train(source, [22], 20)
    fates = {one.step: one.fate for one in copy_run(source, copy)}
    assert fates == {22: "copied", 20: "there already", 10: "there already"}
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert resumable(copy) == {22: 4, 20: 1, 10: 1}


def test_one_step_brings_no_history(source, tmp_path):
    """DIR@STEP."""
    copy = open_storage(str(tmp_path / "copy"))
    assert [one.step for one in copy_run(source, copy, step=20)] == [20]
    assert resumable(copy) == {20: 1}
    assert terms.read_tickets(copy) == terms.read_tickets(source)


def test_damage_is_copied(source, tmp_path):
    """It is named and left out; the others arrive. Damage at the destination is not taken for a copy."""
    [file] = (tmp_path / "source/checkpoints/step-000000025.t2").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    copy = open_storage(str(tmp_path / "copy"))
    copied = {one.step: one for one in copy_run(source, copy)}
    assert copied[25].fate == "damaged"
    assert "does not match its hash" in copied[25].reason
    assert resumable(copy) == {28: 3, 20: 1, 10: 1}
    assert not (tmp_path / "copy/checkpoints/step-000000025.t2").exists()
    next((tmp_path / "copy/checkpoints/step-000000010.t1").glob("*.safetensors")).unlink()
    again = {one.step: one for one in copy_run(source, copy)}
    assert again[10].fate == "damaged"
    assert "delete" in again[10].reason


class Pruning:
    """The real storage, in which a daemon prunes step 20 when its data is to be read."""

    def __init__(self, storage):
        self._storage = storage

    def __getattr__(self, name):
        return getattr(self._storage, name)

    def read(self, path, *where):
        if "step-000000020" in path and path.endswith(".safetensors"):
            folder = path.rpartition("/")[0]
            self._storage.delete(f"{folder}/manifest.json")
            self._storage.delete_folder(folder)
        return self._storage.read(path, *where)


def test_a_checkpoint_that_is_pruned_meanwhile_counts_as_damage(source, tmp_path):
    """The run lives on while it is copied."""
    copy = open_storage(str(tmp_path / "copy"))
    assert {one.step: one.fate for one in copy_run(Pruning(source), copy)} == {
        28: "copied",
        25: "copied",
        20: "gone",
        10: "copied",
    }


def test_another_run_or_a_foreign_folder_is_mixed_with_the_copy(source, tmp_path):
    """Refused, and nothing changes there; so is a copy that was trained on, and one whose daemon lives."""
    other = open_storage(str(tmp_path / "other"))
    train(other, [5])
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "a.tex").touch()
    copy = open_storage(str(tmp_path / "copy"))
    copy_run(source, copy)
    owner = RunOwner.acquire(copy)
    with pytest.raises(RunOwned):
        copy_run(source, copy)
    owner.release()
    train(copy, [40], 28)
    before = files(tmp_path)
    for destination, says in ((other, "another run"), (open_storage(str(thesis)), r"a\.tex"), (copy, "by itself")):
        with pytest.raises(NotConverted, match=says):
            copy_run(source, destination)
    train(source, [29], 28)
    before = files(tmp_path)
    with pytest.raises(NotConverted, match="different ways"):
        copy_run(source, copy)
    assert files(tmp_path) == before


def files(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock"}


def test_there_is_nothing_to_copy(tmp_path):
    """No run, and a run without checkpoints: no folder is made."""
    storage = open_storage(str(tmp_path / "none"))
    with pytest.raises(NoCheckpoint):
        copy_run(storage, open_storage(str(tmp_path / "copy")))
    train(storage, [])
    with pytest.raises(NoCheckpoint):
        copy_run(storage, open_storage(str(tmp_path / "copy")))
    assert not (tmp_path / "copy").exists()


def check_instant(folder):
    """What a daemon would find: nothing at all, a refusal to start afresh, or states that count in the source too."""
    copy = open_storage(str(folder))
    if terms.read_run(copy) is None:
        assert committed_and_counting(copy) == []
        return
    if not committed_and_counting(copy):
        with pytest.raises(NoCheckpoint, match="was trained before"):
            reader.read_newest(copy)
    counting = resumable(copy)
    assert counting.items() <= COUNTING.items()


@pytest.mark.parametrize("existing", [False, True], ids=["new", "older copy"])
def test_a_copy_that_dies_leaves_a_destination_that_lies(source, tmp_path, monkeypatch, existing):
    """Death before every call of the system at the destination; the next copy finishes it."""
    prepared = tmp_path / "prepared"
    if existing:
        older = open_storage(str(tmp_path / "older"))
        shutil.copytree(tmp_path / "source", tmp_path / "older")
        for name in ("terms/000002.json", "terms/000003.json", "terms/committed-000002.json"):
            (tmp_path / "older" / name).unlink()
        (tmp_path / "older/terms/committed-000003.json").unlink()
        shutil.rmtree(tmp_path / "older/checkpoints/step-000000025.t2")
        shutil.rmtree(tmp_path / "older/checkpoints/step-000000028.t3")
        assert resumable(older) == {30: 1, 20: 1, 10: 1}
        copy_run(older, open_storage(str(prepared)))
    folder = tmp_path / "copy"
    for at in itertools.count(1):
        if existing:
            shutil.copytree(prepared, folder)

        def dying_copy(at=at):
            durable.os = CrashingSystem(at, "before")
            copy_run(source, open_storage(str(folder)))

        status = in_child(dying_copy)
        assert status in (0, CRASHED)
        if status == 0:
            assert at > 40, "it died at far fewer places than there are"
            return
        (check_older if existing else check_instant)(folder)
        copy_run(source, open_storage(str(folder)))
        assert resumable(open_storage(str(folder))) == COUNTING
        shutil.rmtree(folder)


def check_older(folder):
    """The history up to some term, never a mixture: 30 counts until the ticket arrives that steps back behind it."""
    copy = open_storage(str(folder))
    newest = terms.read_tickets(copy)[-1].term
    counting = resumable(copy)
    assert (30 in counting) == (newest == 1)
    assert counting.items() <= {**COUNTING, 30: 1}.items()


def test_a_source_that_goes_away_spoils_the_copy(source, tmp_path):
    """Death around reads; the copy goes on."""
    folder = tmp_path / "copy"
    for at in itertools.count(1, 3):

        def dying_copy(at=at):
            copy_run(CrashingStorage(source, at, after=True), open_storage(str(folder)))

        status = in_child(dying_copy)
        assert status in (0, CRASHED)
        if status == 0:
            assert at > 30, "it died at far fewer places than there are"
            break
        if folder.exists():
            check_instant(folder)
    copy_run(source, open_storage(str(tmp_path / "copy")))
    assert resumable(open_storage(str(tmp_path / "copy"))) == COUNTING
    assert all((each / "manifest.json").exists() for each in (tmp_path / "copy/checkpoints").iterdir())
