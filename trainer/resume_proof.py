"""Fingerprints of what comes next, saved with a checkpoint and computed again from the objects after a resume.

They prove what a successful load only suggests: that the parameters, the random streams and the next batch's samples
are those that would have come without the interruption.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from torch import nn

from trainerd.checkpoint import codec
from trainerd.trainer import model_state

Fingerprints = dict[str, str]

WORDS = {
    "parameters": "the parameters and buffers are not those that were saved",
    "rng": "the random streams are not those that were saved",
    "samples": "the next batch is made of other samples than the one that would have come",
}


def fingerprints(model: nn.Module | None, rng: Mapping[str, Any], samples: Sequence[int] | None) -> Fingerprints:
    """Return a 128-bit xxh3, in hexadecimal, of each part that is known; the model is read whole once."""
    parts: dict[str, Any] = {"rng": rng}
    if model is not None:
        parts["parameters"] = model_state.capture(model)
    if samples is not None:
        parts["samples"] = list(samples)
    return {name: fingerprint(part) for name, part in parts.items()}


def broken(saved: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return for every part whose fingerprint differs what that means, in words."""
    return {part: WORDS[part] for part in WORDS if part in saved and part in now and saved[part] != now[part]}


def fingerprint(value: Any) -> str:
    """Return the hash of everything that a value is: types, keys, shapes, and the bytes of its tensors."""
    tree, leaves = codec.encode(value)
    state = xxhash.xxh3_128(repr(tree).encode())
    for name, leaf in leaves.items():
        state.update(f"{name} {leaf.dtype} {leaf.shape}".encode())
        state.update(leaf.memory())
    return state.hexdigest()
