"""Folders of torch.distributed.checkpoint read without its own reader, which unpickles whatever it finds."""

import io
import os
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from trainerd.checkpoint.convert.errors import NotConverted
from trainerd.checkpoint.convert.publishing import DCP_METADATA
from trainerd.checkpoint.convert.torch_file import read_torch_file

_PERMITTED: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, kind.__name__): kind
        for kind in (
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.TensorStorageMetadata,
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.TensorProperties,
            metadata.StorageMeta,
            metadata._MEM_FORMAT_ENCODING,
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,  # as Python 3.13 writes it
}


class _Unpickler(pickle.Unpickler):
    """Builds the records of DCP's own metadata, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of a record; NotConverted for any other."""
        found = _PERMITTED.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise NotConverted(f"The metadata holds {module}.{name}, which is none of its own records")
        return found


def read_dcp_folder(folder: str) -> dict[str, Any]:
    """The state of a folder that torch.distributed.checkpoint wrote, from any number of ranks, on the CPU.

    Dict keys come as text, as the format has them. NotConverted names what is missing, damaged or not permitted.
    """
    described = _read_metadata(folder)
    try:
        return _read_described(folder, described)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise NotConverted(f"{folder} is damaged: its metadata does not fit together ({error!r:.200}).") from error


def _read_described(folder: str, described: metadata.Metadata) -> dict[str, Any]:
    stored: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)
    for index, info in described.storage_data.items():
        stored[index.fqn].append((index, _checked(folder, info)))
    _refuse_more_than_the_files(folder, described)
    flat = {name: _read(folder, name, entry, stored[name]) for name, entry in described.state_dict_metadata.items()}
    return _nested(folder, flat, described.planner_data or {})


def _read_metadata(folder: str) -> metadata.Metadata:
    path = os.path.join(folder, DCP_METADATA)
    try:
        with open(path, "rb") as file:
            described = _Unpickler(file).load()
    except Exception as error:  # a hostile file can fail in any way
        raise NotConverted(
            f"{path} cannot be read: {str(error)[:200] or type(error).__name__}. Nothing in it was executed."
        ) from error
    if not isinstance(described, metadata.Metadata) or not isinstance(described.storage_data, dict):
        raise NotConverted(f"{path} holds no metadata of a checkpoint.")
    return described


def _checked(folder: str, info: Any) -> Any:
    name = info.relative_path
    if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
        raise NotConverted(f"{folder}: its metadata names {name!r}, which is no file of the folder.")
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        raise NotConverted(f"{folder} is not whole: {name} is missing. Bring the files of all ranks together.")
    if not 0 <= info.offset <= info.offset + info.length <= os.path.getsize(path):
        raise NotConverted(f"{folder} is not whole: {name} is cut short.")
    if info.transform_descriptors:
        raise NotConverted(f"{folder}: {name} is compressed or encrypted ({', '.join(info.transform_descriptors)}).")
    return info


def _refuse_more_than_the_files(folder: str, described: metadata.Metadata) -> None:
    sizes = [os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder)]
    entries = described.state_dict_metadata.values()
    tensors = [entry for entry in entries if isinstance(entry, metadata.TensorStorageMetadata)]
    claimed = sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors)
    if claimed > sum(sizes):
        raise NotConverted(f"{folder} is not whole: its tensors take {claimed} bytes, its files {sum(sizes)}.")


def _read(folder: str, name: str, entry: Any, stored: list[tuple[Any, Any]]) -> Any:
    if not isinstance(entry, metadata.TensorStorageMetadata):
        if not stored:
            raise NotConverted(f"{folder} is not whole: nothing is stored for {name}.")
        return _slice(folder, stored[0][1])
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    filled = 0
    for index, info in stored:
        part = _slice(folder, info)
        at = index.offset or (0,) * tensor.dim()
        fits = isinstance(part, torch.Tensor) and part.dim() == tensor.dim() == len(at) and part.dtype == tensor.dtype
        if not fits or any(o < 0 or o + n > m for o, n, m in zip(at, part.shape, tensor.shape, strict=True)):
            raise NotConverted(f"{folder} is damaged: a part of {name} does not fit into it.")
        tensor[tuple(slice(o, o + n) for o, n in zip(at, part.shape, strict=True))] = part
        filled += part.numel()
    if filled != tensor.numel():
        raise NotConverted(f"{folder} is not whole: {filled} of the {tensor.numel()} elements of {name} are stored.")
    return tensor


def _slice(folder: str, info: Any) -> Any:
    with open(os.path.join(folder, info.relative_path), "rb") as file:
        file.seek(info.offset)
        data = io.BytesIO(file.read(info.length))
    return read_torch_file(data, f"{info.relative_path} of {folder}")


class _Made(dict[Any, Any]):
    """A container that the paths made, as against a dict that was stored as one value."""


def _nested(folder: str, flat: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    root = _Made()
    for name, value in flat.items():
        *parents, last = paths.get(name, (name,))
        node: Any = root
        for key in parents:
            node = node.setdefault(key, _Made())
            if not isinstance(node, _Made):
                raise NotConverted(f"{folder} is damaged: {name} lies inside a value.")
        node[last] = value
    return {key: _with_lists(child) for key, child in root.items()}


def _with_lists(node: Any) -> Any:
    if not isinstance(node, _Made):
        return node
    children = {key: _with_lists(child) for key, child in node.items()}
    is_list = bool(children) and all(type(key) is int for key in children)
    return [children[key] for key in sorted(children)] if is_list else children
