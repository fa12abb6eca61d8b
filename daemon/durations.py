"""Durations ("10 s"), intervals (a duration, "500 steps" or "auto") and amounts of bytes ("200 GB") in a job file."""

import re
from typing import NewType

import msgspec

from trainerd.checkpoint.words import bytes_in_words, duration_in_words, steps_in_words

Seconds = NewType("Seconds", float)
Steps = NewType("Steps", int)
Bytes = NewType("Bytes", int)
BytesPerHour = NewType("BytesPerHour", int)

DURATION_FORM = 'a duration such as "10 s", "5 min" or "2 h"'
STEPS_FORM = 'a number of steps such as "500 steps"'
SPACING_FORM = f"{STEPS_FORM}, or {DURATION_FORM}"
INTERVAL_FORM = f'"auto", {SPACING_FORM}'
BYTES_FORM = 'an amount of bytes such as "200 GB", "1.5 TB" or "64 MiB"'
BYTES_PER_HOUR_FORM = '"off", or an amount of bytes for each hour such as "4 GB/h"'

_UNIT_SECONDS = {"s": 1, "min": 60, "h": 3600}
_DURATION = re.compile(r"(\d{1,15}(?:\.\d+)?) *(s|min|h)")
_UNIT_BYTES = {"B": 1} | {f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)}
_UNIT_BYTES |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)}
_BYTES = re.compile(rf"(\d{{1,15}}(?:\.\d+)?) *({'|'.join(_UNIT_BYTES)})")
_STEPS = re.compile(r"(\d[\d_]{0,18}) *steps?")


class Interval(msgspec.Struct, frozen=True):
    """How often something happens: every so many steps, or seconds; neither means that the daemon chooses."""

    steps: Steps | None = None
    seconds: Seconds | None = None

    @property
    def auto(self) -> bool:
        """Whether the daemon chooses."""
        return self.steps is None and self.seconds is None

    def __str__(self) -> str:
        if self.steps is not None:
            return steps_in_words(self.steps)
        return "auto" if self.seconds is None else duration_in_words(self.seconds)


class Spacing(Interval, frozen=True):
    """An interval that is not left to the daemon."""


def parse_duration(text: str) -> Seconds:
    """Seconds of `"10 s"`, `"5 min"` or `"2 h"`; ValueError otherwise."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected {DURATION_FORM}")
    return Seconds(float(match[1]) * _UNIT_SECONDS[match[2]])


def parse_steps(text: str) -> Steps:
    """The number in `"500 steps"`, at least 1; ValueError otherwise."""
    match = _STEPS.fullmatch(text.strip())
    # int() refuses what the pattern lets through: a trailing or doubled underscore.
    try:
        steps = int(match[1]) if match else 0
    except ValueError:
        steps = 0
    if steps < 1:
        raise ValueError(f"expected {STEPS_FORM}, 1 or more")
    return Steps(steps)


def parse_interval(text: str) -> Interval:
    """The interval of `"auto"`, `"500 steps"` or `"10 min"`; ValueError otherwise."""
    text = text.strip()
    if text == "auto":
        return Interval()
    if _STEPS.fullmatch(text):
        return Interval(steps=parse_steps(text))
    if not _DURATION.fullmatch(text):
        raise ValueError(f"expected {INTERVAL_FORM}")
    seconds = parse_duration(text)
    if not seconds:
        raise ValueError("an interval is longer than nothing")
    return Interval(seconds=seconds)


def parse_spacing(text: str) -> Spacing:
    """The interval of `"500 steps"` or `"6 h"`; ValueError otherwise."""
    try:
        interval = parse_interval(text)
    except ValueError:
        interval = Interval()
    if interval.auto:
        raise ValueError(f"expected {SPACING_FORM}, above zero")
    return Spacing(steps=interval.steps, seconds=interval.seconds)


def parse_bytes(text: str) -> Bytes:
    """The number of bytes of `"200 GB"` or `"64 MiB"`, at least 1; ValueError otherwise."""
    match = _BYTES.fullmatch(text.strip())
    count = round(float(match[1]) * _UNIT_BYTES[match[2]]) if match else 0
    if count < 1:
        raise ValueError(f"expected {BYTES_FORM}, above zero")
    return Bytes(count)


def parse_bytes_per_hour(text: str) -> BytesPerHour:
    """The number of bytes of `"4 GB/h"`, 0 for `"off"`; ValueError otherwise."""
    if text.strip() == "off":
        return BytesPerHour(0)
    amount, slash, hour = text.partition("/")
    if not slash or hour.strip() != "h" or not _BYTES.fullmatch(amount.strip()):
        raise ValueError(f"expected {BYTES_PER_HOUR_FORM}")
    return BytesPerHour(parse_bytes(amount))


def bytes_per_hour_in_words(count: int) -> str:
    """`4 GB/h`, or `off`."""
    return f"{bytes_in_words(count)}/h" if count else "off"
