"""Find, check and read checkpoints without torch: believe hashes, never presence or names."""

import errno
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import xxhash

from trainerd.checkpoint.chunk_reader import file_lengths, file_path, read_chunks, reads_of
from trainerd.checkpoint.errors import Damaged, FormatTooNew, NoCheckpoint, NotCommitted, StorageUnusable
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.manifest import (
    MANIFEST_BYTES,
    Manifest,
    RunRecord,
    TensorEntry,
    parse_head,
    parse_manifest,
)
from trainerd.checkpoint.pins import read_pins
from trainerd.checkpoint.retention import Candidate, Keep, candidate_of, reasons, recorded_keep
from trainerd.checkpoint.storage import Storage
from trainerd.checkpoint.terms import committed, committed_once, counts, named, read_run, read_tickets
from trainerd.checkpoint.trees import KIND, find

State = Literal["valid", "damaged", "incomplete", "superseded"]


@dataclass(frozen=True)
class CheckpointInfo:
    """What a listing says of one checkpoint.

    `bytes` are those of its tensors, `unique_bytes` those of the data files that no other checkpoint needs; `time` in
    seconds since 1970, UTC. `pinned` says whether a person or the newest valid one wants this one kept, `kept_because`
    why the rules by which the newest valid one was saved keep it: with none, the next prune deletes it.
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


@dataclass(frozen=True)
class StoredTree:
    """The tree of a checkpoint, with each tensor reference told its type and shape."""

    manifest: Manifest
    tree: Any

    @property
    def step(self) -> int:
        """The checkpoint's step."""
        return self.manifest.step

    @property
    def term(self) -> int:
        """The checkpoint's term."""
        return self.manifest.term

    def at(self, path: str) -> Any:
        """The part of the tree at a path such as `hooks.EMA`. KeyError(rest of the path, names that are there)."""
        return find(self.tree, path)


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


def verify_checkpoints(storage: Storage, step: int | None = None) -> Iterator[CheckpointInfo]:
    """As `list_checkpoints`, or one step of it, with every byte of data read and held against its hash.

    RunDamaged if a file is damaged on which all of them depend.
    """
    read_run(storage)
    for info in list_checkpoints(storage):
        if step is None or info.step == step:
            yield _verify(storage, info) if info.state in ("valid", "superseded") else info


def read_tree(storage: Storage, step: int | None = None) -> StoredTree:
    """The tree of the newest valid checkpoint, or of one step. NoCheckpoint, or Damaged if that step is."""
    manifest = read_valid(storage, step)
    return StoredTree(manifest, _described(manifest.tree, manifest.tensors))


def newest_step(storage: Storage) -> int | None:
    """Step of the newest valid checkpoint on the lineage; None when the run is to start fresh.

    NoCheckpoint when nothing is valid though something was committed: that is never a fresh start.
    """
    manifest = read_newest(storage)
    return None if manifest is None else manifest.step


def newest_whole_step(storage: Storage) -> int | None:
    """As `newest_step`, with every byte of data held against its hash."""
    skipped: list[str] = []
    for manifest in valid_manifests(storage, skipped):
        info = _verify(storage, CheckpointInfo(str(manifest.name), manifest.step, manifest.term, "valid"))
        if info.state == "valid":
            return info.step
        skipped.append(str(Damaged(info.name, info.reason)))
    refuse_fresh_start(storage, skipped)
    return None


def read_newest(storage: Storage) -> Manifest | None:
    """Manifest of the newest valid checkpoint on the lineage, judged without reading data; else as `newest_step`."""
    skipped: list[str] = []
    for manifest in valid_manifests(storage, skipped):
        return manifest
    refuse_fresh_start(storage, skipped)
    return None


def read_valid(storage: Storage, step: int | None) -> Manifest:
    """Manifest of the newest valid checkpoint, or of one step. NoCheckpoint, or Damaged if that step is."""
    manifest = read_newest(storage) if step is None else read_step(storage, step)
    if manifest is None:
        raise NoCheckpoint(f"No checkpoint has been committed in {storage.url} yet.")
    return manifest


def read_step(storage: Storage, step: int) -> Manifest:
    """Manifest of a step's checkpoint, on the lineage if there is a choice. NoCheckpoint names the steps there are."""
    return read_manifest(storage, name_of_step(storage, step))


def name_of_step(storage: Storage, step: int) -> CheckpointName:
    """A step's checkpoint, on the lineage if there is a choice. NoCheckpoint names the steps there are."""
    tickets = read_tickets(storage)
    names = [name for name in named(storage) if name.step == step and storage.size(name.manifest) is not None]
    if not names:
        steps = sorted({name.step for name in committed(storage)})
        have = f"It has the steps {_abbreviated(steps)}" if steps else "It has no checkpoint at all"
        raise NoCheckpoint(
            f"{storage.url} has no checkpoint of step {step}. {have}; `trainerd list {storage.url}` shows them."
        )
    return max(names, key=lambda name: (counts(name, tickets), name.term))


