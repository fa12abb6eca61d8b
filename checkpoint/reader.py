"""Find, check and read checkpoints without torch: believe hashes, never presence or names."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import xxhash

from trainerd.checkpoint import layout
from trainerd.checkpoint.errors import Damaged, FormatTooNew, NoCheckpoint
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.manifest import MANIFEST_BYTES, Chunk, Manifest, TensorEntry, parse_manifest
from trainerd.checkpoint.storage import Storage
from trainerd.checkpoint.terms import committed, committed_once, counts, named, read_run, read_tickets
from trainerd.checkpoint.trees import KIND, find

State = Literal["valid", "damaged", "incomplete", "superseded"]

_READ_BYTES = 16 * 2**20


@dataclass(frozen=True)
class CheckpointInfo:
    """What a listing says of one checkpoint.

    `bytes` are those of its tensors, `unique_bytes` those of its own files; `time` in seconds since 1970, UTC. `pins`
    are the steps that it wants kept, `pinned` says whether the newest valid one wants this one kept.
    """

    name: str
    step: int
    term: int
    state: State
    reason: str = ""
    bytes: int = 0
    unique_bytes: int = 0
    time: float | None = None
    pins: tuple[int, ...] = ()
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
    return _mark_newest([_judge(storage, name, counted=counts(name, tickets)) for name in named(storage)])


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
    manifest = read_newest(storage) if step is None else read_step(storage, step)
    if manifest is None:
        raise NoCheckpoint(f"No checkpoint has been committed in {storage.url} yet.")
    return StoredTree(manifest, _described(manifest.tree, manifest.tensors))


def newest_step(storage: Storage) -> int | None:
    """Step of the newest valid checkpoint on the lineage; None when the run is to start fresh.

    NoCheckpoint when nothing is valid though something was committed: that is never a fresh start.
    """
    manifest = read_newest(storage)
    return None if manifest is None else manifest.step


def newest_whole_step(storage: Storage) -> int | None:
    """As `newest_step`, with every byte of data held against its hash."""
    skipped = []
    for name in candidates(storage):
        info = _verify(storage, CheckpointInfo(str(name), name.step, name.term, "valid"))
        if info.state == "valid":
            return info.step
        skipped.append(str(Damaged(str(name), info.reason)))
    refuse_fresh_start(storage, skipped)
    return None


def read_newest(storage: Storage) -> Manifest | None:
    """Manifest of the newest valid checkpoint on the lineage, judged without reading data; else as `newest_step`."""
    skipped = []
    for name in candidates(storage):
        try:
            return read_manifest(storage, name)
        except Damaged as damage:
            skipped.append(str(damage))
    refuse_fresh_start(storage, skipped)
    return None


def read_step(storage: Storage, step: int) -> Manifest:
    """Manifest of a step's checkpoint, on the lineage if there is a choice. NoCheckpoint names the steps there are."""
    tickets = read_tickets(storage)
    names = [name for name in committed(storage) if name.step == step]
    if not names:
        steps = sorted({name.step for name in committed(storage)})
        have = f"It has the steps {_abbreviated(steps)}" if steps else "It has no checkpoint at all"
        raise NoCheckpoint(
            f"{storage.url} has no checkpoint of step {step}. {have}; `trainerd list {storage.url}` shows them."
        )
    return read_manifest(storage, max(names, key=lambda name: (counts(name, tickets), name.term)))


def candidates(storage: Storage) -> list[CheckpointName]:
    """Checkpoints that a resume may take, best first: committed and on the lineage."""
    tickets = read_tickets(storage)
    return [name for name in reversed(committed(storage)) if counts(name, tickets)]


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


def read_manifest(storage: Storage, name: CheckpointName) -> Manifest:
    """A checkpoint's manifest, its files present and of the right length. Damaged, FormatTooNew."""
    size = storage.size(name.manifest)
    if size is not None and size > MANIFEST_BYTES:
        raise Damaged(str(name), f"its manifest has {size} bytes, and none is written with more than {MANIFEST_BYTES}")
    try:
        manifest = parse_manifest(storage.read(name.manifest), name)
    except FileNotFoundError:
        raise Damaged(str(name), "its manifest is gone") from None
    run = read_run(storage)
    if run is not None and run.run != manifest.run:
        raise Damaged(str(name), f"it belongs to another run ({manifest.run}), this one is {run.run}")
    for file, entry in manifest.files.items():
        size = storage.size(file_path(name, file))
        if size != entry.bytes:
            there = "is missing" if size is None else f"has {size} bytes instead of {entry.bytes}"
            raise Damaged(str(name), f"{file} {there}")
    return manifest


