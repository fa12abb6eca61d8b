"""Who owns a run: one process, whatever the storage, and one that was given up for dead never wins."""

import errno
import json
import logging
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading

import msgspec
import pytest
import xxhash
from support.owners import BEAT_SECONDS, Owner, Unlocked, open_place
from support.runs import eventually

from trainerd.checkpoint import alive, envelope
from trainerd.checkpoint.errors import FormatTooNew, RunOwned, StorageUnusable, TakenOver
from trainerd.checkpoint.listing import list_checkpoints
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.reader import newest_step
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.terms import read_tickets

HOLD = """
import sys
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.storage import open_storage
owner = RunOwner.acquire(open_storage(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def never(_seconds):
    raise AssertionError("nothing is to be waited for")


# On a local disk.


@pytest.fixture
def holder(tmp_path):
    url = str(tmp_path / "run")
    process = subprocess.Popen([sys.executable, "-c", HOLD, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait(30)
    process.stdin.close()
    process.stdout.close()


def test_a_second_owner_is_told_host_pid_and_start_of_the_first(tmp_path, holder):
    """The refusal comes at once and names whom to look for; after SIGKILL of the holder nobody cleans up by hand."""
    url = str(tmp_path / "run")
    with pytest.raises(RunOwned) as refused:
        RunOwner.acquire(open_storage(url), sleep=never)
    assert (refused.value.host, refused.value.pid) == (socket.gethostname(), holder.pid)
    assert refused.value.started in str(refused.value)
    assert not os.path.exists(f"{url}/run.json"), "a refused daemon leaves no trace"
    holder.send_signal(signal.SIGKILL)
    holder.wait(30)
    owner = RunOwner.acquire(open_storage(url))
    assert owner.ensure_term(0) == 1
    owner.release()


def test_a_lock_of_the_kernel_cannot_be_taken_from_a_living_process(tmp_path, holder):
    """`--take-over` on a local disk is refused with the way out: end that process."""
    with pytest.raises(RunOwned, match=f"kill -TERM {holder.pid}.*--take-over cannot take a run from a living process"):
        RunOwner.acquire(open_storage(str(tmp_path / "run")), take_over=True)


@pytest.mark.parametrize("content", [b"", b"garbage\xff", b'{"host": "elsewhere", "pid": 1, "started": "long ago"}'])
def test_a_lock_file_left_behind_blocks_nobody(tmp_path, content):
    """Only the lock itself counts, never what the file says: recycled pids and other hosts' names are harmless."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "lock").write_bytes(content)
    owner = RunOwner.acquire(open_storage(str(run)))
    assert json.loads((run / "lock").read_bytes())["pid"] == os.getpid()
    owner.release()


def test_a_refused_run_is_not_left_locked(tmp_path):
    """What goes wrong after the lock was taken gives it back."""
    run = tmp_path / "run"
    owner = RunOwner.acquire(open_storage(str(run)))
    owner.ensure_term(0)
    owner.release()
    (run / "checkpoints").rename(run / "aside")
    with pytest.raises(StorageUnusable):
        RunOwner.acquire(open_storage(str(run)))
    (run / "aside").rename(run / "checkpoints")
    RunOwner.acquire(open_storage(str(run))).release()


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


# Where no kernel keeps the run: a local disk without its locks, and real servers.


@pytest.fixture(params=["unlocked", "s3", "sftp"])
def place(request, servers, tmp_path):
    if request.param == "unlocked":
        return {"url": str(tmp_path / "run"), "options": {}, "unlocked": True}
    url, options = servers.place(request.param)
    return {"url": url, "options": options, "unlocked": False}


@pytest.fixture
def storage(place):
    return open_place(**place)


@pytest.fixture
def unlocked(tmp_path):
    return Unlocked(open_storage(str(tmp_path / "run")))


@pytest.fixture
def start(place, tmp_path):
    """Starts owners in processes of their own."""
    owners = []

    def start_one():
        owners.append(Owner(place, tmp_path / f"owner-{len(owners)}.log"))
        owners[-1].says("ready")
        return owners[-1]

    yield start_one
    for owner in owners:
        owner.__exit__()


