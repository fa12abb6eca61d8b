"""Which checkpoints to keep: rules over small records, pure. A checkpoint stays if any rule wants it.

Each rule gives the same answer again once what it did not want is gone, so pruning after every save keeps what one
pruning at the end would keep.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from trainerd.checkpoint.layout import CheckpointName, parse_checkpoint
from trainerd.checkpoint.manifest import ManifestHead
from trainerd.checkpoint.words import bytes_in_words, duration_in_words, steps_in_words

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Candidate:
    """A checkpoint as retention sees it.

    `time` in seconds since 1970, UTC; `files` gives the bytes of every data file it needs, by `<checkpoint>/<name>`,
    those of earlier checkpoints included.
    """

    name: CheckpointName
    time: float
    metrics: Mapping[str, float]
    files: Mapping[str, int]


def candidate_of(head: ManifestHead) -> Candidate:
    """What retention needs to know of a manifest."""
    files = {file if "/" in file else f"{head.name}/{file}": entry.bytes for file, entry in head.files.items()}
    return Candidate(head.name, head.time, head.metrics, files)


class Rule(Protocol):
    """One reason to keep checkpoints; its text is what the flag `--checkpoint-keep` calls it."""

    def wanted(self, newest_first: Sequence[Candidate], now: float) -> Iterable[Candidate]:
        """Those that it wants kept."""


@dataclass(frozen=True)
class Last:
    """The newest ones, so many."""

    count: int

    def wanted(self, newest_first: Sequence[Candidate], now: float) -> Iterable[Candidate]:  # noqa: ARG002 - a Rule
        """Those that it wants kept."""
        return newest_first[: self.count]

    def __str__(self) -> str:
        return f"last={self.count}"


@dataclass(frozen=True)
class EverySteps:
    """Those whose step is a multiple."""

    steps: int

    def wanted(self, newest_first: Sequence[Candidate], now: float) -> Iterable[Candidate]:  # noqa: ARG002 - a Rule
        """Those that it wants kept."""
        return (candidate for candidate in newest_first if candidate.name.step % self.steps == 0)

    def __str__(self) -> str:
        return f"every={steps_in_words(self.steps)}"


@dataclass(frozen=True)
class EveryPeriod:
    """The oldest of each period of time; periods are counted from 1970, so that they never shift."""

    seconds: float

    def wanted(self, newest_first: Sequence[Candidate], now: float) -> Iterable[Candidate]:  # noqa: ARG002 - a Rule
        """Those that it wants kept."""
        first = {math.floor(candidate.time / self.seconds): candidate for candidate in newest_first}
        return first.values()

    def __str__(self) -> str:
        return f"every={duration_in_words(self.seconds)}"


@dataclass(frozen=True)
class NewerThan:
    """Those younger than a duration."""

    seconds: float

    def wanted(self, newest_first: Sequence[Candidate], now: float) -> Iterable[Candidate]:
        """Those that it wants kept."""
        return (candidate for candidate in newest_first if now - candidate.time < self.seconds)

    def __str__(self) -> str:
        return f"newer_than={duration_in_words(self.seconds)}"


@dataclass(frozen=True)
class Best:
    """The best by a metric, so many. Without the metric, or with NaN, none is best; of equals the older one is.

    The older one was saved closer to the evaluation that both have their value from.
    """

    count: int
    metric: str
    mode: Mode

    def wanted(self, newest_first: Sequence[Candidate], now: float) -> Iterable[Candidate]:  # noqa: ARG002 - a Rule
        """Those that it wants kept."""
        sign = 1 if self.mode == "min" else -1
        measured = [c for c in reversed(newest_first) if not math.isnan(c.metrics.get(self.metric, math.nan))]
        return sorted(measured, key=lambda candidate: sign * candidate.metrics[self.metric])[: self.count]

    def __str__(self) -> str:
        return f"best={self.count}"


@dataclass(frozen=True)
class Budget:
    """The newest ones as long as their data files, each counted once, fit into so many bytes."""

    bytes: int

    def wanted(self, newest_first: Sequence[Candidate], now: float) -> Iterable[Candidate]:  # noqa: ARG002 - a Rule
        """Those that it wants kept."""
        counted: set[str] = set()
        total = 0
        for candidate in newest_first:
            new = candidate.files.keys() - counted
            total += sum(candidate.files[file] for file in new)
            # Ends at the first that does not fit, or what fits would depend on what was pruned before.
            if total > self.bytes:
                return
            counted |= new
            yield candidate

    def __str__(self) -> str:
        return f"bytes={bytes_in_words(self.bytes)}"


class Keep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rules of a job: each that is set keeps what it wants, and the newest valid checkpoint stays anyway.

    The `last` newest; steps divisible by `every_steps`; the first of every `every_seconds`; those younger than
    `newer_than_seconds`; the `best` by `metric`; the newest that fit into `bytes`. ValueError names a bad value.
    """

    last: int = 3
    every_steps: int | None = None
    every_seconds: float | None = None
    newer_than_seconds: float | None = None
    best: int | None = None
    metric: str = "total_loss"
    mode: Mode = "min"
    bytes: int | None = None

    def __post_init__(self) -> None:
        _require_count("last", self.last, " (at least the newest checkpoint has to stay)")
        for name, count in (("every_steps", self.every_steps), ("best", self.best), ("bytes", self.bytes)):
            if count is not None:
                _require_count(name, count, ", or leave it out")
        # Written so that NaN is refused, too.
        if self.every_seconds is not None and not 0 < self.every_seconds < math.inf:
            raise ValueError(f"keep.every_seconds is {self.every_seconds!r}: give a number above 0, or leave it out")
        if self.newer_than_seconds is not None and not 0 <= self.newer_than_seconds < math.inf:
            raise ValueError(f"keep.newer_than_seconds is {self.newer_than_seconds!r}: give 0 or more, or leave it out")
        if self.mode not in ("min", "max"):
            raise ValueError(f'keep.mode is {self.mode!r}: give "min" or "max"')

    @property
    def rules(self) -> tuple[Rule, ...]:
        """One rule for each value that is set."""
        return (
            Last(self.last),
            *([EverySteps(self.every_steps)] if self.every_steps is not None else []),
            *([EveryPeriod(self.every_seconds)] if self.every_seconds is not None else []),
            *([NewerThan(self.newer_than_seconds)] if self.newer_than_seconds is not None else []),
            *([Best(self.best, self.metric, self.mode)] if self.best is not None else []),
            *([Budget(self.bytes)] if self.bytes is not None else []),
        )

    def as_recorded(self) -> dict[str, Any]:
        """What a manifest remembers of these rules; `last` always, so that no rules and none known differ."""
        return {"last": self.last, **msgspec.to_builtins(self)}


