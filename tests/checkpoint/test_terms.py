"""Who owns a run, and which checkpoints its history lets count."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from trainerd.checkpoint.errors import FormatTooNew, RunOwned
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.terms import RunOwner, Ticket, counts, read_tickets

HOLD = """
import sys
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.terms import RunOwner
owner = RunOwner.acquire(open_storage(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def ticket(term, resumed_from):
    return Ticket(written_by="", term=term, resumed_from=resumed_from, host="h", pid=1, nonce="n", time=0.0)


def test_a_second_owner_is_told_host_pid_and_start_of_the_first(tmp_path):
    """The refusal comes at once and names whom to look for; after SIGKILL of the holder nobody cleans up by hand."""
    url = str(tmp_path / "run")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RunOwned) as refused:
            RunOwner.acquire(open_storage(url))
        assert (refused.value.host, refused.value.pid) == (socket.gethostname(), holder.pid)
        assert refused.value.started in str(refused.value)
        assert not os.path.exists(f"{url}/run.json"), "a refused daemon leaves no trace"
        holder.send_signal(signal.SIGKILL)
        holder.wait(30)
        owner = RunOwner.acquire(open_storage(url))
        assert owner.ensure_term(0) == 1
        owner.release()
    finally:
        holder.kill()
        holder.wait(30)
        holder.stdin.close()
        holder.stdout.close()


@pytest.mark.parametrize("content", [b"", b"garbage\xff", b'{"host": "elsewhere", "pid": 1, "started": "long ago"}'])
def test_a_lock_file_left_behind_blocks_nobody(tmp_path, content):
    """Only the lock itself counts, never what the file says: recycled pids and other hosts' names are harmless."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "lock").write_bytes(content)
    owner = RunOwner.acquire(open_storage(str(run)))
    assert json.loads((run / "lock").read_bytes())["pid"] == os.getpid()
    owner.release()


def test_a_run_of_a_newer_format_is_refused_before_anything_is_written(tmp_path):
    """The message says which version made it; the folder stays as it was."""
    url = tmp_path / "run"
    owner = RunOwner.acquire(open_storage(str(url)))
    owner.ensure_term(0)
    owner.release()
    reseal(url / "run.json")
    before = sorted((path, path.read_bytes()) for path in url.rglob("*") if path.is_file())
    with pytest.raises(FormatTooNew, match=r"format 7.*written by trainerd 9\.0"):
        RunOwner.acquire(open_storage(str(url)))
    assert sorted((path, path.read_bytes()) for path in url.rglob("*") if path.is_file()) == before


def reseal(path: pathlib.Path):
    """Rewrite a sealed file as format 7 of trainerd 9.0, with the right hash."""
    sealed = json.loads(path.read_bytes())
    rest = f'"format":7,"body":{json.dumps(sealed["body"] | {"written_by": "trainerd 9.0"})}}}\n'.encode()
    path.write_bytes(b'{"xxh3_128":"%s",%s' % (xxhash.xxh3_128_hexdigest(rest).encode(), rest))


def test_a_lost_race_for_the_next_ticket_is_a_refusal(tmp_path):
    """Two owners on a storage without locks: the exclusive create decides, the loser is told who won."""
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    rival = RunOwner(storage, owner._lock)
    owner.ensure_term(0)
    tickets = read_tickets(storage)
    rival.ensure_term(0)

    class Stale:
        def __getattr__(self, name):
            return getattr(storage, name)

        def names(self, folder):
            return ["000001.json"] if folder == "terms" else storage.names(folder)

    late = RunOwner(Stale(), owner._lock)
    with pytest.raises(RunOwned) as refused:
        late.ensure_term(0)
    assert refused.value.pid == os.getpid()
    assert [t.term for t in read_tickets(storage)] == [1, 2]
    assert len(tickets) == 1
    owner.release()


def test_foreign_files_beside_the_tickets_are_ignored(tmp_path):
    """Only canonical names are tickets: left-over temporary files are not."""
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    owner.ensure_term(0)
    for name in ("000002.json.ab.tmp", "0000003.json", "4.json", "alive.json", "notes"):
        (tmp_path / "run/terms" / name).write_text("x")
    assert [t.term for t in read_tickets(storage)] == [1]
    owner.release()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 30), st.integers(1, 6))
def test_a_checkpoint_counts_only_below_every_later_resume_point(resume_points, step, term):
    """The lineage rule, word for word."""
    tickets = [ticket(number, resumed) for number, resumed in enumerate(resume_points, 1)]
    later = [t.resumed_from for t in tickets if t.term > term]
    assert counts(CheckpointName(step, term), tickets) == (step <= min(later, default=step))
