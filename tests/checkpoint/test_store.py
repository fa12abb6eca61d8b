"""Saving, finding and keeping checkpoints in a real folder."""

import errno
import json
import os
import pathlib
import shutil
import subprocess

import msgspec
import pytest
import safetensors.torch
import torch
import xxhash
from support.states import assert_same

from trainerd.checkpoint import codec, envelope, layout, listing, reader, terms, verifying, writer
from trainerd.checkpoint.errors import (
    Damaged,
    FormatTooNew,
    NoCheckpoint,
    StorageUnusable,
    UnsupportedState,
)
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.retention import Keep
from trainerd.checkpoint.storage import IncompleteURL, UnknownScheme, open_storage
from trainerd.checkpoint.store import CheckpointStore


def state_of(step):
    generator = torch.Generator().manual_seed(step)
    return {"step": step, "model": {"w": torch.randn(7, 5, generator=generator)}, "hooks": {"Count": {"n": step}}}


@pytest.fixture
def run(tmp_path):
    """A storage and the one owner of the run in it."""
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    yield storage, owner
    owner.release()


def store_of(run, keep=None, resumed_from=0):
    storage, owner = run
    return CheckpointStore(storage, term=owner.ensure_term(resumed_from), keep=keep)


def files_below(folder):
    return sorted(
        (os.path.relpath(os.path.join(base, name), folder), pathlib.Path(os.path.join(base, name)).read_bytes())
        for base, _, names in os.walk(folder)
        for name in names
    )


def test_the_newest_state_comes_back_to_the_bit(run):
    """load() gives what save() was given."""
    store = store_of(run)
    for step in (1, 2):
        store.save(step, state_of(step))
    loaded = store.load()
    assert (loaded.step, loaded.term, loaded.skipped) == (2, 1, ())
    assert_same(loaded.state, state_of(2))
    assert_same(store.load(1).state, state_of(1))


def test_data_files_can_be_read_by_other_tools(run):
    """They are valid safetensors, with the tensors under the names a person would look for."""
    storage, _ = run
    store_of(run).save(1, state_of(1))
    path = os.path.join(storage.root, "checkpoints/step-000000001.t1/r00000-0000.safetensors")
    assert torch.equal(safetensors.torch.load_file(path)["model.w"], state_of(1)["model"]["w"])


def test_large_tensors_are_cut_into_files_and_come_back(run):
    """Files keep to their limit; the pieces tile the tensor, whichever dimensions had to be cut."""
    storage, owner = run
    term = owner.ensure_term(0)
    state = {
        "rows": torch.randn(10, 8),
        "deep": torch.randn(1, 2, 3, 50),
        "small": torch.arange(3, dtype=torch.uint8),
        "scalar": torch.tensor(1.0),
        "empty": torch.empty(0, 4),
    }
    tree, leaves = codec.encode(state)
    name = layout.CheckpointName(5, term)
    manifest = writer.write_checkpoint(
        storage, name, tree, leaves, run=terms.read_run(storage).run, written_by="test", versions={}, file_bytes=100
    )
    assert all(entry.bytes - entry.header_bytes <= 100 for entry in manifest.files.values())
    assert len(manifest.tensors["deep"].chunks) > 6
    assert_same(CheckpointStore(storage).load().state, state)
    assert [info.state for info in verifying.verify_checkpoints(storage)] == ["valid"]


def test_a_second_attempt_at_a_step_takes_new_file_names(run):
    """A half-written first attempt may still be open somewhere: its files are never written again."""
    storage, owner = run
    owner.ensure_term(0)
    storage.make_folder("checkpoints/step-000000004.t1")
    storage.write("checkpoints/step-000000004.t1/r00000-0000.safetensors", [b"torn"], 4)
    store = store_of(run)
    store.save(4, state_of(4))
    assert storage.read("checkpoints/step-000000004.t1/r00000-0000.safetensors") == b"torn"
    assert_same(store.load().state, state_of(4))


