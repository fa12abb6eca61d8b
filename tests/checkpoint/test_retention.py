"""What is kept, and why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainerd.checkpoint.retention import Keep, Kept, reasons

checkpoints = st.lists(
    st.builds(Kept, step=st.integers(0, 100), term=st.integers(1, 3), time=st.floats(0, 1000)), max_size=20, unique=True
)
keeps = st.builds(
    Keep,
    last=st.integers(1, 5),
    every_steps=st.none() | st.integers(1, 30),
    newer_than_seconds=st.none() | st.floats(0, 500),
)


@given(checkpoints, keeps)
def test_the_newest_is_always_kept(found, keep):
    """Whatever the rules say."""
    kept = reasons(found, keep, now=1000.0)
    if found:
        newest = max(found, key=lambda c: (c.step, c.term))
        assert "newest" in kept[newest]


@given(checkpoints, keeps)
def test_rules_only_add(found, keep):
    """Any-of: a checkpoint that one rule wants is kept whatever the others say."""
    kept = reasons(found, keep, now=1000.0)
    newest_first = sorted(found, key=lambda c: (c.step, c.term), reverse=True)
    for rank, checkpoint in enumerate(newest_first):
        wanted = (
            rank < keep.last
            or bool(keep.every_steps and checkpoint.step % keep.every_steps == 0)
            or (keep.newer_than_seconds is not None and 1000.0 - checkpoint.time < keep.newer_than_seconds)
        )
        assert bool(kept[checkpoint]) == wanted


@pytest.mark.parametrize("last", [0, -1])
def test_keeping_none_is_refused(last):
    """Elsewhere -1 means all, or nothing: here it is an error."""
    with pytest.raises(ValueError, match="newest"):
        Keep(last=last)
