"""Files that are larger than one block are written past the page cache, byte for byte."""

import errno
import os
import random

import pytest
from support.faults import CRASHED, CrashingSystem, in_child

from trainerd.checkpoint import direct_io, durable
from trainerd.checkpoint.direct_io import BLOCK_BYTES
from trainerd.checkpoint.errors import StorageUnusable
from trainerd.checkpoint.storage import open_storage

SIZES = [
    BLOCK_BYTES + 1,
    BLOCK_BYTES + 4096,
    2 * BLOCK_BYTES - 1,
    2 * BLOCK_BYTES,
    4 * BLOCK_BYTES + 12_345,
]


def cut(data, seed):
    """The data in parts of random sizes, some empty, some of many blocks."""
    chooser = random.Random(seed)
    start = 0
    while start < len(data):
        length = chooser.choice([0, 1, 7, 4095, 4096, 100_000, 3 * BLOCK_BYTES])
        yield memoryview(data)[start : start + length]
        start += length


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("folder", ["/dev/shm", None], ids=["memory", "disk"])
def test_whatever_the_parts_are_the_file_has_their_bytes(tmp_path, size, folder):
    """On a disk, and on a file system in memory; around the ends of blocks and pages."""
    path = os.path.join(folder or tmp_path, f"trainerd-test-{os.getpid()}")
    data = random.Random(size).randbytes(size)
    try:
        durable.write_new(path, cut(data, size), size)
        with open(path, "rb") as file:
            assert file.read() == data
    finally:
        os.unlink(path)


def test_a_write_that_takes_less_than_asked_is_continued(tmp_path, monkeypatch):
    """The kernel may take a part of a block only."""

    class ShortWrites:
        def __getattr__(self, name):
            return getattr(os, name)

        def pwrite(self, descriptor, data, offset):
            return os.pwrite(descriptor, data[: max(4096, len(data) // 2 // 4096 * 4096)], offset)

    monkeypatch.setattr(direct_io, "os", ShortWrites())
    data = random.Random(0).randbytes(2 * BLOCK_BYTES + 99)
    durable.write_new(str(tmp_path / "file"), [data], len(data))
    assert (tmp_path / "file").read_bytes() == data


def test_an_error_in_the_midst_of_a_file_reaches_the_caller(tmp_path, monkeypatch):
    """What the writing thread meets is the save's error."""

    class FailingDisk:
        calls = 0

        def __getattr__(self, name):
            return getattr(os, name)

        def pwrite(self, descriptor, data, offset):
            self.calls += 1
            if self.calls == 2:
                raise OSError(errno.EIO, "a fault of the test")
            return os.pwrite(descriptor, data, offset)

    monkeypatch.setattr(direct_io, "os", FailingDisk())
    with pytest.raises(StorageUnusable) as refused:
        open_storage(str(tmp_path)).write("file", [bytes(BLOCK_BYTES)] * 4, 4 * BLOCK_BYTES)
    assert refused.value.errno == errno.EIO


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_in_the_midst_of_a_large_file_leaves_no_more_than_that_file(tmp_path, when):
    """Its name means nothing until a manifest names it."""

    def crash():
        direct_io.os = CrashingSystem(2, when)
        durable.write_new(str(tmp_path / "file"), [bytes(BLOCK_BYTES)] * 4, 4 * BLOCK_BYTES)

    assert in_child(crash) == CRASHED
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
