"""The job: what to train, where, how long, and how it is kept safe. One source for file keys, flags and documents.

A field that carries a description is a key of the job file, under its encoded name; every other field is internal.
"""

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from trainerd.daemon.durations import Bytes, BytesPerHour, Interval, Seconds, Spacing
from trainerd.trainer.mismatch import OnMismatch


class KeepTable(msgspec.Struct, frozen=True, kw_only=True):
    """`checkpoint.keep`: a checkpoint stays if any of these rules wants it."""

    last: Annotated[
        int,
        Meta(
            ge=1,
            description="so many of the newest checkpoints",
            extra={"why_least": "the newest checkpoint is what a restart needs, so it is never deleted"},
        ),
    ] = 3
    every: Annotated[
        Spacing | None, Meta(description="those whose step is a multiple of this, or the first of each period of time")
    ] = None
    newer_than_seconds: Annotated[Seconds | None, Meta(description="those younger than this")] = field(
        name="newer_than", default=None
    )
    best: Annotated[
        int | None, Meta(description="so many of the best by `metric`", extra={"least": 1})  # ge: not with None
    ] = None
    metric: Annotated[str, Meta(description="the scalar by which they are the best")] = "total_loss"
    mode: Annotated[Literal["min", "max"], Meta(description="whether less or more of it is better")] = "min"
    bytes: Annotated[
        Bytes | None, Meta(description="the newest ones whose data files, each counted once, take no more than this")
    ] = None


class CheckpointTable(msgspec.Struct, frozen=True, kw_only=True):
    """`[checkpoint]`: when the state is saved, and which checkpoints stay."""

    every: Annotated[Interval, Meta(description="how often the state is saved")] = Interval()
    on_mismatch: Annotated[
        OnMismatch,
        Meta(description="where checkpoint and code differ: error, warn, saved or code; or a table of these"),
    ] = OnMismatch({"default": "error"})
    scrub_bytes_per_hour: Annotated[
        BytesPerHour,
        Meta(description="how much of what is stored is read again each hour, to find damage early"),
    ] = field(name="scrub", default=BytesPerHour(4_000_000_000))
    keep: Annotated[KeepTable, Meta(description="which checkpoints stay; the others are deleted after a save")] = (
        KeepTable()
    )


class RestartTable(msgspec.Struct, frozen=True, kw_only=True):
    """`[restart]`: what follows the death of a worker."""

    max_restarts: Annotated[
        int, Meta(ge=0, description="restarts allowed per cause until a newer checkpoint has been saved")
    ] = 5
    backoff_seconds: Annotated[Seconds, Meta(description="pause before the first restart; it doubles")] = field(
        name="backoff", default=Seconds(1.0)
    )
    backoff_max_seconds: Annotated[Seconds, Meta(description="the longest pause before a restart")] = field(
        name="backoff_max", default=Seconds(60.0)
    )


class PreemptionTable(msgspec.Struct, frozen=True, kw_only=True):
    """`[preemption]`: what follows SIGTERM or SIGINT."""

    grace_seconds: Annotated[
        Seconds, Meta(description="time to finish the step and save, from SIGTERM or SIGINT on")
    ] = field(name="grace", default=Seconds(25.0))


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one run needs to know; `target` and `dir` are absolute, so no process need share our folder."""

    target: Annotated[str, Meta(description="the function that builds the trainer")]
    dir: Annotated[str, Meta(description="the run folder")]
    max_iter: Annotated[int, Meta(ge=1, description="train until so many iterations are completed")]
    config: Annotated[
        dict[str, Any], Meta(description="a table handed to the target as it stands; --set key=value adds to it")
    ] = field(default_factory=dict)
    storage: Annotated[
        dict[str, Any], Meta(description="options of a remote run folder's fsspec filesystem; --storage key=value adds")
    ] = field(default_factory=dict)
    checkpoint: Annotated[CheckpointTable, Meta(description="saving")] = CheckpointTable()
    restart: Annotated[RestartTable, Meta(description="restarting")] = RestartTable()
    preemption: Annotated[PreemptionTable, Meta(description="being taken away")] = PreemptionTable()
    folder: str = ""  # modules of the target are looked up here first: the job file's folder, or where we started
    source: str = ""  # the job file, or "command line"; for messages

    def to_json(self) -> bytes:
        """The job as one line, for the worker process."""
        # Not msgspec.json: it writes infinity and NaN of [config] as null.
        return json.dumps(msgspec.to_builtins(self)).encode()

    @classmethod
    def from_json(cls, line: bytes) -> "Job":
        """The job that `to_json` wrote."""
        return msgspec.convert(json.loads(line), cls)