def test_of_two_daemons_that_start_at_the_same_moment_exactly_one_runs(start):
    """Twenty times: one gets the first term, the other is told who owns the run."""
    pair = [start(), start()]
    for round_ in range(20):
        for owner in pair if round_ % 2 else reversed(pair):
            owner.tell(f"race {round_}")
        answers = [owner.says(f"race {round_}:").split(": ")[1] for owner in pair]
        assert sorted(answers) in (["RunOwned", "term 1"], ["TakenOver", "term 1"])
        winner, loser = sorted(pair, key=lambda owner: f"race {round_}: term 1" not in owner.text)
        assert f"process {winner.pid} on {socket.gethostname()}" in loser.says(f"race {round_}:")
        winner.tell("release")
        eventually("release", lambda n=round_ + 1, owner=winner: owner.text.count("release: done") >= 1)


def test_an_owner_without_a_ticket_yet_is_an_owner(start, storage):
    """A daemon that still builds its trainer is told by its signs of life; the way out is named."""
    first, second = start(), start()
    first.do("acquire", "acquire: done")
    refusal = second.do("acquire", "acquire: RunOwned")
    assert f"process {first.pid} on {socket.gethostname()}, running since 20" in refusal
    assert "--take-over takes the run from it" in refusal
    assert first.do("term 0", "term 0:") == "term 0: term 1"
    assert storage.names("terms") == ["000001.json", "alive.json"]


def test_a_dead_owner_on_this_machine_is_followed_at_once(start, storage):
    """After SIGKILL nothing is watched: the process is certain to be gone."""
    first = start()
    first.do("acquire", "acquire: done")
    first.do("term 0", "term 0: term 1")
    first.process.kill()
    eventually("death", lambda: first.process.poll() is not None)
    owner = RunOwner.acquire(storage, sleep=never)
    assert owner.ensure_term(0) == 2
    owner.release()


def test_an_owner_that_has_ended_is_followed_at_once(start, storage):
    """It has left word, which counts on every machine."""
    first = start()
    first.do("acquire", "acquire: done")
    first.do("release", "release: done")
    assert read_sign(storage).released
    RunOwner.acquire(storage, sleep=never).release()


def test_a_silent_owner_on_another_machine_is_watched_and_then_followed(storage, caplog):
    """Nobody here can look for its process: only the time tells, our own; the user is told about the wait."""
    leave_sign(storage, host="elsewhere", interval_seconds=2.0)
    caplog.set_level(logging.INFO, "trainerd")
    naps = []
    owner = RunOwner.acquire(storage, sleep=naps.append)
    assert sum(naps) == pytest.approx(6.5), "three intervals of the one that is watched, and some"
    assert "process 1 on elsewhere may own this run: watching for 6 s whether it is alive" in caplog.text
    assert "process 1 on elsewhere gave no sign of life for 6 s and is taken for dead" in caplog.text
    assert read_sign(storage).pid == os.getpid()
    owner.release()


@pytest.mark.parametrize("swept", [False, True], ids=["at-once", "after-its-heir-swept"])
def test_a_machine_that_froze_before_its_commit_cannot_win(start, storage, swept):
    """What it commits when it wakes up counts no more, it deletes nothing of its heir, and it learns who that is."""
    zombie, heir = start(), start()
    zombie.do("acquire", "acquire: done")
    zombie.do("term 0", "term 0: term 1")
    zombie.do("save 10", "save 10: done")
    zombie.tell("save 40 stopped-before-commit")
    eventually("stop", lambda: state_of(zombie.pid) == "T")

    heir.do("acquire", "acquire: done")
    assert f"process {zombie.pid} on {socket.gethostname()} gave no sign of life" in heir.text
    heir.do("term 10", "term 10: term 2")
    if swept:
        heir.do("save 20", "save 20: done")

    os.kill(zombie.pid, signal.SIGCONT)
    assert f"was taken over by process {heir.pid} on " in zombie.says("lost:")
    zombie.says("save 40 stopped-before-commit:")
    states = {info.name: info.state for info in list_checkpoints(storage)}
    if swept:
        assert states.pop("step-000000040.t1", "gone") in ("gone", "damaged"), "its data was debris"
        assert states == {"step-000000020.t2": "valid"}
    else:
        assert states == {"step-000000010.t1": "valid", "step-000000040.t1": "superseded"}
    assert newest_step(storage) == (20 if swept else 10)
    zombie.do("save 50", "save 50: TakenOver")
    zombie.do("term 40", "term 40: TakenOver")
    zombie.do("release", "release: done")
    assert read_sign(storage).pid == heir.pid, "the last word belongs to the heir"
    heir.do("save 30", "save 30: done")
    assert newest_step(storage) == 30


