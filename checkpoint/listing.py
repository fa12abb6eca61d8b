"""What lies in a run, for people: every checkpoint, its state, what it takes, and why it is kept. No data is read."""

import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

from trainerd.checkpoint.errors import Damaged, FormatTooNew, NotCommitted
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.manifest import RunRecord, parse_head
from trainerd.checkpoint.pins import read_pins
from trainerd.checkpoint.reader import manifest_bytes, read_manifest
from trainerd.checkpoint.retention import Candidate, Keep, candidate_of, reasons, recorded_keep
from trainerd.checkpoint.storage import Storage
from trainerd.checkpoint.terms import counts, named, read_run, read_tickets

State = Literal["valid", "damaged", "incomplete", "superseded"]


@dataclass(frozen=True)
class CheckpointInfo:
    """What a listing says of one checkpoint.

    `bytes` are those of its tensors, `unique_bytes` those of the data files that no other checkpoint needs; `time` in
    seconds since 1970, UTC. `pinned` says whether a person or the newest valid one wants this one kept, `kept_because`
    why the rules by which the newest valid one was saved keep it: with none, the next prune deletes it. `files` gives
    the bytes of the data files that it needs, by `<checkpoint>/<name>`, as far as its manifest can tell.
    """

    name: str
    step: int
    term: int
    state: State
    reason: str = ""
    bytes: int = 0
    unique_bytes: int = 0
    time: float | None = None
    pinned: bool = False
    kept_because: tuple[str, ...] = ()
    files: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)


def list_checkpoints(storage: Storage) -> list[CheckpointInfo]:
    """Every checkpoint of a run, newest last, judged by manifest and file lengths; no data is read."""
    tickets = read_tickets(storage)
    names = named(storage)
    run = read_run(storage)
    with ThreadPoolExecutor(storage.guarantees.parallel, thread_name_prefix="trainerd-list") as pool:
        judged = list(pool.map(lambda name: _judge(storage, name, run, counted=counts(name, tickets)), names))
    needed = {path.partition("/")[0] for one in judged for path in one.files}
    # What is left of a pruned checkpoint because others refer to it is no checkpoint any more.
    return _explained(storage, [one for one in judged if one.info.state != "incomplete" or one.info.name not in needed])


@dataclass(frozen=True)
class _Judged:
    """What is said of a checkpoint, and what retention needs of it; not its manifest, for there may be thousands."""

    name: CheckpointName
    info: CheckpointInfo
    candidate: Candidate | None = None
    pins: tuple[int, ...] = ()
    keep: Keep | None = None

    @property
    def files(self) -> Mapping[str, int]:
        """Bytes of the data files that it needs."""
        return self.candidate.files if self.candidate else {}


def _judge(storage: Storage, name: CheckpointName, run: RunRecord | None, *, counted: bool) -> _Judged:
    info = CheckpointInfo(str(name), name.step, name.term, "valid")
    try:
        manifest = read_manifest(storage, name, run)
    except NotCommitted:
        return _Judged(name, replace(info, state="incomplete", reason="it has no manifest: the save was not finished"))
    except (Damaged, FormatTooNew) as error:
        info = replace(info, state="damaged", reason=getattr(error, "reason", str(error)))
        return _Judged(name, info, _if_readable(storage, name))
    info = replace(info, bytes=manifest.bytes, time=manifest.time)
    if not counted:
        info = replace(info, state="superseded", reason="a later term resumed from an earlier step")
    return _Judged(name, info, candidate_of(manifest), manifest.pinned, recorded_keep(manifest.keep))


def _if_readable(storage: Storage, name: CheckpointName) -> Candidate | None:
    """What a damaged checkpoint refers to, as far as its manifest can tell."""
    try:
        return candidate_of(parse_head(manifest_bytes(storage, name), name))
    except (Damaged, FormatTooNew):
        return None


def _explained(storage: Storage, judged: list[_Judged]) -> list[CheckpointInfo]:
    """Say of each checkpoint what it alone occupies, whether it is pinned, and why the newest one's rules keep it."""
    pins = read_pins(storage)
    valid = [one for one in judged if one.info.state == "valid"]
    rules = valid[-1].keep.rules if valid and valid[-1].keep else ()
    steps = valid[-1].pins if valid else ()
    kept = reasons(filter(None, (one.candidate for one in valid)), rules, time.time(), pinned_steps=steps, pins=pins)
    users = Counter(file for one in judged if one.candidate for file in one.files)
    return [
        replace(
            one.info,
            files=one.files,
            unique_bytes=sum(size for file, size in one.files.items() if users[file] == 1),
            pinned=one.name in pins or (one.name in kept and one.name.step in steps),
            kept_because=kept.get(one.name) or ((pins[one.name],) if one.name in pins else ()),
        )
        for one in judged
    ]
