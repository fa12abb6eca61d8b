"""When a checkpoint is due, without any clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainerd.daemon.durations import Interval, Seconds, Steps
from trainerd.daemon.save_schedule import (
    AUTO_FIRST_SECONDS,
    AUTO_LONGEST_SECONDS,
    AUTO_SHORTEST_SECONDS,
    RETRY_SECONDS,
    SaveRecord,
    interval_seconds,
    is_due,
)

AUTO = Interval()
STEPS = Interval(steps=Steps(50))
TIME = Interval(seconds=Seconds(120.0))


def test_a_step_interval_does_not_shift_after_a_resume() -> None:
    """Due at the multiples, whichever step the run was resumed from and however long ago that was."""
    record = SaveRecord(saved_step=73, tried_at=0.0)
    assert [step for step in range(74, 201) if is_due(STEPS, record, step, now=1e6)] == [100, 150, 200]


def test_a_step_is_saved_once() -> None:
    """What a checkpoint holds already is never due."""
    assert not is_due(STEPS, SaveRecord(saved_step=100, tried_at=0.0), 100, now=1e6)
    assert not is_due(TIME, SaveRecord(saved_step=100, tried_at=0.0), 100, now=1e6)


def test_a_time_interval_counts_from_the_end_of_the_last_save() -> None:
    """Due 120 s after it, not before."""
    record = SaveRecord(saved_step=0, tried_at=0.0).succeeded(10, save_seconds=5.0, now=1000.0)
    assert not is_due(TIME, record, 11, now=1119.9)
    assert is_due(TIME, record, 11, now=1120.0)


@pytest.mark.parametrize(
    ("every", "soon"), [(STEPS, RETRY_SECONDS), (TIME, RETRY_SECONDS), (Interval(seconds=Seconds(2.0)), 2.0)]
)
def test_a_failed_save_is_tried_again_soon(every: Interval, soon: float) -> None:
    """After RETRY_SECONDS or the interval, whichever is shorter, instead of a whole interval later."""
    record = SaveRecord(saved_step=0, tried_at=0.0).failed_at(100.0)
    assert not is_due(every, record, 51, now=100.0 + soon - 0.1)
    assert is_due(every, record, 51, now=100.0 + soon)
    assert not is_due(every, record.succeeded(51, 0.1, 100.0 + soon), 52, now=100.1 + soon)


def test_a_failed_step_interval_is_due_at_its_next_multiple_too() -> None:
    """Quick steps need not wait for the retry."""
    assert is_due(STEPS, SaveRecord(saved_step=0, tried_at=0.0).failed_at(100.0), 100, now=100.1)


def test_auto_saves_first_after_ten_seconds() -> None:
    """Before any save was measured."""
    record = SaveRecord(saved_step=0, tried_at=0.0)
    assert not is_due(AUTO, record, 5, now=AUTO_FIRST_SECONDS - 0.1)
    assert is_due(AUTO, record, 5, now=AUTO_FIRST_SECONDS)


@given(save_seconds=st.floats(0, 1e6))
def test_auto_spends_at_most_a_hundredth_on_saving_within_its_bounds(save_seconds: float) -> None:
    """Beyond the longest interval losing less goes before saving cheaply."""
    interval = interval_seconds(AUTO, SaveRecord(saved_step=0, tried_at=0.0, save_seconds=save_seconds))
    assert AUTO_SHORTEST_SECONDS <= interval <= AUTO_LONGEST_SECONDS
    if interval < AUTO_LONGEST_SECONDS:
        assert save_seconds <= 0.01 * (interval + save_seconds)