def read_tensor_into(storage: Storage, manifest: Manifest, tensor: str, memory: memoryview) -> None:
    """Fill memory with a tensor's elements in row-major order, verified. Damaged if a byte is not what was written."""
    done = 0
    for chunk in manifest.tensors[tensor].chunks:
        part = memory[done : done + chunk.length]
        path = file_path(manifest.name, chunk.file)
        try:
            read = storage.read_into(path, chunk.offset, part)
        except FileNotFoundError:
            read = 0
        if read != chunk.length or xxhash.xxh3_128_hexdigest(part) != chunk.xxh3_128:
            raise Damaged(str(manifest.name), _mismatch(tensor, chunk))
        done += chunk.length


def verify_headers(storage: Storage, manifest: Manifest) -> None:
    """Hold the header of every data file against its hash. Damaged if one differs."""
    for file, entry in manifest.files.items():
        header = storage.read(file_path(manifest.name, file), 0, entry.header_bytes)
        if xxhash.xxh3_128_hexdigest(header) != entry.header_xxh3_128:
            raise Damaged(str(manifest.name), f"the header of {file} does not match its hash")


def file_path(name: CheckpointName, file: str) -> str:
    """Where a data file of a manifest lies, relative to the run; it may belong to an earlier checkpoint."""
    return f"{layout.CHECKPOINTS}/{file}" if "/" in file else f"{name.folder}/{file}"


def _judge(storage: Storage, name: CheckpointName, *, counted: bool) -> CheckpointInfo:
    info = CheckpointInfo(str(name), name.step, name.term, "valid")
    if storage.size(name.manifest) is None:
        return replace(info, state="incomplete", reason="it has no manifest: the save was not finished")
    try:
        manifest = read_manifest(storage, name)
    except (Damaged, FormatTooNew) as error:
        return replace(info, state="damaged", reason=getattr(error, "reason", str(error)))
    own = sum(entry.bytes for file, entry in manifest.files.items() if "/" not in file)
    info = replace(info, bytes=manifest.bytes, unique_bytes=own, time=manifest.time, pins=manifest.pinned)
    return info if counted else replace(info, state="superseded", reason="a later term resumed from an earlier step")


def _mark_newest(infos: list[CheckpointInfo]) -> list[CheckpointInfo]:
    newest = next((info for info in reversed(infos) if info.state == "valid"), None)
    if newest is None:
        return infos
    return [
        replace(
            info,
            pinned=info.state == "valid" and info.step in newest.pins,
            kept_because=("newest",) if info is newest else (),
        )
        for info in infos
    ]


def _verify(storage: Storage, info: CheckpointInfo) -> CheckpointInfo:
    name = CheckpointName(info.step, info.term)
    try:
        manifest = read_manifest(storage, name)
        verify_headers(storage, manifest)
        for tensor, entry in manifest.tensors.items():
            _verify_tensor(storage, manifest, tensor, entry)
    except Damaged as damage:
        return replace(info, state="damaged", reason=damage.reason, kept_because=())
    return info


def _verify_tensor(storage: Storage, manifest: Manifest, tensor: str, entry: TensorEntry) -> None:
    for chunk in entry.chunks:
        path = file_path(manifest.name, chunk.file)
        digest = xxhash.xxh3_128()
        for offset in range(chunk.offset, chunk.offset + chunk.length, _READ_BYTES):
            digest.update(storage.read(path, offset, min(_READ_BYTES, chunk.offset + chunk.length - offset)))
        if digest.hexdigest() != chunk.xxh3_128:
            raise Damaged(str(manifest.name), _mismatch(tensor, chunk))


def _mismatch(tensor: str, chunk: Chunk) -> str:
    return f"{tensor} in {chunk.file} (bytes {chunk.offset} to {chunk.offset + chunk.length}) does not match its hash"


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