def candidates(storage: Storage) -> Iterator[CheckpointName]:
    """What a resume may take, best first: on the lineage, committed or not, which only reading the manifest tells."""
    tickets = read_tickets(storage)
    return (name for name in reversed(named(storage)) if counts(name, tickets))


def valid_manifests(storage: Storage, skipped: list[str]) -> Iterator[Manifest]:
    """Manifests that a resume may take, best first, each read when it is asked for; `skipped` gets why others not."""
    for name in candidates(storage):
        try:
            yield read_manifest(storage, name)
        except NotCommitted:
            continue
        except Damaged as damage:
            skipped.append(str(damage))


def refuse_fresh_start(storage: Storage, skipped: list[str]) -> None:
    """Raise NoCheckpoint if something that counts was once committed: what could be read of it is in `skipped`."""
    once = committed_once(storage)
    if not skipped and not once:
        return
    found = " ".join(skipped) or f"{once}, but no checkpoint is there any more."
    raise NoCheckpoint(
        f"{storage.url} was trained before, but none of its checkpoints can be used. {found} Nothing was "
        f"changed. Bring the files back from a copy, or start again at step 0 with `trainerd run --fresh`."
    )


def read_manifest(storage: Storage, name: CheckpointName, run: RunRecord | None = None) -> Manifest:
    """A checkpoint's manifest, its files present and of the right length. NotCommitted, Damaged, FormatTooNew.

    Whoever reads many hands the run's record in, or it is read each time.
    """
    manifest = parse_manifest(_manifest_bytes(storage, name), name)
    run = run or read_run(storage)
    if run is not None and run.run != manifest.run:
        raise Damaged(str(name), f"it belongs to another run ({manifest.run}), this one is {run.run}")
    lengths = file_lengths(storage, manifest)
    for file, entry in manifest.files.items():
        size = lengths.get(file_path(name, file))
        if size != entry.bytes:
            if storage.size(name.manifest) is None:
                # Pruned while we looked.
                raise NotCommitted(str(name))
            there = "is missing" if size is None else f"has {size} bytes instead of {entry.bytes}"
            raise Damaged(str(name), f"{file} {there}")
    return manifest


def _manifest_bytes(storage: Storage, name: CheckpointName) -> bytes:
    size = storage.size(name.manifest)
    if size is not None and size > MANIFEST_BYTES:
        raise Damaged(str(name), f"its manifest has {size} bytes, and none is written with more than {MANIFEST_BYTES}")
    try:
        return storage.read(name.manifest)
    except FileNotFoundError:
        raise NotCommitted(str(name)) from None
    except StorageUnusable as error:
        # A file in the place of its folder, or a folder in the place of its manifest: foreign, and not in the way.
        if error.errno not in {errno.ENOTDIR, errno.EISDIR}:
            raise
        raise NotCommitted(str(name)) from None


def verify_headers(storage: Storage, manifest: Manifest) -> None:
    """Hold the header of every data file against its hash. Damaged if one differs."""
    for file, entry in manifest.files.items():
        header = storage.read(file_path(manifest.name, file), 0, entry.header_bytes)
        if xxhash.xxh3_128_hexdigest(header) != entry.header_xxh3_128:
            raise Damaged(str(manifest.name), f"the header of {file} does not match its hash")


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
        return candidate_of(parse_head(_manifest_bytes(storage, name), name))
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
            unique_bytes=sum(size for file, size in one.files.items() if users[file] == 1),
            pinned=one.name in pins or (one.name in kept and one.name.step in steps),
            kept_because=kept.get(one.name) or ((pins[one.name],) if one.name in pins else ()),
        )
        for one in judged
    ]


def _verify(storage: Storage, info: CheckpointInfo) -> CheckpointInfo:
    name = CheckpointName(info.step, info.term)
    try:
        manifest = read_manifest(storage, name)
        verify_headers(storage, manifest)
        read_chunks(storage, name, reads_of(manifest, dict.fromkeys(manifest.tensors)))
    except Damaged as damage:
        return replace(info, state="damaged", reason=damage.reason, kept_because=())
    return info


def _described(node: Any, tensors: dict[str, TensorEntry]) -> Any:
    """The tree with dtype and shape beside every reference to a tensor."""
    if isinstance(node, list):
        return [_described(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    described = {key: _described(item, tensors) for key, item in node.items()}
    if KIND in node and isinstance(node.get("tensor"), str) and node["tensor"] in tensors:
        entry = tensors[node["tensor"]]
        # An ndarray node tells its own element type and shape; its bytes are stored flat.
        described = {**described, "bytes": entry.bytes}
        described.setdefault("dtype", entry.dtype)
        described.setdefault("shape", list(entry.shape))
    return described


def _abbreviated(steps: list[int]) -> str:
    shown = [str(step) for step in steps] if len(steps) <= 8 else [*map(str, steps[:3]), "...", *map(str, steps[-3:])]
    return ", ".join(shown)
