"""Which checkpoints the history of a run lets count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainerd.checkpoint.errors import TakenOver
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.terms import (
    Ticket,
    counts,
    newest_committed_step,
    newest_term,
    next_free_term,
    read_tickets,
)


def ticket(term, resumed_from):
    return Ticket(written_by="", term=term, resumed_from=resumed_from, host="h", pid=1, nonce="n", time=0.0)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 30), st.integers(1, 6))
def test_a_checkpoint_counts_only_below_every_later_resume_point(resume_points, step, term):
    """The lineage rule, word for word."""
    tickets = [ticket(number, resumed) for number, resumed in enumerate(resume_points, 1)]
    later = [t.resumed_from for t in tickets if t.term > term]
    assert counts(CheckpointName(step, term), tickets) == (step <= min(later, default=step))


def test_foreign_files_beside_the_tickets_are_ignored(tmp_path):
    """Only canonical names are tickets: left-over temporary files are not."""
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    owner.ensure_term(0)
    for name in ("000002.json.ab.tmp", "0000003.json", "4.json", "alive.json", "notes"):
        (tmp_path / "run/terms" / name).write_text("x")
    assert [t.term for t in read_tickets(storage)] == [1]
    assert newest_term(storage) == 1
    owner.release()


def test_a_sign_of_life_alone_is_no_history(tmp_path):
    """An owner that ended before its first term leaves a run without `checkpoints/`: that is no missing disk."""
    (tmp_path / "terms").mkdir()
    (tmp_path / "terms/alive.json").write_text("x")
    assert next_free_term(open_storage(str(tmp_path))) == 1


def test_a_number_that_was_given_out_is_not_given_out_again(tmp_path):
    """Should tickets be lost, the names of checkpoints still tell which terms there were."""
    (tmp_path / "checkpoints/step-000000005.t7").mkdir(parents=True)
    assert next_free_term(open_storage(str(tmp_path))) == 8


class Counting:
    """The real storage; counts the looks at single files."""

    def __init__(self, storage):
        self._storage = storage
        self.looks = 0

    def __getattr__(self, name):
        return getattr(self._storage, name)

    def size(self, path):
        self.looks += 1
        return self._storage.size(path)


def test_a_long_history_does_not_slow_the_start_down(tmp_path):
    """Of many checkpoints the newest one on the lineage is found by one look at each newer one, committed or not."""
    for step in range(1, 301):
        folder = tmp_path / f"checkpoints/step-{step:09d}.t1"
        folder.mkdir(parents=True)
        if step <= 298:
            (folder / "manifest.json").write_text("x")
    storage = Counting(open_storage(str(tmp_path)))
    assert newest_committed_step(storage, []) == 298
    assert storage.looks == 3
    storage.looks = 0
    assert newest_committed_step(storage, [ticket(2, 40)]) == 40
    assert storage.looks == 1


def test_the_error_of_a_take_over_names_the_new_owner_and_what_is_lost():
    """Whoever reads it knows where the run goes on, and from which step."""
    error = TakenOver("s3://bucket/run", "node7", 4711, 0.0, 3, 500)
    assert "s3://bucket/run was taken over by process 4711 on node7" in str(error)
    assert "began term 3 from step 500 at 1970-01-01T00:00:00+00:00" in str(error)
    assert (error.host, error.pid) == ("node7", 4711)


@pytest.mark.parametrize("resumed_from", [0, 5])
def test_going_back_begins_a_term_and_going_on_does_not(tmp_path, resumed_from):
    """Every step back is told by a ticket; a worker that resumes from the newest checkpoint goes on in its term."""
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    assert owner.ensure_term(0) == 1
    storage.make_folder("checkpoints/step-000000005.t1")
    storage.create("checkpoints/step-000000005.t1/manifest.json", b"x")
    assert owner.ensure_term(resumed_from) == (1 if resumed_from == 5 else 2)
    owner.release()
