"""The manifest: what a checkpoint consists of, and the checks that a parsed one has to pass before it is believed."""

import math
from typing import Annotated, Any

import msgspec

from trainerd.checkpoint import dtypes, envelope, nodes
from trainerd.checkpoint.errors import Damaged, UnsupportedState
from trainerd.checkpoint.layout import CheckpointName, parse_checkpoint, parse_data_file

MANIFEST_BYTES = 2**30
"""A manifest is no longer than this: a longer one is neither written nor read."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Bytes, extents and steps: what fits the signed 64 bits in which files and tensors are counted."""

Label = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]{0,300}\Z")]
"""A word that is shown as it stands: short, and nothing that a terminal obeys."""

Seconds = Annotated[float, msgspec.Meta(ge=0, lt=253_402_300_800)]
"""Time since 1970, UTC, before the year 10000: what can be shown as a date."""

_LARGEST = 2**63 - 1


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A contiguous, row-major piece of a tensor in a data file."""

    file: str
    offset: Count
    length: Count
    at: tuple[Count, ...]
    shape: tuple[Count, ...]
    xxh3_128: str


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor: its type, global shape and the chunks that tile it, in row-major order."""

    dtype: str
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * dtypes.item_bytes(self.dtype)


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A data file: its whole length, and length and hash of what precedes the first chunk."""

    bytes: Count
    header_bytes: Count
    header_xxh3_128: str


class ManifestHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest says beside its tensors: enough to choose among many, and quick to read.

    `time` in seconds since 1970, UTC; keys of `files` relative to the checkpoint. `pinned`: steps whose checkpoints
    stay while this one is the newest that counts. `metrics`: finite numbers, by which it may be the best. `keep`: the
    retention rules at that time.
    """

    written_by: Label
    run: Label
    step: Count
    term: Count
    time: Seconds
    world_size: Count
    pinned: tuple[Count, ...] = ()
    metrics: dict[str, float] = {}
    keep: dict[str, Any] = {}
    versions: dict[str, str]
    files: dict[str, FileEntry]

    @property
    def name(self) -> CheckpointName:
        """Step and term."""
        return CheckpointName(self.step, self.term)


class Manifest(ManifestHead, frozen=True, kw_only=True):
    """One committed checkpoint."""

    tensors: dict[str, TensorEntry]
    tree: Any

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.bytes for entry in self.tensors.values())


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`: made once, with the run."""

    written_by: Label
    run: Label
    time: Seconds


def seal_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest's file. UnsupportedState if it would be longer than a reader takes."""
    data = envelope.seal(manifest)
    if len(data) > MANIFEST_BYTES:
        raise UnsupportedState(
            "",
            f"a state of {len(manifest.tensors)} tensors whose description takes {len(data)} bytes",
            f"a manifest holds {MANIFEST_BYTES} at most: keep many numbers in one tensor, not in lists",
        )
    return data


def parse_manifest(data: bytes, name: CheckpointName) -> Manifest:
    """The manifest in a file's bytes, checked: whoever has one may walk it. Damaged or FormatTooNew otherwise."""
    manifest = envelope.unseal(data, Manifest, name.manifest)
    reason = _first_fault(manifest, name)
    if reason:
        raise Damaged(name.manifest, reason)
    return manifest


def parse_head(data: bytes, name: CheckpointName) -> ManifestHead:
    """As `parse_manifest`, without looking at the tensors."""
    head = envelope.unseal(data, ManifestHead, name.manifest)
    reason = _head_fault(head, name)
    if reason:
        raise Damaged(name.manifest, reason)
    return head


def _head_fault(head: ManifestHead, name: CheckpointName) -> str | None:
    if head.name != name:
        return f"it is the manifest of {head.name}"
    for file, entry in head.files.items():
        if not _is_data_file(file):
            return f"it names a file outside the run's checkpoints: {file[:100]!r}"
        if not 8 <= entry.header_bytes <= entry.bytes:
            return f"it gives {file} {entry.bytes} bytes with a header of {entry.header_bytes}"
    return None


def _first_fault(manifest: Manifest, name: CheckpointName) -> str | None:
    fault = _head_fault(manifest, name)
    if fault:
        return fault
    for tensor, described in manifest.tensors.items():
        fault = _tensor_fault(described, manifest.files)
        if fault:
            return f"tensor {tensor[:100]!r} {fault}"
    return nodes.first_fault(manifest.tree, manifest.tensors)


def _is_data_file(path: str) -> bool:
    folder, separator, name = path.rpartition("/")
    return parse_data_file(name) is not None and (not separator or parse_checkpoint(folder) is not None)


def _tensor_fault(entry: TensorEntry, files: dict[str, FileEntry]) -> str | None:
    if entry.dtype not in dtypes.DTYPES:
        return f"has the unknown type {entry.dtype[:100]!r}"
    if not _is_countable(entry.shape):
        return "has more elements than 64 bits can count"
    item_bytes = dtypes.item_bytes(entry.dtype)
    expected_at = 0
    for chunk in entry.chunks:
        if chunk.file not in files:
            return f"lies in {chunk.file[:100]!r}, which the manifest does not list"
        if not files[chunk.file].header_bytes <= chunk.offset <= files[chunk.file].bytes - chunk.length:
            return f"lies outside {chunk.file}"
        if len(chunk.at) != len(entry.shape) or len(chunk.shape) != len(entry.shape):
            return "has a chunk of another rank"
        if not _is_row_major_run(chunk, entry.shape):
            return "has a chunk that is no contiguous piece of it"
        if chunk.length != math.prod(chunk.shape) * item_bytes:
            return f"has a chunk of {chunk.length} bytes for another number of elements"
        # Row-major pieces in order: each must begin where the one before it ended, or the tensor has holes.
        if flat_offset(chunk.at, entry.shape) * item_bytes != expected_at:
            return "has chunks that overlap or leave a hole"
        expected_at += chunk.length
    if expected_at != entry.bytes:
        return f"has chunks for {expected_at} of its {entry.bytes} bytes"
    return None


def _is_countable(shape: tuple[int, ...]) -> bool:
    """Whether strides and elements fit 64 bits; stops early, since the product of a hostile shape takes minutes."""
    elements = 1
    for extent in shape:
        elements *= extent or 1
        if elements > _LARGEST:
            return False
    return True


def _is_row_major_run(chunk: Chunk, shape: tuple[int, ...]) -> bool:
    """Single rows, then one partial extent, then whole extents."""
    if chunk.shape == shape:
        return not any(chunk.at)
    split = next((i for i, extent in enumerate(chunk.shape) if extent != 1), len(shape))
    inside = all(at + n <= extent for at, n, extent in zip(chunk.at, chunk.shape, shape, strict=True))
    return inside and chunk.shape[split + 1 :] == shape[split + 1 :]


def flat_offset(at: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Number of elements before a position in row-major order."""
    offset = 0
    for index, extent in zip(at, shape, strict=True):
        offset = offset * extent + index
    return offset
