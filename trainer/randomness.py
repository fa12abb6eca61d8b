"""The random number generators that a training step may draw from, taken as plain values and put back."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

RawStates = tuple[Any, Any, torch.Tensor, list[torch.Tensor]]


def seed_all_rng(seed: int) -> None:
    """Seed every generator that belongs to the state, so that two fresh starts are the same; detectron2's name.

    `seed` is a non-negative integer; NumPy's legacy generator takes its lowest 32 bits.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_raw() -> RawStates:
    """Take every generator's state as cheaply as its library gives it; `to_plain` makes it fit for saving.

    CUDA generators are left out as long as this process has not initialized CUDA: nothing was drawn from them, and
    asking would create a context.
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def to_plain(raw: RawStates) -> dict[str, Any]:
    """Turn raw states into int64 and uint8 CPU tensors and plain numbers."""
    (version, words, gauss), numpy_state, cpu, cuda = raw
    name, keys, position, has_gauss, cached = numpy_state
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(keys.astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch_cpu": cpu,
        "torch_cuda": cuda,
    }


def capture() -> dict[str, Any]:
    """Take Python's `random`, NumPy's legacy global generator, torch's CPU generator and those of all CUDA devices."""
    return to_plain(capture_raw())


def restore(state: Mapping[str, Any]) -> None:
    """Put back what `capture` took; generators of CUDA devices that are not there any more are passed over."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    legacy = state["numpy"]
    keys = legacy["keys"].numpy().astype(np.uint32)
    np.random.set_state((legacy["name"], keys, legacy["position"], legacy["has_gauss"], legacy["cached"]))
    torch.set_rng_state(state["torch_cpu"].cpu())
    devices = torch.cuda.device_count() if state["torch_cuda"] else 0
    for index, cuda in enumerate(state["torch_cuda"][:devices]):
        torch.cuda.set_rng_state(cuda.cpu(), index)


def restore_raw(raw: RawStates) -> None:
    """Put back what `capture_raw` took in this process."""
    python, legacy, cpu, cuda = raw
    random.setstate(python)
    np.random.set_state(legacy)
    torch.set_rng_state(cpu)
    for index, state in enumerate(cuda):
        torch.cuda.set_rng_state(state, index)


def shortfall(state: Mapping[str, Any] | None) -> str:
    """Say why restoring `state` would not bring every generator back; empty when it would."""
    if state is None:
        return "the state holds no random number generators"
    saved, visible = len(state["torch_cuda"]), torch.cuda.device_count() if state["torch_cuda"] else 0
    if saved > visible:
        return f"the state holds the random numbers of {saved} CUDA devices and {visible} are visible"
    return ""
