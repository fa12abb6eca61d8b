"""After a worker's end: start another, and when, or end the run, and with which exit code. Pure: facts to decision."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from trainerd.daemon.exit_codes import ExitCode
from trainerd.daemon.job import RestartTable


class Cause(enum.Enum):
    """Why a worker ended; the values are the journal's words."""

    FINISHED = "finished"
    PREEMPTED = "preempted"
    CRASH = "crash"  # an exception, or an exit that the worker did not announce
    SIGNAL = "signal"  # killed by one
    STORAGE = "storage"
    TAKEN_OVER = "taken-over"  # another daemon owns the run now


@dataclass(frozen=True)
class Incident:
    """One worker's end.

    `step` is the last step it completed; `fingerprint` names an exception by type, place and step ("" for other
    causes); `exit_code` is what the worker itself asked for, or 0; `saved` tells of a preempted worker whether a
    checkpoint holds its last step; `retried` says that the worker has already retried the storage on its own.
    """

    cause: Cause
    step: int
    reason: str
    fingerprint: str = ""
    exit_code: int = 0
    first_start: bool = False
    saved: bool = True
    retried: bool = False


@dataclass(frozen=True)
class History:
    """What counts against the next restart; durable progress clears it."""

    durable_step: int = 0
    restarts: Mapping[Cause, int] = field(default_factory=lambda: MappingProxyType({}))
    fingerprints: frozenset[str] = frozenset()

    def after_durable(self, step: int) -> "History":
        """Return the history once a checkpoint is known to hold `step`: a newer one fills every budget again."""
        return History(durable_step=step) if step > self.durable_step else self

    def went_back_to(self, step: int) -> "History":
        """Return the history after a worker resumed from `step`, older than what was durable before; budgets stay."""
        return replace(self, durable_step=min(step, self.durable_step))


@dataclass(frozen=True)
class Restart:
    """Start another worker after `delay_seconds`; it is number `restart` of `allowed` for this cause."""

    delay_seconds: float
    restart: int
    allowed: int


@dataclass(frozen=True)
class End:
    """End the run with `exit_code`; `reason` is a paragraph for the user."""

    exit_code: ExitCode
    reason: str


def decide(history: History, incident: Incident, limits: RestartTable, jitter: float) -> tuple[Restart | End, History]:
    """Return what to do after `incident`, and the history with it counted in; `jitter` is a random number of [0, 1)."""
    if incident.cause is Cause.FINISHED:
        return End(ExitCode.FINISHED, incident.reason), history
    if incident.cause is Cause.PREEMPTED:
        return End(ExitCode.PREEMPTED_SAVED if incident.saved else ExitCode.PREEMPTED_UNSAVED, incident.reason), history
    if incident.cause is Cause.TAKEN_OVER:
        return End(ExitCode.RUN_OWNED, incident.reason), history
    if incident.exit_code == ExitCode.BAD_JOB and incident.first_start:
        return End(ExitCode.BAD_JOB, incident.reason), history
    if incident.cause is Cause.STORAGE and incident.retried:
        return End(ExitCode.STORAGE_UNUSABLE, incident.reason), history
    if incident.fingerprint and incident.fingerprint in history.fingerprints:
        return End(ExitCode.SAME_FAILURE, _same_again(history, incident)), history
    used = history.restarts.get(incident.cause, 0)
    if used >= limits.max_restarts:
        return End(_budget_code(incident), _budget_used_up(incident, limits)), history
    counted = replace(
        history,
        restarts=MappingProxyType({**history.restarts, incident.cause: used + 1}),
        fingerprints=history.fingerprints | ({incident.fingerprint} if incident.fingerprint else frozenset()),
    )
    delay_seconds = backoff_seconds(sum(counted.restarts.values()), limits, jitter)
    return Restart(delay_seconds, used + 1, limits.max_restarts), counted


def backoff_seconds(restart: int, limits: RestartTable, jitter: float) -> float:
    """Return the wait before restart number `restart` (from 1) since progress: doubling, capped, then 50 to 100 %."""
    doublings = min(restart - 1, 60)  # beyond it a float would overflow long after the cap was reached
    ceiling = min(limits.backoff_seconds * 2.0**doublings, limits.backoff_max_seconds)
    return ceiling * (0.5 + 0.5 * jitter)


def _budget_code(incident: Incident) -> ExitCode:
    return ExitCode.STORAGE_UNUSABLE if incident.cause is Cause.STORAGE else ExitCode.BUDGET_USED_UP


def _same_again(history: History, incident: Incident) -> str:
    return (
        f"the worker failed twice in the same way ({incident.fingerprint}) and no checkpoint newer than step "
        f"{history.durable_step} came between, so that another restart would only fail again: {incident.reason}"
    )


def _budget_used_up(incident: Incident, limits: RestartTable) -> str:
    return (
        f"{limits.max_restarts} restarts ([restart] max_restarts) brought no newer checkpoint; the last worker ended "
        f"at step {incident.step}: {incident.reason}"
    )