def test_a_living_owner_loses_the_run_to_whoever_takes_it_over(start, storage):
    """It learns that within some beats, without having saved, and can save no more."""
    first, second = start(), start()
    first.do("acquire", "acquire: done")
    first.do("term 0", "term 0: term 1")
    first.do("save 10", "save 10: done")
    second.do("acquire take-over", "acquire take-over: done")
    assert f"taken from process {first.pid} on {socket.gethostname()}, as --take-over asks" in second.text
    second.do("term 10", "term 10: term 2")
    assert f"was taken over by process {second.pid} on {socket.gethostname()}, which began term 2 from step 10" in (
        first.says("lost:")
    )
    first.do("save 20", "save 20: TakenOver")
    second.do("save 15", "save 15: done")
    assert [(info.step, info.state) for info in list_checkpoints(storage)] == [(15, "valid")]


# What a server makes no different.


def test_a_term_that_another_began_meanwhile_is_never_begun(unlocked):
    """The number of the next ticket is fixed at the start, for steps back as well: no term is begun above a rival's."""
    first = RunOwner.acquire(unlocked)
    second = RunOwner.acquire(unlocked, take_over=True)
    assert second.ensure_term(0) == 1
    with pytest.raises(TakenOver) as refused:
        first.ensure_term(0)
    assert refused.value.pid == os.getpid()
    third = RunOwner.acquire(unlocked, take_over=True)
    assert third.ensure_term(0) == 2
    with pytest.raises(TakenOver):
        second.ensure_term(0)
    assert [ticket.term for ticket in read_tickets(unlocked)] == [1, 2]
    for owner in (first, second, third):
        owner.release()


class AnswerLost(Unlocked):
    """An unlocked disk on which a ticket is made, but the answer does not come."""

    lose = True

    def create(self, path, data):
        self._storage.create(path, data)
        if self.lose and path.startswith("terms/0"):
            self.lose = False
            raise StorageUnusable("write", path, OSError(errno.ETIMEDOUT, "a fault of the test"))


@pytest.mark.parametrize(("step", "term"), [(5, 1), (4, 2)])
def test_a_ticket_whose_answer_was_lost_is_our_own(tmp_path, step, term):
    """The next worker goes on in it, or, from another step, in the next one: nobody has taken the run over."""
    storage = AnswerLost(open_storage(str(tmp_path / "run")))
    owner = RunOwner.acquire(storage, beat_seconds=0.01)
    with pytest.raises(StorageUnusable):
        owner.ensure_term(5)
    beats = read_sign(storage).beat
    eventually("beats beside our own ticket", lambda: read_sign(storage).beat > beats + 2)
    assert owner.lost is None
    assert owner.ensure_term(step) == term
    owner.release()


class Flaky(Unlocked):
    """An unlocked disk that can go away and come back."""

    away = False
    refused = 0

    def replace(self, path, data):
        if self.away:
            self.refused += 1
            raise StorageUnusable("write", path, OSError(errno.EIO, "a fault of the test"))
        self._storage.replace(path, data)


def test_a_storage_that_goes_away_between_beats_ends_nothing(tmp_path, caplog):
    """It is told once; when the storage is back, so are the signs of life, and the run is still ours."""
    storage = Flaky(open_storage(str(tmp_path / "run")))
    owner = RunOwner.acquire(storage, beat_seconds=0.01)
    assert owner.ensure_term(0) == 1
    storage.away = True
    eventually("beats that fail", lambda: storage.refused >= 5)
    storage.away = False
    beat = read_sign(storage).beat
    eventually("beats", lambda: read_sign(storage).beat > beat)
    assert caplog.text.count("no sign of life was written") == 1
    assert owner.lost is None
    assert owner.ensure_term(0) == 1
    owner.release()
    assert read_sign(storage).released