def _require_count(name: str, count: object, or_else: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"keep.{name} is {count!r}: give a whole number, 1 or more{or_else}")


def recorded_keep(record: Mapping[str, Any]) -> Keep | None:
    """The rules that a manifest remembers; None if it has none, or those of a version that knew others."""
    try:
        return msgspec.convert(record, Keep) if record else None
    except msgspec.ValidationError:
        return None


def reasons(
    candidates: Iterable[Candidate],
    rules: Sequence[Rule],
    now: float,
    *,
    pinned_steps: Collection[int] = (),
    pins: Mapping[CheckpointName, str] | None = None,
) -> dict[CheckpointName, tuple[str, ...]]:
    """Why each valid checkpoint on the lineage is kept, newest first; no reason means that it may go.

    `pinned_steps` are those that the newest checkpoint wants kept, `pins` what persons pinned, in words.
    """
    newest_first = sorted(candidates, key=lambda candidate: candidate.name, reverse=True)
    why: dict[CheckpointName, list[str]] = {candidate.name: [] for candidate in newest_first}
    for candidate in newest_first[:1]:
        why[candidate.name].append("newest")
    for name, found in why.items():
        if name.step in pinned_steps:
            found.append("pinned")
        if pins and name in pins:
            found.append(pins[name])
    for rule in rules:
        for candidate in rule.wanted(newest_first, now):
            why[candidate.name].append(str(rule))
    return {name: tuple(found) for name, found in why.items()}


@dataclass(frozen=True)
class References:
    """Which data files the checkpoints that stay need, their own and those of checkpoints that are gone."""

    files: frozenset[str]
    unreadable: tuple[CheckpointName, ...]

    @classmethod
    def of(cls, staying: Iterable[Candidate], unreadable: Iterable[CheckpointName]) -> "References":
        """The references of manifests that could be read and of those that could not."""
        files = frozenset(file for candidate in staying for file in candidate.files)
        return cls(files, _greatest(unreadable))

    def hold(self, path: str) -> bool:
        """Whether a file, `<checkpoint>/<name>`, has to stay.

        A manifest that cannot be read may refer to any file of a checkpoint of no greater step and no greater term.
        """
        if path in self.files or not self.unreadable:
            return path in self.files
        folder = parse_checkpoint(path.partition("/")[0])
        return folder is not None and any(
            folder.step <= name.step and folder.term <= name.term for name in self.unreadable
        )


def _greatest(names: Iterable[CheckpointName]) -> tuple[CheckpointName, ...]:
    """For each term the one of the greatest step: the others hold nothing more."""
    by_term = {name.term: name for name in sorted(names)}
    return tuple(by_term.values())
