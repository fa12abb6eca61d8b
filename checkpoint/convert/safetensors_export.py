"""Stored tensors streamed into one safetensors file, without torch."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from trainerd.checkpoint import dtypes, durable
from trainerd.checkpoint.convert.streams import stored_blocks
from trainerd.checkpoint.manifest import Manifest
from trainerd.checkpoint.storage import Storage

_ALIGNMENT = 64


def write_safetensors(
    file: str,
    storage: Storage,
    manifest: Manifest,
    tensors: Mapping[str, str],
    metadata: Mapping[str, str],
    progress: Callable[[int, int], None],
) -> None:
    """Write a new file with the stored tensors (name in the file to name in the manifest), 16 MiB at a time. Damaged.

    All of them must be of types that safetensors has. `progress` is told bytes done and bytes in all.
    """
    # Wide types first: every tensor then begins at a multiple of its element's size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -dtypes.item_bytes(manifest.tensors[item[1]].dtype)))
    header = _header(ordered, manifest, metadata)
    size = sum(manifest.tensors[stored].bytes for stored in ordered.values())

    def parts() -> Iterator[bytes]:
        yield header
        done = 0
        for stored in ordered.values():
            for block in stored_blocks(storage, manifest, stored):
                yield block
                done += len(block)
                progress(done, size)

    durable.write_new(file, parts(), len(header) + size)


def _header(tensors: Mapping[str, str], manifest: Manifest, metadata: Mapping[str, str]) -> bytes:
    # "pt" is what transformers asks for before it believes that the tensors are torch's.
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name, stored in tensors.items():
        entry = manifest.tensors[stored]
        entries[name] = {
            "dtype": dtypes.safetensors_tag(entry.dtype),
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.bytes],
        }
        offset += entry.bytes
    text = msgspec.json.encode(entries)
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
