"""Durations ("10 s", "5 min", "2 h") and intervals (a duration, "500 steps" or "auto"), in and out of text."""

import re
from typing import NewType

import msgspec

Seconds = NewType("Seconds", float)
Steps = NewType("Steps", int)

DURATION_FORM = 'a duration such as "10 s", "5 min" or "2 h"'
STEPS_FORM = 'a number of steps such as "500 steps"'
INTERVAL_FORM = f'"auto", {STEPS_FORM}, or {DURATION_FORM}'

_UNIT_SECONDS = {"s": 1, "min": 60, "h": 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?) *(s|min|h)")
_STEPS = re.compile(r"(\d[\d_]*) *steps?")


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
            return format_steps(self.steps)
        return "auto" if self.seconds is None else format_duration(self.seconds)


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


def format_duration(seconds: float) -> str:
    """The text that `parse_duration` reads back as exactly this many seconds."""
    for unit in ("h", "min"):
        size = _UNIT_SECONDS[unit]
        if seconds >= size and seconds % size == 0:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s" if seconds == int(seconds) else f"{seconds!r} s"


def format_steps(steps: int) -> str:
    """The text that `parse_steps` reads back."""
    return f"{steps} step" if steps == 1 else f"{steps} steps"