def test_a_state_that_cannot_be_held_leaves_the_run_untouched(run):
    """UnsupportedState is raised before the first byte."""
    storage, _ = run
    store = store_of(run)
    store.save(1, state_of(1))
    before = files_below(storage.root)
    with pytest.raises(UnsupportedState, match=r"hooks\.Foo\.callback: function"):
        store.save(2, {"hooks": {"Foo": {"callback": lambda: 0}}})
    assert files_below(storage.root) == before


def test_a_damaged_newest_checkpoint_costs_its_steps_and_is_named(run):
    """Resume goes to the next older one and says why."""
    storage, _ = run
    store = store_of(run)
    for step in (1, 2):
        store.save(step, state_of(step))
    path = os.path.join(storage.root, "checkpoints/step-000000002.t1/r00000-0000.safetensors")
    data = bytearray(pathlib.Path(path).read_bytes())
    data[-1] ^= 1
    pathlib.Path(path).write_bytes(data)
    loaded = store.load()
    assert loaded.step == 1
    assert "model.w" in loaded.skipped[0]
    assert "step-000000002.t1" in loaded.skipped[0]


@pytest.mark.parametrize("keep_manifests", [True, False])
def test_nothing_valid_though_something_was_committed_is_never_a_fresh_start(run, keep_manifests):
    """A run whose checkpoints are all gone or damaged stops with an error that says how to go on."""
    storage, owner = run
    store = store_of(run)
    store.save(3, state_of(3))
    owner.term = None
    owner.ensure_term(3)
    folder = os.path.join(storage.root, "checkpoints/step-000000003.t1")
    if keep_manifests:
        os.unlink(f"{folder}/r00000-0000.safetensors")
    else:
        shutil.rmtree(folder)
    for look in (store.load, lambda: reader.newest_step(storage)):
        with pytest.raises(NoCheckpoint, match="--fresh"):
            look()


def test_a_requested_step_that_is_not_there_names_those_that_are(run):
    """Nothing quietly begins from scratch."""
    store = store_of(run, Keep(last=9))
    for step in (5, 10):
        store.save(step, state_of(step))
    with pytest.raises(NoCheckpoint, match=r"no checkpoint of step 7.*5, 10"):
        store.load(7)


def test_what_a_former_owner_writes_after_a_take_over_never_counts(run):
    """The lineage rule: its later steps are superseded, whatever they contain."""
    storage, owner = run
    zombie = store_of(run, Keep(last=9))
    zombie.save(10, state_of(10))
    owner.term = None
    heir = CheckpointStore(storage, term=owner.ensure_term(10), keep=Keep(last=9))
    zombie.save(20, {"from": "the dead"})
    assert heir.load().step == 10
    heir.save(15, state_of(15))
    assert heir.load().step == 15
    assert [(info.step, info.state) for info in heir.list()] == [(10, "valid"), (15, "valid"), (20, "superseded")]
    heir.save(20, state_of(20))
    assert_same(heir.load().state, state_of(20))


def test_a_step_back_begins_a_new_term_and_a_restart_does_not(run):
    """The lineage tells the history that the weights really had."""
    storage, owner = run
    store = store_of(run, Keep(last=9))
    assert owner.ensure_term(0) == 1
    store.save(10, state_of(10))
    store.save(20, state_of(20))
    assert owner.ensure_term(20) == 1
    assert owner.ensure_term(10) == 2
    assert CheckpointStore(storage, term=2).load().step == 10


def test_a_fresh_start_keeps_the_old_checkpoints_off_the_lineage(run):
    """resumed_from 0 supersedes everything older, and deletes nothing."""
    storage, owner = run
    store_of(run).save(10, state_of(10))
    owner.term = None
    store = CheckpointStore(storage, term=owner.ensure_term(0))
    assert store.load() is None
    store.save(5, state_of(5))
    assert [(info.step, info.term, info.state) for info in store.list()] == [
        (5, 2, "valid"),
        (10, 1, "superseded"),
    ]


