"""A stored state as a torch.save file, or as a folder of torch.distributed.checkpoint."""

import warnings
from typing import Any

import torch

from trainerd.checkpoint import reader, trees
from trainerd.checkpoint.convert.errors import NotConverted
from trainerd.checkpoint.convert.plain_state import PlainDecoder
from trainerd.checkpoint.live_tensors import read_tensors
from trainerd.checkpoint.manifest import Manifest
from trainerd.checkpoint.storage import Storage


def read_plain(storage: Storage, manifest: Manifest, node: Any) -> tuple[Any, list[tuple[str, str, str]]]:
    """The state at a node, verified, of plain values and CPU tensors; and what became of others. Damaged."""
    reader.verify_headers(storage, manifest)
    tensors = read_tensors(storage, manifest, trees.tensors_in(node))
    decoder = PlainDecoder(tensors.__getitem__)
    return decoder.decode(node, ()), decoder.changed


def write_torch_file(file: str, state: Any) -> None:
    """Write a new torch.save file, and load it with `weights_only=True` to be sure that it can be. OSError."""
    try:
        with open(file, "xb") as stream:
            torch.save(state, stream)
    except RuntimeError as error:
        raise _system_error(error) from error
    try:
        torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever torch's own reader has against it
        raise NotConverted(f"torch.load(weights_only=True) does not read this state: {error}") from error


def write_dcp_folder(folder: str, state: Any) -> None:
    """Write a new folder of torch.distributed.checkpoint, as one process does.

    NotConverted if the state is no dict; OSError.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    if not isinstance(state, dict):
        raise NotConverted("torch.distributed.checkpoint holds dicts only: choose a part that is one with --path.")
    try:
        with warnings.catch_warnings(action="ignore"):  # it tells that it saves from a single process
            save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    except CheckpointException as error:
        raise _system_error(error.failures[0][0]) from error


def _system_error(error: BaseException) -> BaseException:
    """What the system said behind an error of torch's writer, which hides a full disk in its context; else itself."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__context__
    return found or error
