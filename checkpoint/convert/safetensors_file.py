"""safetensors files, mapped rather than read; their header is believed only after it was held against the file."""

import math
import mmap
import os
from typing import Any

import msgspec
import torch

from trainerd.checkpoint import dtypes
from trainerd.checkpoint.convert.errors import NotConverted

_DTYPES = {tag: getattr(torch, name) for name in dtypes.DTYPES if (tag := dtypes.safetensors_tag(name))}


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_safetensors(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a file by name, on the CPU, private copies of its pages once they are written to. NotConverted."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= size - 8:
            raise NotConverted(f"{path} is no whole safetensors file: its header does not fit in its {size} bytes.")
        try:
            header: dict[str, Any] = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NotConverted(f"{path} is no safetensors file: its header cannot be read ({error}).") from error
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: _tensor(path, name, entry, data, 8 + length) for name, entry in entries.items()}


def _tensor(path: str, name: str, entry: _Entry, data: mmap.mmap, start: int) -> torch.Tensor:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise NotConverted(f"{path}: tensor {name} is of the type {entry.dtype}, which this version does not know.")
    begin, end = entry.data_offsets
    whole = 0 <= begin <= end <= len(data) - start and min(entry.shape, default=0) >= 0
    if not whole or end - begin != math.prod(entry.shape) * dtype.itemsize:
        raise NotConverted(f"{path} is cut short or damaged: tensor {name} does not lie in it as its header says.")
    if begin == end:
        return torch.empty(entry.shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8, count=end - begin, offset=start + begin)
    if (start + begin) % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).reshape(entry.shape)