def test_steps_are_ordered_as_numbers(run):
    """Crossing 9 to 10 and 999,999,999 to 1,000,000,000 keeps the newest, not the longest name."""
    store = store_of(run, Keep(last=2))
    for step in (8, 9, 10, 99, 100, 999_999_999, 1_000_000_000):
        store.save(step, state_of(step))
    assert [info.step for info in store.list()] == [999_999_999, 1_000_000_000]
    assert store.load().step == 1_000_000_000


def test_foreign_names_in_the_folder_are_left_alone(run):
    """Only names that trainerd itself would write count or are ever deleted."""
    storage, _ = run
    store = store_of(run, Keep(last=1))
    foreign = ["step-1.t1", "step-000000001", "step-0000000001.t1", "step-000000001.t0", "notes", "step-000000002.t01"]
    for name in foreign:
        os.makedirs(os.path.join(storage.root, "checkpoints", name))
    store.save(1, state_of(1))
    store.save(2, state_of(2))
    assert sorted([*foreign, "step-000000002.t1"]) == sorted(os.listdir(os.path.join(storage.root, "checkpoints")))


def test_with_keep_one_the_old_checkpoint_outlives_a_failed_save(run, tmp_path):
    """At every moment at least one valid checkpoint exists once the first was committed."""
    storage, _ = run
    store = store_of(run, Keep(last=1))
    store.save(1, state_of(1))

    class Full:
        def __getattr__(self, name):
            return getattr(storage, name)

        def write(self, path, parts, size):
            raise StorageUnusable("write", path, OSError(errno.ENOSPC, "full"))

    failing = CheckpointStore(Full(), term=1, keep=Keep(last=1))
    with pytest.raises(StorageUnusable, match="full"):
        failing.save(2, state_of(2))
    assert store.load().step == 1
    assert [info.state for info in store.list()] == ["valid"], "debris of our own failed attempt goes at once"
    store.save(3, state_of(3))
    assert [info.step for info in store.list()] == [3]


def test_a_zombie_deletes_nothing(run):
    """Once a later term has begun, neither what its heir writes nor anything else; the heir sweeps older debris."""
    storage, owner = run
    zombie = store_of(run)
    owner.term = None
    assert owner.ensure_term(0) == 2
    storage.make_folder("checkpoints/step-000000007.t3")
    storage.make_folder("checkpoints/step-000000006.t1")
    zombie.save(8, state_of(8))
    assert os.path.isdir(os.path.join(storage.root, "checkpoints/step-000000006.t1"))
    store_of(run).save(1, state_of(1))
    assert os.path.isdir(os.path.join(storage.root, "checkpoints/step-000000007.t3"))
    assert not os.path.exists(os.path.join(storage.root, "checkpoints/step-000000006.t1"))


def test_a_newer_format_is_refused_by_name_but_a_flipped_digit_is_damage(run):
    """The hash covers the format number, so the two cannot be confused."""
    storage, _ = run
    store = store_of(run, Keep(last=9))
    store.save(1, state_of(1))
    store.save(2, state_of(2))
    path = os.path.join(storage.root, "checkpoints/step-000000002.t1/manifest.json")
    data = pathlib.Path(path).read_bytes()
    pathlib.Path(path).write_bytes(data.replace(b'"format":1', b'"format":3'))
    assert store.load().step == 1
    rest = data[envelope._HASHED_FROM :].replace(b'"format":1', b'"format":2').replace(b"trainerd 0", b"trainerd 9", 1)
    digest = xxhash.xxh3_128_hexdigest(rest).encode()
    pathlib.Path(path).write_bytes(b'{"xxh3_128":"%s",%s' % (digest, rest))
    with pytest.raises(FormatTooNew, match=r"format 2.*trainerd 9\.1\.0"):
        store.load()


