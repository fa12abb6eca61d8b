"""Export a checkpoint, or a part of it, to a file or folder that other programs read."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from trainerd.checkpoint import dtypes
from trainerd.checkpoint.convert.errors import NotConverted
from trainerd.checkpoint.convert.publishing import appearing
from trainerd.checkpoint.convert.safetensors_export import write_safetensors
from trainerd.checkpoint.convert.selection import is_tensor, leaves, select
from trainerd.checkpoint.reader import StoredTree, read_tree
from trainerd.checkpoint.storage import Storage

ExportFormat = Literal["safetensors", "torch", "dcp"]
FORMATS: tuple[str, ...] = get_args(ExportFormat)

_BY_SUFFIX: dict[str, ExportFormat] = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}


@dataclass(frozen=True)
class Exported:
    """What an export holds: `tensors` names, of which `repeated` share a stored tensor with another name.

    `left_out` are paths of values that safetensors cannot hold; `changed` those that torch.load(weights_only=True)
    does not permit, each with its kind and what it became.
    """

    out: str
    format: ExportFormat
    step: int
    term: int
    tensors: int
    bytes: int
    repeated: int = 0
    left_out: tuple[str, ...] = ()
    changed: tuple[tuple[str, str, str], ...] = ()


def export_checkpoint(
    storage: Storage,
    out: str,
    *,
    step: int | None = None,
    path: str = "",
    to: ExportFormat | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _size: None,
) -> Exported:
    """Write the newest valid checkpoint, or one step, to `out`; every byte is held against its hash.

    Args:
        storage: the run's.
        out: a file, or for "dcp" a folder; it appears whole or not at all.
        step: which checkpoint.
        path: a part of the state, such as "model"; its names then lack that prefix.
        to: the format; by the suffix of `out` when left out (.safetensors; .pt, .pth, .bin, .ckpt for torch).
        force: replace what is there.
        progress: told bytes done and bytes in all, for safetensors.

    A safetensors file is streamed; the others are built in memory. NotConverted, NoCheckpoint, Damaged,
    StorageUnusable: then nothing is left at `out`, and what was there stays.
    """
    form = to or _format_of(out)
    stored = read_tree(storage, step)
    place = f"{storage.url}@{stored.step}"
    node = select(stored.tree, path, place)
    if form == "safetensors":
        return _export_safetensors(storage, stored, node, f"{path or 'state'} of {place}", out, force, progress)
    return _export_built(storage, stored, node, form, out, force=force)


def _format_of(out: str) -> ExportFormat:
    form = _BY_SUFFIX.get(os.path.splitext(out)[1].lower())
    if form is None:
        raise NotConverted(
            f"{out} has no suffix that tells the format: name it *.safetensors, *.pt or *.pth, or say "
            f"--to {'|'.join(FORMATS)}."
        )
    return form


def _export_safetensors(
    storage: Storage,
    stored: StoredTree,
    node: Any,
    place: str,
    out: str,
    force: bool,
    progress: Callable[[int, int], None],
) -> Exported:
    tensors: dict[str, str] = {}
    left_out = []
    for name, leaf in leaves(node):
        if not is_tensor(leaf) or dtypes.safetensors_tag(leaf["dtype"]) is None:
            left_out.append(name)
        elif (name or "tensor") in tensors:
            raise NotConverted(
                f"{place} has two tensors called {name}: export the part that holds one of them, --path."
            )
        else:
            tensors[name or "tensor"] = leaf["tensor"]
    if not tensors:
        raise NotConverted(f"The {place} holds no tensor that safetensors can hold. --to torch keeps other values.")
    metadata = {"step": str(stored.step), "run": stored.manifest.run, "written_by": stored.manifest.written_by}
    with appearing(out, force=force) as temporary:
        write_safetensors(temporary, storage, stored.manifest, tensors, metadata, progress)
        size = os.path.getsize(temporary)
    repeated = sum(count - 1 for count in Counter(tensors.values()).values())
    return Exported(
        out, "safetensors", stored.step, stored.term, len(tensors), size, repeated=repeated, left_out=tuple(left_out)
    )


def _export_built(
    storage: Storage, stored: StoredTree, node: Any, form: ExportFormat, out: str, *, force: bool
) -> Exported:
    from trainerd.checkpoint.convert import torch_export

    with appearing(out, force=force) as temporary:
        state, changed = torch_export.read_plain(storage, stored.manifest, node)
        write = torch_export.write_torch_file if form == "torch" else torch_export.write_dcp_folder
        write(temporary, state)
        size = _size(temporary)
    count = sum(is_tensor(leaf) for _, leaf in leaves(node))
    return Exported(out, form, stored.step, stored.term, count, size, changed=tuple(changed))


def _size(path: str) -> int:
    files = [os.path.join(path, name) for name in os.listdir(path)] if os.path.isdir(path) else [path]
    return sum(map(os.path.getsize, files))
