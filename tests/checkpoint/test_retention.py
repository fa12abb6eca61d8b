"""What is kept, and why: properties of the rules, whatever the checkpoints."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.retention import (
    Best,
    Budget,
    Candidate,
    EveryPeriod,
    EverySteps,
    Keep,
    Last,
    NewerThan,
    References,
    reasons,
    recorded_keep,
)

NOW = 1000.0

values = st.sampled_from([math.nan, -1.0, 0.0, 0.5, 1.0, 2.0])
metrics = st.dictionaries(st.sampled_from(["loss", "accuracy"]), values)


@st.composite
def histories(draw):
    """Checkpoints in the order of their saves: steps and times grow; files may belong to earlier checkpoints."""
    steps = draw(st.lists(st.integers(0, 200), unique=True, max_size=15).map(sorted))
    times = draw(st.lists(st.floats(0, NOW), min_size=len(steps), max_size=len(steps)).map(sorted))
    found = []
    for step, time in zip(steps, times, strict=True):
        name = CheckpointName(step, 1)
        files = {f"{name}/own": draw(st.integers(0, 9))}
        if found:
            files |= draw(st.sampled_from(found)).files if draw(st.booleans()) else {}
        found.append(Candidate(name, time, draw(metrics), files))
    return found


modes = st.sampled_from(["min", "max"])
rules = st.one_of(
    st.builds(Last, st.integers(1, 5)),
    st.builds(EverySteps, st.integers(1, 30)),
    st.builds(EveryPeriod, st.floats(1, 500)),
    st.builds(NewerThan, st.floats(0, 500)),
    st.builds(Best, st.integers(1, 4), st.sampled_from(["loss", "accuracy"]), modes),
    st.builds(Budget, st.integers(1, 40)),
)
rule_sets = st.lists(rules, max_size=4)


def kept(found, wanted, now=NOW, **pins):
    """The checkpoints that stay."""
    why = reasons(found, wanted, now, **pins)
    return [candidate for candidate in found if why[candidate.name]]


@given(histories(), rule_sets)
def test_the_newest_is_always_kept(found, wanted):
    """Whatever the rules say, even none."""
    if found:
        assert "newest" in reasons(found, wanted, NOW)[found[-1].name]


@given(histories(), rule_sets, rules)
def test_another_rule_never_removes(found, wanted, another):
    """Any-of: a checkpoint that one rule wants is kept whatever the others say."""
    assert set(names(kept(found, wanted))) <= set(names(kept(found, [*wanted, another])))


@given(histories(), rule_sets)
def test_pruning_twice_is_pruning_once(found, wanted):
    """What is kept does not shift when the others are gone."""
    once = kept(found, wanted)
    assert kept(once, wanted) == once


@given(histories(), rule_sets)
def test_pruning_after_every_save_keeps_what_one_pruning_at_the_end_keeps(found, wanted):
    """Nothing that the rules promise was deleted on the way, and nothing else is left over."""
    present = []
    for candidate in found:
        present = kept([*present, candidate], wanted, now=candidate.time)
    assert names(kept(present, wanted)) == names(kept(found, wanted))


@given(histories(), rule_sets, st.randoms(use_true_random=False))
def test_the_order_of_a_listing_and_of_the_rules_says_nothing(found, wanted, random):
    """The same answers for a shuffled listing."""
    shuffled, mixed = random.sample(found, len(found)), random.sample(wanted, len(wanted))
    why = reasons(found, wanted, NOW)
    again = reasons(shuffled, mixed, NOW)
    assert {name: sorted(found) for name, found in why.items()} == {n: sorted(found) for n, found in again.items()}


def names(found):
    """Their names, oldest first."""
    return sorted(candidate.name for candidate in found)


def checkpoint(step, time=0.0, files=None, **metrics):
    """One checkpoint of term 1, with a file of its own of 10 bytes unless told."""
    name = CheckpointName(step, 1)
    return Candidate(name, time, metrics, {f"{name}/own": 10} if files is None else files)


def steps_kept(found, *wanted, now=NOW, **pins):
    """The steps that stay."""
    return [candidate.name.step for candidate in kept(found, wanted, now, **pins)]


def test_the_first_of_each_period_is_kept():
    """Periods are counted from 1970, so that neither the first checkpoint nor what was pruned moves them."""
    found = [checkpoint(step, time=step) for step in (95, 99, 101, 150, 199, 200, 350, 399)]
    assert steps_kept(found, EveryPeriod(100.0)) == [95, 101, 200, 350, 399]


def test_a_period_without_checkpoint_asks_for_none():
    """A night without training costs nothing."""
    assert steps_kept([checkpoint(1, 10.0), checkpoint(2, 500.0), checkpoint(3, 501.0)], EveryPeriod(100.0)) == [
        1,
        2,
        3,
    ]
    assert steps_kept([checkpoint(1, 10.0), checkpoint(2, 11.0), checkpoint(3, 501.0)], EveryPeriod(100.0)) == [1, 3]


def test_nan_or_nothing_is_never_the_best():
    """Neither for the least nor for the greatest."""
    found = [
        checkpoint(1, loss=math.nan),
        checkpoint(2),
        checkpoint(3, loss=2.0),
        checkpoint(4, loss=1.0),
        checkpoint(5),
    ]
    assert steps_kept(found, Best(1, "loss", "min")) == [4, 5]
    assert steps_kept(found, Best(1, "loss", "max")) == [3, 5]
    assert steps_kept(found, Best(9, "loss", "min")) == [3, 4, 5]
    assert steps_kept(found, Best(9, "los", "min")) == [5]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_equal_ones_the_older_is_better(mode):
    """An evaluation's value goes on being the newest one: the checkpoint right after it is what was evaluated."""
    found = [checkpoint(step, accuracy=0.5) for step in (1, 2, 3, 4)]
    assert steps_kept(found, Best(2, "accuracy", mode)) == [1, 2, 4]