def test_a_manifest_with_a_right_hash_is_still_held_against_the_rules(run):
    """Paths that climb, holes and wrong lengths are refused before any file is opened."""
    storage, _ = run
    store = store_of(run)
    store.save(1, state_of(1))
    name = layout.CheckpointName(1, 1)
    good = msgspec.to_builtins(reader.read_manifest(storage, name))
    for change in (
        lambda m: m["files"].update({"../../../etc/passwd": {"bytes": 9, "header_bytes": 9, "header_xxh3_128": ""}}),
        lambda m: m["tensors"]["model.w"]["chunks"][0].update(file="other.safetensors"),
        lambda m: m["tensors"]["model.w"]["chunks"][0].update(offset=0),
        lambda m: m["tensors"]["model.w"]["chunks"][0].update(length=2**62),
        lambda m: m["tensors"]["model.w"].update(shape=[2**40, 2**20]),
        lambda m: m["tensors"]["model.w"].update(shape=[7, -5]),
        lambda m: m["tensors"]["model.w"].update(dtype="object"),
        lambda m: m["tensors"]["model.w"]["chunks"].append(m["tensors"]["model.w"]["chunks"][0]),
        lambda m: m.update(step=2),
    ):
        bad = json.loads(json.dumps(good))
        change(bad)
        path = os.path.join(storage.root, name.manifest)
        pathlib.Path(path).write_bytes(envelope.seal(bad))
        with pytest.raises(Damaged):
            reader.read_manifest(storage, name)


def test_unknown_schemes_are_refused_by_name():
    """No run folder called `s3:` appears in the current directory."""
    with pytest.raises(UnknownScheme, match="gopher"):
        open_storage("gopher://bucket/run")


def test_a_first_commit_while_somebody_looks_is_no_loss(run):
    """It comes between the listing and whatever is asked next: the one who looks sees a run that is still fresh."""
    storage, _ = run
    store = store_of(run)

    class BusyRun:
        """The real storage, in which the first checkpoint is committed right after the checkpoints were listed."""

        def __getattr__(self, name):
            return getattr(storage, name)

        def names(self, folder):
            found = storage.names(folder)
            if folder == layout.CHECKPOINTS and not found:
                store.save(1, state_of(1))
            return found

    assert reader.newest_step(BusyRun()) is None
    assert reader.newest_step(storage) == 1


@pytest.mark.parametrize("url", ["s3://", "gs:///", "sftp://", "memory://"])
def test_a_url_that_names_no_place_is_refused(url):
    """Before a library makes something of it."""
    with pytest.raises(IncompleteURL, match="names no place"):
        open_storage(url)


def test_a_run_folder_that_cannot_be_is_one_paragraph(tmp_path):
    """It is not damage, nor a traceback: StorageUnusable names the place and the way out, whatever the reason."""
    (tmp_path / "file").write_text("a file")
    for folder in (tmp_path / "file", tmp_path / "file/below", "/proc/run", tmp_path / ("x" * 300)):
        with pytest.raises(StorageUnusable, match=r"choose|Is its disk mounted"):
            RunOwner.acquire(open_storage(str(folder)))


