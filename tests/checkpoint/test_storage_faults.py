"""Servers that hang, refuse or break off: an error in time, never a library's exception, never a wait without end."""

import contextlib
import dataclasses
import socket
import subprocess
import threading

import pytest

from trainerd.checkpoint.errors import StorageUnusable
from trainerd.checkpoint.patience import Patience
from trainerd.checkpoint.remote_storage import RemoteStorage
from trainerd.checkpoint.sftp_storage import SftpStorage
from trainerd.checkpoint.storage import open_storage

HASTY = Patience(request_seconds=1.0, tries=2, total_seconds=5.0, first_wait_seconds=0.01, longest_wait_seconds=0.02)


def hasty(place):
    """The storage of a place, with little patience."""
    storage = open_storage(*place)
    return type(storage)(place.url, place.options, storage.guarantees, HASTY)


@contextlib.contextmanager
def server(answer):
    """Accepts connections on a loopback port and has `answer` deal with each; the port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connections = []

        def serve():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                connections.append(connection)
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        for connection in connections:
            connection.close()


def hang(connection):
    """Take what comes and say nothing."""
    with contextlib.suppress(OSError):
        while connection.recv(65536):
            pass


def break_off(connection):
    """Hang up in the middle of the request."""
    with contextlib.suppress(OSError):
        connection.recv(10)
    connection.close()


@pytest.mark.parametrize("answer", [hang, break_off])
def test_a_server_that_does_not_answer_is_given_up_in_time(answer, servers):
    """S3's protocol, to a port behind which nobody speaks it."""
    options = servers.place("s3").options
    with server(answer) as port:
        elsewhere = {**options, "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"}}
        storage = RemoteStorage("s3://bucket/run", elsewhere, open_storage("s3://bucket/run").guarantees, HASTY)
        for operation in (
            lambda: storage.create("a", b"x"),
            lambda: storage.write("a", [b"x"], 1),
            lambda: storage.read("a"),
            lambda: storage.names(""),
            lambda: storage.delete("a"),
        ):
            with pytest.raises(StorageUnusable, match="s3://bucket/run") as refused:
                operation()
            assert "Nothing that was saved is lost" in str(refused.value)


def test_an_ssh_server_that_does_not_answer_is_given_up_in_time():
    """It accepts, and never sends its banner."""
    with server(hang) as port:
        url = f"sftp://127.0.0.1:{port}/run"
        storage = SftpStorage(url, {"username": "x", "password": "y"}, open_storage(url).guarantees, HASTY)
        with pytest.raises(StorageUnusable, match="sftp://"):
            storage.read("a")


def test_a_connection_that_is_cut_between_operations_is_made_anew(servers):
    """SFTP keeps one; the server, or a gateway on the way, may end it."""
    storage = hasty(servers.place("sftp"))
    storage.make_folder("a")
    storage.create("a/x", b"before")
    storage._fs.client.close()
    assert storage.read("a/x") == b"before"
    storage._fs.ftp.get_channel().close()
    storage.create("a/y", b"after")
    assert storage.names("a") == ["x", "y"]


@pytest.mark.parametrize("kind", ["abfs", "sftp"])
def test_wrong_credentials_are_named_at_once(servers, kind, tmp_path, caplog):
    """No further try could help. (The S3 and Google servers of these tests take any credentials.)"""
    place = servers.place(kind)
    if kind == "abfs":
        wrong = place.options["connection_string"].replace("AccountKey=E", "AccountKey=F")
        options = {"connection_string": wrong}
    else:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
        options = {**place.options, "key_filename": str(tmp_path / "other")}
    storage = open_storage(place.url, options)
    with pytest.raises(StorageUnusable, match="redentials") as refused:
        storage.create("x", b"x")
    assert place.url in str(refused.value)
    assert "trying again" not in caplog.text


def test_a_folder_that_one_may_not_write_is_named(servers):
    """By SFTP, to a place that belongs to the system."""
    place = servers.place("sftp")
    host = place.url.removeprefix("sftp://").partition("/")[0]
    storage = open_storage(f"sftp://{host}/proc/sys", place.options)
    with pytest.raises(StorageUnusable, match="/proc/sys"):
        storage.create("x", b"x")


def test_a_retry_is_a_line_of_log_that_says_what_is_waited_for(servers, caplog):
    """One for each, with the try's number."""
    storage = hasty(servers.place("s3"))
    original, failed = storage._call, []

    def failing_once(method, *args, **kwargs):
        if not failed:
            failed.append(method)
            raise ConnectionResetError("cut")
        return original(method, *args, **kwargs)

    storage._call = failing_once
    storage.write("a/x", [b"12"], 2)
    [line] = [record.getMessage() for record in caplog.records if record.name == "trainerd.checkpoint"]
    assert line.endswith("ConnectionResetError: cut; trying again (2 of 2)")
    assert f"Cannot write {storage.url}/a/x" in line


def test_the_deadline_of_a_request_grows_with_what_it_carries():
    """A slow line is no dead one."""
    patience = dataclasses.replace(Patience(), request_seconds=10.0, slowest_bytes_per_second=1000.0)
    assert patience.deadline(0) == 10.0
    assert patience.deadline(5000) == 15.0