def test_a_budget_counts_shared_files_once_and_ends_at_the_first_that_does_not_fit():
    """Four checkpoints around one frozen file of 50 bytes; one that does not fit hides a smaller one before it."""
    frozen = {"step-000000001.t1/frozen": 50}
    found = [
        checkpoint(1, files={**frozen, "a": 1}),
        checkpoint(2, files={**frozen, "b": 100}),
        checkpoint(3, files={**frozen, "c": 10}),
        checkpoint(4, files={**frozen, "d": 10}),
    ]
    assert steps_kept(found, Budget(70)) == [3, 4]
    assert steps_kept(found, Budget(69)) == [4]
    assert steps_kept(found, Budget(1)) == [4], "never below the newest"
    assert steps_kept(found, Budget(171)) == [1, 2, 3, 4]


def test_reasons_are_told_in_the_words_of_the_flag():
    """All that apply, each as `--checkpoint-keep` would say it."""
    keep = Keep(
        last=2,
        every_steps=500,
        every_seconds=21600.0,
        newer_than_seconds=90.0,
        best=1,
        metric="loss",
        bytes=200 * 10**9,
    )
    found = [checkpoint(999, time=NOW - 95.0), checkpoint(1000, time=NOW - 80.0, loss=1.0), checkpoint(1001, time=NOW)]
    why = reasons(
        found, keep.rules, NOW, pinned_steps={1000}, pins={CheckpointName(1000, 1): "pinned by hand: for the paper"}
    )
    assert why == {
        CheckpointName(1001, 1): ("newest", "last=2", "newer_than=90 s", "bytes=200 GB"),
        CheckpointName(1000, 1): (
            "pinned",
            "pinned by hand: for the paper",
            "last=2",
            "every=500 steps",
            "newer_than=90 s",
            "best=1",
            "bytes=200 GB",
        ),
        CheckpointName(999, 1): ("every=6 h", "bytes=200 GB"),
    }


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"last": 0}, "keep.last is 0: give a whole number, 1 or more (at least the newest checkpoint has to stay)"),
        ({"last": -1}, "keep.last is -1"),
        ({"last": "x"}, "keep.last is 'x'"),
        ({"last": True}, "keep.last is True"),
        ({"every_steps": 0}, "keep.every_steps is 0"),
        ({"every_seconds": 0.0}, "keep.every_seconds is 0.0"),
        ({"every_seconds": math.nan}, "keep.every_seconds is nan"),
        ({"newer_than_seconds": -1.0}, "keep.newer_than_seconds is -1.0"),
        ({"best": 0}, "keep.best is 0"),
        ({"mode": "mim"}, "keep.mode is 'mim'"),
        ({"bytes": 1.5}, "keep.bytes is 1.5"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(values, says):
    """Elsewhere -1 means all, or nothing: here it is an error that names the rule."""
    with pytest.raises(ValueError, match=r"keep\.") as raised:
        Keep(**values)
    assert says in str(raised.value)


def test_rules_come_back_from_a_manifest_and_those_of_other_versions_are_no_damage():
    """What this version does not understand, it does not apply."""
    keep = Keep(last=2, every_seconds=3600.0, best=3, metric="loss", mode="max")
    assert keep.as_recorded() == {"last": 2, "every_seconds": 3600.0, "best": 3, "metric": "loss", "mode": "max"}
    assert recorded_keep(keep.as_recorded()) == keep
    assert recorded_keep(Keep().as_recorded()) == Keep()
    assert recorded_keep({}) is None
    assert recorded_keep({"last": 1, "mode": "median"}) is None
    assert recorded_keep({"last": 0}) is None


def test_what_any_manifest_refers_to_is_held_and_what_one_that_cannot_be_read_might_refer_to_as_well():
    """The latter: any file of a checkpoint of no greater step and no greater term."""
    staying = [checkpoint(5, files={"step-000000001.t1/a": 1, "step-000000005.t1/b": 1})]
    readable = References.of(staying, [])
    assert readable.hold("step-000000001.t1/a")
    assert not readable.hold("step-000000001.t1/c")
    unread = References.of(staying, [CheckpointName(3, 2), CheckpointName(2, 2), CheckpointName(9, 1)])
    held = {(2, 2): True, (3, 2): True, (3, 1): True, (4, 2): False, (9, 1): True, (10, 1): False, (1, 3): False}
    assert {(step, term): unread.hold(f"{CheckpointName(step, term)}/c") for step, term in held} == held
