"""What a worker and its daemon say to each other over their socketpair: one JSON object a line.

The worker is told what to do by Start; it answers Ready once a step could be trained and saved, and trains after Begin.
The request to stop is no message but a flag in the status page, so that a busy worker sees it without reading.
"""

from typing import Any

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True):
    """The base of all messages; its name is its tag."""


class Start(Message, frozen=True):
    """daemon: this is the job, as `Job.to_json` wrote it; `fresh`: leave every checkpoint aside."""

    job: str
    fresh: bool


class Begin(Message, frozen=True):
    """daemon: your term has begun, train."""

    term: int


class Distrust(Message, frozen=True):
    """daemon: this data file of the run is damaged; save anew what would be referred to in it."""

    path: str


class Ready(Message, frozen=True):
    """worker: built, loaded and checked; `source` "" is a start at step 0, `reason` why the grade is not higher."""

    step: int
    source: str
    grade: str
    reason: str
    skipped: tuple[str, ...]


class Saved(Message, frozen=True):
    """worker: the checkpoint of `step` is committed."""

    step: int
    bytes: int
    seconds: float


class SaveFailed(Message, frozen=True):
    """worker: `step` could not be saved; training goes on."""

    step: int
    reason: str


class Finished(Message, frozen=True):
    """worker: max_iter is reached and saved."""

    step: int


class Stopped(Message, frozen=True):
    """worker: stopped on request after `step`; `saved`: a checkpoint holds that step."""

    step: int
    saved: bool


class Failed(Message, frozen=True):
    """worker: it cannot go on; `exit_code` is what the run would end with were it not restarted."""

    exit_code: int
    reason: str
    fingerprint: str


LastWord = Finished | Stopped | Failed
WorkerMessage = Ready | Saved | SaveFailed | LastWord
DaemonMessage = Start | Begin | Distrust

_encoder = msgspec.json.Encoder()
_from_worker: msgspec.json.Decoder[Any] = msgspec.json.Decoder(WorkerMessage)
_from_daemon: msgspec.json.Decoder[Any] = msgspec.json.Decoder(DaemonMessage)


def encode(message: WorkerMessage | DaemonMessage) -> bytes:
    """Return `message` as one line."""
    return _encoder.encode(message) + b"\n"


def decode_worker(line: bytes) -> WorkerMessage:
    """Return what a worker said; msgspec.DecodeError if it is no message of ours."""
    message: WorkerMessage = _from_worker.decode(line)
    return message


def decode_daemon(line: bytes) -> DaemonMessage:
    """Return what the daemon said; msgspec.DecodeError if it is no message of ours."""
    message: DaemonMessage = _from_daemon.decode(line)
    return message
