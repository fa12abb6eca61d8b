"""What every storage must do, on real servers: one suite for all."""

import os
import threading

import pytest
from support.faults import in_child
from support.servers import KINDS

from trainerd.checkpoint.errors import StorageUnusable
from trainerd.checkpoint.probe import probed
from trainerd.checkpoint.storage import open_storage

REMOTE = [kind for kind in KINDS if kind not in ("local", "memory")]


@pytest.fixture(params=KINDS)
def place(request, servers):
    return servers.place(request.param)


@pytest.fixture(params=REMOTE)
def remote(request, servers):
    return servers.place(request.param)


@pytest.fixture
def storage(place):
    storage = probed(open_storage(place.url, place.options))
    storage.make_folder("a")
    return storage


@pytest.mark.parametrize("body", [b"x", b"\0" * 1000, os.urandom(40_000_000)], ids=["byte", "zeros", "40 MB"])
def test_what_is_created_can_be_read_and_is_never_replaced(storage, body):
    """The commit of a checkpoint is a creation."""
    storage.create("a/created", body)
    assert storage.read("a/created") == body
    assert storage.size("a/created") == len(body)
    with pytest.raises(FileExistsError):
        storage.create("a/created", b"another")
    assert storage.read("a/created") == body


def test_a_creation_that_has_happened_already_is_no_conflict(storage):
    """The answer may have been lost: the same bytes are our own. On a local disk no answer is lost."""
    storage.create("a/created", b"nonce")
    if storage.guarantees.life_lock:
        with pytest.raises(FileExistsError):
            storage.create("a/created", b"nonce")
    else:
        storage.create("a/created", b"nonce")


def test_of_many_threads_that_create_a_name_one_succeeds(storage):
    """Each tries with bytes of its own."""
    if not storage.guarantees.exclusive_create:
        pytest.skip("this server knows no conditional create, as the probe has found")
    for round_ in range(3):
        start = threading.Barrier(16)
        won = []

        def race(number, path=f"a/raced{round_}", start=start, won=won):
            start.wait(30)
            try:
                storage.create(path, b"%d" % number)
            except FileExistsError:
                return
            won.append(number)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert storage.read(f"a/raced{round_}") == b"%d" % won[0]


def test_of_two_processes_that_create_a_name_one_succeeds(place, storage):
    """Forked, so each must make connections of its own."""
    if not (storage.guarantees.exclusive_create and storage.guarantees.shared):
        pytest.skip("nothing is promised here")

    def create():
        try:
            storage.create("a/raced", str(os.getpid()).encode())
        except FileExistsError:
            return 3
        return 0

    assert [in_child(create), in_child(create)] == [0, 3]


def test_parts_are_written_in_order_and_any_range_can_be_read(storage):
    """Inside, across the end, beyond the end."""
    data = os.urandom(100_000)
    storage.write("a/data", [data[:1], b"", memoryview(data)[1:70_000], data[70_000:]], len(data))
    assert storage.size("a/data") == len(data)
    assert storage.read("a/data") == data
    assert storage.read("a/data", 10, 20) == data[10:30]
    assert storage.read("a/data", 99_990, 100) == data[99_990:]
    assert storage.read("a/data", 200_000, 10) == b""
    buffer = memoryview(bytearray(50))
    assert storage.read_into("a/data", 500, buffer) == 50
    assert buffer == data[500:550]
    assert storage.read_into("a/data", 99_980, buffer) == 20
    assert buffer[:20] == data[99_980:]


def test_a_replaced_file_is_the_new_one_at_once(storage):
    """The sign of life is one."""
    for content in (b"first", b"second, longer", b"3"):
        storage.replace("a/alive", content)
        assert storage.read("a/alive") == content


def test_listings_show_what_was_just_written_and_deleted(storage):
    """No cache, no neighbours: `step-1` is no part of `step-10`."""
    for folder in ("step-1", "step-10"):
        storage.make_folder(folder)
        for name in ("x", "y", "z with space+and%25&=#ü"):
            storage.write(f"{folder}/{name}", [b"12345"], 5)
    storage.make_folder("step-1")
    assert storage.names("step-1") == ["x", "y", "z with space+and%25&=#ü"]
    assert storage.sizes("step-1") == {"x": 5, "y": 5, "z with space+and%25&=#ü": 5}
    assert {"step-1", "step-10"} <= set(storage.names(""))
    assert not {"step-1", "step-10"} & set(storage.sizes(""))
    storage.delete("step-1/x")
    storage.delete("step-1/x")
    assert storage.names("step-1") == ["y", "z with space+and%25&=#ü"]
    storage.delete_folder("step-1")
    storage.delete_folder("step-1")
    assert storage.names("step-1") == []
    assert storage.names("step-10") == ["x", "y", "z with space+and%25&=#ü"]


def test_what_is_not_there_is_said_so(storage):
    """By the answers that callers decide by, never by another error."""
    with pytest.raises(FileNotFoundError):
        storage.read("a/missing")
    with pytest.raises(FileNotFoundError):
        storage.read("a/missing", 5, 10)
    with pytest.raises(FileNotFoundError):
        storage.read_into("a/missing", 0, memoryview(bytearray(4)))
    assert storage.size("a/missing") is None
    assert storage.names("missing") == []
    assert storage.sizes("missing") == {}


def test_a_storage_outlives_a_fork(storage):
    """The child makes its own connection, and the parent's still works."""
    storage.create("a/parent", b"parent")
    if storage.guarantees.shared:
        assert in_child(lambda: storage.create("a/child", b"child")) == 0
        assert storage.read("a/child") == b"child"
    assert storage.read("a/parent") == b"parent"


def test_the_probe_leaves_nothing_behind(place):
    """Its files are gone; what the server is held to is what it showed."""
    storage = probed(open_storage(place.url, place.options))
    assert [name for name in storage.names("") if name.startswith("probe-")] == []
    assert storage.guarantees.exclusive_create or storage.url.startswith("gs:")


def test_a_place_that_is_not_there_is_named_with_the_way_out(remote):
    """A bucket, a container or a folder that nobody made: nothing is made by accident, nothing hangs."""
    scheme, _, rest = remote.url.partition("://")
    root, _, _ = rest.partition("/")
    if scheme == "sftp":
        storage = open_storage(f"sftp://{root}/proc/no/such/place", remote.options)
    else:
        storage = open_storage(f"{scheme}://no-such-place-{os.getpid()}/run", remote.options)
    with pytest.raises(StorageUnusable) as refused:
        probed(storage)
    assert storage.url in str(refused.value)