class Hanging(Unlocked):
    """An unlocked disk that, once it hangs, answers no write any more."""

    def __init__(self, storage):
        super().__init__(storage)
        self.hangs = False
        self.entered = threading.Event()
        self.answer = threading.Event()

    def replace(self, path, data):
        if self.hangs:
            self.entered.set()
            self.answer.wait()
        self._storage.replace(path, data)


def test_a_storage_that_hangs_does_not_keep_an_owner_from_ending(tmp_path, monkeypatch):
    """The last word is waited for, but not for ever."""
    monkeypatch.setattr(alive, "LAST_WORD_SECONDS", 0.1)
    storage = Hanging(open_storage(str(tmp_path / "run")))
    owner = RunOwner.acquire(storage, beat_seconds=0.01)
    storage.hangs = True
    assert storage.entered.wait(30)
    owner.release()
    assert not storage.answer.is_set()
    storage.hangs = False
    storage.answer.set()
    eventually("the late last word", lambda: read_sign(storage).released)


def test_half_a_sign_of_life_is_watched_like_a_whole_one(unlocked, caplog):
    """Where files are not replaced atomically, damage may be what a living owner is just writing."""
    unlocked.make_folder("terms")
    unlocked.replace("terms/alive.json", b"{")

    def owner_goes_on(_seconds):
        unlocked.replace("terms/alive.json", b'{"xx')

    with pytest.raises(RunOwned, match="another process"):
        RunOwner.acquire(unlocked, sleep=owner_goes_on)
    RunOwner.acquire(unlocked, sleep=lambda _seconds: None).release()
    assert "a process that is not known" in caplog.text


def test_an_owner_that_ends_while_it_is_watched_is_followed(unlocked):
    """Its last term counts: ours is the one after it."""
    first = RunOwner.acquire(unlocked)

    def first_ends(_seconds):
        first.ensure_term(0)
        first.release()

    second = RunOwner.acquire(unlocked, sleep=first_ends)
    assert second.ensure_term(0) == 2
    second.release()


def test_a_stop_ends_the_watch_and_changes_nothing(unlocked):
    """What `sleep` raises comes through."""
    leave_sign(unlocked, host="elsewhere")
    before = unlocked.read("terms/alive.json")

    def stopped(_seconds):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RunOwner.acquire(unlocked, sleep=stopped)
    assert unlocked.read("terms/alive.json") == before
    assert unlocked.names("") == ["terms"]


@pytest.mark.parametrize(
    ("fields", "died"),
    [
        ({}, False),
        ({"ticks": 1}, True),
        ({"pid": 2**22 + 1}, True),
        ({"host": "elsewhere", "ticks": 1}, False),
        ({"machine": "another boot", "ticks": 1}, False),
        ({"machine": "", "ticks": 1}, False),
    ],
    ids=["alive", "its pid is another's now", "gone", "another host", "another boot or container", "not known"],
)
def test_only_a_process_that_is_certain_to_be_gone_is_dead(fields, died):
    """A pid means something on its own machine, boot and namespace only, and together with its start."""
    sign = msgspec.structs.replace(alive.first_sign("nonce", BEAT_SECONDS), **fields)
    assert sign.has_died() is died


def test_a_process_that_nobody_has_waited_for_is_dead():
    """A zombie of the kernel holds nothing any more."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    sign = msgspec.structs.replace(
        alive.first_sign("nonce", BEAT_SECONDS), pid=child.pid, ticks=alive._state_and_ticks(child.pid)[1]
    )
    assert not sign.has_died()
    child.kill()
    eventually("death", sign.has_died)
    assert child.wait(30) == -signal.SIGKILL
    child.stdin.close()


def leave_sign(storage, **fields):
    """What an owner that is no longer there has left."""
    sign = msgspec.structs.replace(alive.first_sign("nonce", BEAT_SECONDS), pid=1, **fields)
    storage.make_folder("terms")
    storage.replace("terms/alive.json", envelope.seal(sign))


def read_sign(storage):
    return envelope.unseal(storage.read("terms/alive.json"), alive.SignOfLife, "alive.json")


def state_of(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
