"""Which program wrote a file or folder, and its parts; nothing in it is executed."""

import json
import os
from typing import Any

from trainerd.checkpoint.convert.dcp_folder import read_dcp_folder
from trainerd.checkpoint.convert.errors import NotConverted
from trainerd.checkpoint.convert.parts import Parts, parts_of
from trainerd.checkpoint.convert.publishing import DCP_METADATA
from trainerd.checkpoint.convert.safetensors_file import read_safetensors
from trainerd.checkpoint.convert.torch_file import read_torch_file
from trainerd.checkpoint.errors import StorageUnusable
from trainerd.checkpoint.layout import RUN_FILE

_LAST_CHECKPOINT = "last_checkpoint"
_TRAINER_STATE = "trainer_state.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_INDICES = tuple(f"{name}.index.json" for name in _WEIGHTS)


def read_source(path: str) -> Parts:
    """The parts of a checkpoint of another program. NotConverted, StorageUnusable."""
    if not os.path.lexists(path):
        raise NotConverted(f"{path} does not exist.")
    try:
        return _read_folder(path) if os.path.isdir(path) else _read_file(path)
    except OSError as error:
        raise StorageUnusable("read", path, error) from error


def source_bytes(path: str) -> int:
    """Bytes of a file, or of the files of a folder."""
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(os.path.getsize(os.path.join(path, name)) for name in os.listdir(path))


def _read_file(path: str) -> Parts:
    if path.endswith(".safetensors"):
        return parts_of(read_safetensors(path), path, "safetensors file")
    return parts_of(read_torch_file(path), path)


def _read_folder(path: str) -> Parts:
    names = set(os.listdir(path))
    if DCP_METADATA in names:
        return parts_of(read_dcp_folder(path), path, "folder of torch.distributed.checkpoint")
    if _LAST_CHECKPOINT in names:
        return _read_file(_last_checkpoint(path))
    if names & {_TRAINER_STATE, *_WEIGHTS, *_INDICES}:
        return _read_hugging_face(path, names)
    if RUN_FILE in names:
        raise NotConverted(f"{path} is a run of trainerd already: `trainerd copy {path} DIR` copies it.")
    raise NotConverted(
        f"{path} is no checkpoint folder that is known: it has no {DCP_METADATA} (torch.distributed.checkpoint), no "
        f"{_LAST_CHECKPOINT} (detectron2, fvcore), no {_TRAINER_STATE} and no {_WEIGHTS[0]} (Hugging Face). Name the "
        f"checkpoint's own file or folder."
    )


def _last_checkpoint(path: str) -> str:
    with open(os.path.join(path, _LAST_CHECKPOINT), encoding="utf-8", errors="replace") as file:
        name = file.read(4096).strip()
    return os.path.join(path, _inside(path, name, _LAST_CHECKPOINT))


def _inside(folder: str, name: Any, told_by: str) -> str:
    if not isinstance(name, str) or not name or os.path.basename(name) != name:
        raise NotConverted(f"{folder}: {told_by} names {name!r}, which is no file of that folder.")
    if not os.path.isfile(os.path.join(folder, name)):
        raise NotConverted(f"{folder} is not whole: {name}, which {told_by} names, is missing.")
    return name


def _read_hugging_face(path: str, names: set[str]) -> Parts:
    parts = Parts("Hugging Face folder", model=_hugging_face_weights(path, names))
    read = {*_WEIGHTS, *_INDICES, "optimizer.pt", "scheduler.pt", "scaler.pt"}
    if _TRAINER_STATE in names:
        state = _json(path, _TRAINER_STATE)
        step = state.get("global_step")
        parts.kind = "Hugging Face Trainer checkpoint"
        parts.step = step if type(step) is int and step >= 0 else None
        parts.rest["trainer_state"] = state
        read.add(_TRAINER_STATE)
    loaded = {name: read_torch_file(os.path.join(path, name)) for name in sorted(names) if _is_state(name)}
    parts.optimizers = [loaded.pop("optimizer.pt")] if "optimizer.pt" in loaded else []
    parts.schedulers = [loaded.pop("scheduler.pt")] if "scheduler.pt" in loaded else []
    parts.grad_scaler = loaded.pop("scaler.pt", None)
    parts.rest |= {os.path.splitext(name)[0]: value for name, value in loaded.items()}
    weights = {name for name in names if name.startswith(("model-", "pytorch_model-"))}
    if unread := sorted(names - read - set(loaded) - weights):
        parts.notes.append(f"these files hold no state of a training and were not read: {', '.join(unread)}")
    return parts


def _is_state(name: str) -> bool:
    is_random = name.startswith("rng_state") and name.endswith(".pth")
    return name in ("optimizer.pt", "scheduler.pt", "scaler.pt") or is_random


def _hugging_face_weights(path: str, names: set[str]) -> dict[str, Any]:
    for whole, index in zip(_WEIGHTS, _INDICES, strict=True):
        read = read_safetensors if whole.endswith(".safetensors") else read_torch_file
        if whole in names:
            return dict(_mapping(read(os.path.join(path, whole)), path, whole))
        if index in names:
            files = _mapping(_json(path, index).get("weight_map"), path, index)
            weights: dict[str, Any] = {}
            for file in sorted({_inside(path, name, index) for name in files.values()}):
                weights |= _mapping(read(os.path.join(path, file)), path, file)
            if missing := sorted(set(files) - set(weights)):
                raise NotConverted(f"{path} is not whole: {index} tells of {missing[0]}, which no file holds.")
            return weights
    raise NotConverted(f"{path} holds no weights: there is no {' and no '.join(_WEIGHTS)}, whole or with an index.")


def _mapping(value: Any, path: str, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise NotConverted(f"{path}: {name} does not hold what its name says.")
    return value


def _json(path: str, name: str) -> dict[str, Any]:
    try:
        with open(os.path.join(path, name), encoding="utf-8") as file:
            return _mapping(json.load(file), path, name)
    except (ValueError, RecursionError) as error:
        raise NotConverted(f"{path}: {name} is no JSON: {error}.") from error
