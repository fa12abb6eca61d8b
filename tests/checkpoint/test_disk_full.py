"""A storage that refuses to write is a state that passes, not a crash: real full, read-only and forbidden disks."""

import errno
import os
import subprocess

import pytest
import torch
from support.faults import in_child
from support.states import assert_same

from trainerd.checkpoint.errors import StorageUnusable
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.retention import Keep
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore

MEGABYTE = 2**20


@pytest.fixture
def disk(tmp_path):
    """Mounts a tmpfs of so many MiB, and unmounts it."""
    mounted = []

    def mount(size, options=""):
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}m{options}", "tmpfs", str(folder)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("mounting a tmpfs takes root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def state_of(step, megabytes=2):
    return {"w": torch.full((megabytes * MEGABYTE // 4,), float(step)), "n": step}


def store_in(folder, keep):
    storage = open_storage(str(folder / "run"))
    owner = RunOwner.acquire(storage)
    return CheckpointStore(storage, term=owner.ensure_term(0), keep=keep), owner


def steps(store):
    return [info.step for info in store.list() if info.state == "valid"]


def test_a_disk_that_holds_what_the_rules_keep_and_no_more_goes_on_for_ever(disk):
    """For each save that does not fit beside the others, the one that it would replace goes first."""
    store, owner = store_in(disk(7), Keep(last=3))
    for step in range(1, 9):
        store.save(step, state_of(step))
    assert steps(store) == [6, 7, 8]
    assert_same(store.load().state, state_of(8))
    owner.release()


def test_a_save_for_which_there_is_no_space_leaves_the_newest_and_no_debris(disk):
    """With one kept, it is never given up for one that might not fit; when there is space again, the next one comes."""
    folder = disk(7)
    store, owner = store_in(folder, Keep(last=1))
    store.save(1, state_of(1))
    (folder / "other").write_bytes(bytes(4 * MEGABYTE))
    for step in (2, 3):
        with pytest.raises(StorageUnusable, match=r"disk is full: free some space") as refused:
            store.save(step, state_of(step))
        assert refused.value.errno == errno.ENOSPC
        assert [(info.step, info.state) for info in store.list()] == [(1, "valid")]
        assert_same(store.load().state, state_of(1))
    (folder / "other").unlink()
    store.save(4, state_of(4))
    assert steps(store) == [4]
    owner.release()


def test_space_is_reserved_before_the_first_byte(disk, monkeypatch):
    """A file that will not fit is not begun."""
    from trainerd.checkpoint import durable

    written = []

    class WatchedSystem:
        def __getattr__(self, name):
            return getattr(os, name)

        def write(self, descriptor, data):
            written.append(len(data))
            return os.write(descriptor, data)

    store, owner = store_in(disk(7), Keep(last=1))
    monkeypatch.setattr(durable, "os", WatchedSystem())
    with pytest.raises(StorageUnusable, match="full"):
        store.save(1, state_of(1, megabytes=8))
    assert max(written, default=0) < MEGABYTE
    owner.release()


def test_a_disk_that_became_read_only_is_named_as_such(disk):
    """EROFS, for real."""
    folder = disk(7)
    store, owner = store_in(folder, Keep())
    store.save(1, state_of(1))
    owner.release()  # the lock is a file that is open for writing
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    with pytest.raises(StorageUnusable, match="read-only"):
        store.save(2, state_of(2))
    subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    store.save(3, state_of(3))
    assert steps(store) == [1, 3]


def test_a_folder_that_one_may_not_write_is_named_as_such(tmp_path):
    """EACCES, for real: by a user who is not root."""
    if os.getuid() != 0:
        pytest.skip("becoming another user takes root")
    tmp_path.chmod(0o755)
    store, owner = store_in(tmp_path, Keep())
    # Small, and made here: torch's threads do not survive a fork.
    first, second = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
    store.save(1, first)
    for folder in (tmp_path, *tmp_path.parents[:4]):
        folder.chmod(folder.stat().st_mode | 0o755)

    def as_nobody():
        os.setuid(65534)
        with pytest.raises(StorageUnusable, match="permissions"):
            store.save(2, second)
        assert store.load().step == 1

    assert in_child(as_nobody) == 0
    assert steps(store) == [1]
    owner.release()


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.EDQUOT, "quota is used up"), (errno.EIO, "Input/output error"), (errno.ENOSPC, "disk is full")],
)
def test_each_reason_has_its_own_words(number, says):
    """No quota can be set up here, so that one is told by its number alone."""
    assert says in str(StorageUnusable("write", "place", OSError(number, os.strerror(number))))
