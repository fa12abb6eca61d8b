"""The decision after a worker's end, without any process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainerd.daemon.durations import Seconds
from trainerd.daemon.exit_codes import ExitCode
from trainerd.daemon.job import RestartTable
from trainerd.daemon.restart_policy import Cause, End, History, Incident, Restart, backoff_seconds, decide

LIMITS = RestartTable(max_restarts=2, backoff_seconds=Seconds(1.0), backoff_max_seconds=Seconds(60.0))
TROUBLE = [Cause.CRASH, Cause.SIGNAL, Cause.STORAGE]


def incident(cause: Cause = Cause.SIGNAL, step: int = 7, **fields) -> Incident:
    return Incident(cause, step, "the reason", **fields)


def ending(history: History, what: Incident) -> ExitCode:
    decision, _ = decide(history, what, LIMITS, 0.0)
    assert isinstance(decision, End)
    return decision.exit_code


def after(history: History, what: Incident) -> History:
    decision, history = decide(history, what, LIMITS, 0.0)
    assert isinstance(decision, Restart)
    return history


def test_a_finished_worker_is_never_restarted() -> None:
    """Finished is 0, whatever happened before."""
    history = after(after(History(), incident()), incident())
    assert ending(history, incident(Cause.FINISHED)) is ExitCode.FINISHED


def test_a_run_that_another_daemon_has_taken_over_is_left_to_it() -> None:
    """79 at once, whatever budget is left."""
    assert ending(History(), incident(Cause.TAKEN_OVER, first_start=True)) is ExitCode.RUN_OWNED


@pytest.mark.parametrize(("saved", "code"), [(True, ExitCode.PREEMPTED_SAVED), (False, ExitCode.PREEMPTED_UNSAVED)])
def test_a_preempted_worker_tells_whether_its_state_is_safe(saved: bool, code: ExitCode) -> None:
    """75 when a checkpoint holds the last step, 76 when not; never a restart."""
    assert ending(History(), incident(Cause.PREEMPTED, saved=saved)) is code


@pytest.mark.parametrize("cause", TROUBLE)
def test_a_budget_without_progress_ends(cause: Cause) -> None:
    """After max_restarts restarts for one cause the run ends: 74 for the storage, 1 for the others."""
    history = after(after(History(), incident(cause)), incident(cause))
    code = ExitCode.STORAGE_UNUSABLE if cause is Cause.STORAGE else ExitCode.BUDGET_USED_UP
    assert ending(history, incident(cause)) is code


def test_a_budget_of_one_cause_is_not_spent_by_another() -> None:
    """Each cause has its own."""
    history = after(after(History(), incident(Cause.SIGNAL)), incident(Cause.SIGNAL))
    after(after(history, incident(Cause.CRASH)), incident(Cause.CRASH))


def test_only_a_newer_checkpoint_refills_a_budget() -> None:
    """A checkpoint of a step that was durable before is no progress."""
    history = after(after(History(durable_step=5), incident()), incident())
    assert ending(history.after_durable(5), incident()) is ExitCode.BUDGET_USED_UP
    after(history.after_durable(6), incident())


def test_going_back_to_an_older_checkpoint_refills_nothing_by_itself() -> None:
    """Only steps beyond the one that was resumed from are progress then."""
    history = after(after(History(durable_step=5), incident()), incident()).went_back_to(3)
    assert history.durable_step == 3
    assert ending(history.after_durable(3), incident()) is ExitCode.BUDGET_USED_UP


def test_the_same_exception_twice_without_progress_ends_at_once() -> None:
    """93 before the budget is used up; the same one after progress, or at another step, is tried again."""
    first = incident(Cause.CRASH, fingerprint="ValueError at train.py:3, step 7")
    history = after(History(), first)
    assert ending(history, first) is ExitCode.SAME_FAILURE
    after(history.after_durable(7), first)
    after(history, incident(Cause.CRASH, fingerprint="ValueError at train.py:3, step 8"))


def test_an_alternating_exception_does_not_hide_a_repeated_one() -> None:
    """A, B, A without progress is the same failure twice."""
    history = after(after(History(), incident(Cause.CRASH, fingerprint="A")), incident(Cause.CRASH, fingerprint="B"))
    assert ending(history, incident(Cause.CRASH, fingerprint="A")) is ExitCode.SAME_FAILURE


def test_a_bad_job_ends_the_first_start_only() -> None:
    """78 when nothing ever worked; later the same words are an incident like any crash."""
    bad = {"exit_code": 78, "fingerprint": "X"}
    assert ending(History(), incident(Cause.CRASH, first_start=True, **bad)) is ExitCode.BAD_JOB
    history = after(History(), incident(Cause.CRASH, **bad))
    assert ending(history, incident(Cause.CRASH, **bad)) is ExitCode.SAME_FAILURE


def test_a_worker_that_has_retried_the_storage_itself_is_not_restarted_for_it() -> None:
    """The last state could not be saved after retries: another worker would only repeat the steps."""
    assert ending(History(), incident(Cause.STORAGE, retried=True)) is ExitCode.STORAGE_UNUSABLE


def test_backoff_doubles_up_to_its_cap() -> None:
    """1, 2, 4, ... 60 seconds at full jitter; half of it at none."""
    assert [backoff_seconds(n, LIMITS, 1.0) for n in (1, 2, 3, 4, 7, 5000)] == [1, 2, 4, 8, 60, 60]
    assert backoff_seconds(3, LIMITS, 0.0) == 2


@given(
    events=st.lists(st.tuples(st.sampled_from(TROUBLE), st.sampled_from(["", "A", "B"]), st.booleans()), max_size=40),
    jitter=st.floats(0, 1, exclude_max=True),
)
def test_no_sequence_of_deaths_is_restarted_for_ever(events: list[tuple[Cause, str, bool]], jitter: float) -> None:
    """Between two newer checkpoints there are at most max_restarts restarts per cause, and no wait exceeds the cap."""
    history, since_progress, durable = History(), 0, 0
    for cause, fingerprint, progress in events:
        if progress:
            durable += 1
            history, since_progress = history.after_durable(durable), 0
        decision, history = decide(history, incident(cause, fingerprint=fingerprint), LIMITS, jitter)
        if isinstance(decision, End):
            return
        since_progress += 1
        assert since_progress <= LIMITS.max_restarts * len(TROUBLE)
        assert 0 <= decision.delay_seconds <= LIMITS.backoff_max_seconds
