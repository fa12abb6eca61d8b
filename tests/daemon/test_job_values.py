"""Durations, intervals and targets, in and out of text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainerd.checkpoint.words import bytes_in_words, duration_in_words
from trainerd.daemon.durations import (
    Interval,
    Seconds,
    Steps,
    parse_bytes,
    parse_duration,
    parse_interval,
    parse_steps,
)
from trainerd.daemon.job_errors import JobError, Place
from trainerd.daemon.target_names import Target, resolve_target, split_target


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10 s", 10.0), ("5 min", 300.0), ("2 h", 7200.0), ("0.5 s", 0.5), ("1.5h", 5400.0), (" 0 s ", 0.0)],
)
def test_a_duration_means_its_seconds(text, seconds):
    """Seconds, minutes and hours, with or without a space."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "10 m", "-1 s", "1e3 s", "s", "1 s 5 s", "ten s", "10 steps", "auto"])
def test_what_is_no_duration_is_refused_and_never_guessed(text):
    """A number without unit is as wrong as an unknown unit: seconds and minutes must not be mixed up."""
    with pytest.raises(ValueError, match="expected a duration"):
        parse_duration(text)


@given(st.floats(min_value=0, max_value=1e7).map(lambda seconds: round(seconds, 3)) | st.integers(0, 10**9).map(float))
def test_a_duration_that_is_shown_can_be_typed_back(seconds):
    """duration_in_words and parse_duration are inverse."""
    assert parse_duration(duration_in_words(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("auto", Interval()),
        ("500 steps", Interval(steps=Steps(500))),
        ("1 step", Interval(steps=Steps(1))),
        ("10_000 steps", Interval(steps=Steps(10000))),
        ("10 min", Interval(seconds=Seconds(600.0))),
    ],
)
def test_an_interval_is_steps_or_time_or_auto(text, interval):
    """Each form, and back."""
    assert parse_interval(text) == interval
    assert parse_interval(str(interval)) == interval
    assert interval.auto == (text == "auto")


@pytest.mark.parametrize("text", ["0 steps", "0 s", "500", "-5 steps", "5.5 steps", "1__0 steps", "1_ steps", "Auto"])
def test_an_interval_that_never_comes_is_refused(text):
    """Zero, negative and unit-less intervals."""
    with pytest.raises(ValueError, match=r"expected|longer than nothing"):
        parse_interval(text)


@pytest.mark.parametrize("text", ["10 s", "0 steps", "10"])
def test_steps_are_no_time(text):
    """Whoever wants either says so."""
    with pytest.raises(ValueError, match="a number of steps"):
        parse_steps(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("200 GB", 200 * 10**9), ("1.5 TB", 1500 * 10**9), ("64 MiB", 2**26), ("1kB", 1000), ("7 B", 7), ("0.001 kB", 1)],
)
def test_an_amount_means_its_bytes(text, count):
    """Decimal units as disks are sold, binary ones by their own names; what is shown can be typed back."""
    assert parse_bytes(text) == count
    assert parse_bytes(bytes_in_words(count)) == count


@pytest.mark.parametrize(
    "text", ["", "200", "GB", "200 G", "200 gb", "-1 GB", "0 GB", "1e3 GB", "0.0001 kB", "9" * 400 + " TB"]
)
def test_what_is_no_amount_of_bytes_is_refused_and_never_guessed(text):
    """GB and Gb, a bare number, nothing at all."""
    with pytest.raises(ValueError, match="expected an amount of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("train.py:build", Target("train.py", "", "build")),
        ("/a:b/train.py:build", Target("/a:b/train.py", "", "build")),
        ("pkg.mod:build", Target("", "pkg.mod", "build")),
        ("train:Class.method", Target("", "train", "Class.method")),
    ],
)
def test_a_target_is_a_file_or_a_module_and_a_function(text, target):
    """The last colon separates the function."""
    assert split_target(text) == target


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train.py", "train.py:build_trainer"),
        ("train.py:", "the function is missing"),
        (":build", "the file or module is missing"),
        ("train.py:build()", "can be no function's name"),
        ("src/train:build", "neither a Python file"),
        ("", "the function is missing"),
    ],
)
def test_a_malformed_target_says_which_part_is_missing(text, says):
    """Wrong use of the command line: exit code 2."""
    with pytest.raises(JobError, match="target") as raised:
        resolve_target(text, "/", Place("target"))
    assert says in str(raised.value)
    assert raised.value.exit_code == 2


def test_a_missing_target_file_is_named_with_its_nearest_neighbour(tmp_path):
    """Exit code 78, also from the command line: nothing is wrong with how the command was used."""
    (tmp_path / "train.py").touch()
    with pytest.raises(JobError) as raised:
        resolve_target("trian.py:build", str(tmp_path), Place("target"))
    assert f"{tmp_path}/trian.py does not exist. Did you mean {tmp_path}/train.py?" in str(raised.value)
    assert raised.value.exit_code == 78


def test_a_folder_is_no_target_file(tmp_path):
    """Said as it is."""
    (tmp_path / "train.py").mkdir()
    with pytest.raises(JobError, match="is a folder, not a file"):
        resolve_target("train.py:build", str(tmp_path), Place("target"))