def test_a_full_disk_keeps_what_was_saved(tmp_path):
    """A real tmpfs of 256 KiB: the save that does not fit fails, the earlier one still loads."""
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], check=False).returncode:
        pytest.skip("mounting a tmpfs takes root")
    try:
        storage = open_storage(str(mount / "run"))
        owner = RunOwner.acquire(storage)
        store = CheckpointStore(storage, term=owner.ensure_term(0))
        store.save(1, state_of(1))
        with pytest.raises(StorageUnusable, match="disk is full") as raised:
            store.save(2, {"big": torch.zeros(200_000)})
        assert raised.value.errno == errno.ENOSPC
        assert store.load().step == 1
        store.save(3, state_of(3))
        assert [info.step for info in store.list()] == [1, 3]
        owner.release()
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_file_system_without_hard_links_is_told_as_such(tmp_path, monkeypatch):
    """A double, since none can be mounted here: link() fails as it does on FAT. It is not a matter of permissions."""

    def no_link(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted", source)

    owner = RunOwner.acquire(open_storage(str(tmp_path / "run")))
    monkeypatch.setattr(os, "link", no_link)
    with pytest.raises(StorageUnusable, match="no hard links"):
        owner.ensure_term(0)
    assert sorted(os.listdir(tmp_path / "run")) == ["lock"], "no temporary file is left"
    owner.release()


@pytest.mark.parametrize("loss", ["folder", "link", "content"])
def test_checkpoints_that_are_away_for_a_while_are_never_disowned(run, loss):
    """A disk that is not mounted, or an emptied folder, in the very first term: an error, no ticket, all back later."""
    storage, owner = run
    store = store_of(run)
    store.save(3, state_of(3))
    folder, away = os.path.join(storage.root, "checkpoints"), os.path.join(storage.root, "away")
    os.rename(folder, away)
    if loss == "link":
        os.symlink("/nowhere/at/all", folder)
    if loss == "content":
        os.mkdir(folder)
    for look in (store.load, lambda: reader.newest_step(storage)):
        with pytest.raises((StorageUnusable, NoCheckpoint)):
            look()
    if loss != "content":
        with pytest.raises(StorageUnusable, match="mounted"):
            listing.list_checkpoints(storage)
        with pytest.raises(StorageUnusable, match="mounted"):
            owner.ensure_term(0)
    if loss == "link":
        os.unlink(folder)
    if loss == "content":
        os.rmdir(folder)
    os.rename(away, folder)
    assert store.load().step == 3
    assert [ticket.term for ticket in terms.read_tickets(storage)] == [1]


def test_the_checkpoint_of_another_run_is_not_taken_for_ours(run, tmp_path):
    """Copied in by hand, it is whole, but not of this run."""
    storage, _ = run
    other = open_storage(str(tmp_path / "other"))
    owner = RunOwner.acquire(other)
    CheckpointStore(other, term=owner.ensure_term(0)).save(8, state_of(8))
    owner.release()
    store = store_of(run)
    store.save(3, state_of(3))
    folder = "checkpoints/step-000000008.t1"
    shutil.copytree(os.path.join(other.root, folder), os.path.join(storage.root, folder))
    loaded = store.load()
    assert loaded.step == 3
    assert "another run" in loaded.skipped[0]


def test_lost_tickets_do_not_let_a_term_be_given_out_twice(run):
    """The names of the checkpoints remember it."""
    storage, owner = run
    store_of(run).save(3, state_of(3))
    shutil.rmtree(os.path.join(storage.root, "terms"))
    owner.term = None
    assert owner.ensure_term(3) == 2


def test_odd_entries_among_the_checkpoints_block_nobody(run):
    """A file with a checkpoint's name, a folder named like a manifest, a folder within a folder."""
    storage, _ = run
    store = store_of(run, Keep(last=1))
    (pathlib.Path(storage.root) / "checkpoints/step-000000001.t1").touch()
    (pathlib.Path(storage.root) / "checkpoints/step-000000002.t1/manifest.json").mkdir(parents=True)
    store.save(3, state_of(3))
    storage.make_folder("checkpoints/step-000000004.t1")
    store.save(5, state_of(5))
    assert store.load().step == 5
    assert [(info.step, info.state) for info in store.verify()][-1] == (5, "valid")
    assert not os.path.exists(os.path.join(storage.root, "checkpoints/step-000000004.t1"))


def test_a_commit_whose_answer_was_lost_is_not_a_conflict_at_the_second_attempt(run):
    """The manifest appeared, then the call failed: the retry of the same step finds its own checkpoint."""
    storage, owner = run
    term = owner.ensure_term(0)

    class AnswerLost:
        def __getattr__(self, name):
            return getattr(storage, name)

        def create(self, path, data):
            storage.create(path, data)
            raise StorageUnusable("write", path, OSError(errno.EIO, "the answer was lost"))

    with pytest.raises(StorageUnusable):
        CheckpointStore(AnswerLost(), term=term).save(4, state_of(4))
    assert CheckpointStore(storage, term=term).save(4, state_of(4)).step == 4
    assert_same(CheckpointStore(storage).load().state, state_of(4))
