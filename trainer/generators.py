"""Random generator objects of the user's own, registered with a trainer so that they belong to its state."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

Generator = np.random.Generator | np.random.RandomState | random.Random | torch.Generator


def check(name: str, generator: object) -> None:
    """TypeError for what is no generator that can be saved."""
    if not isinstance(generator, Generator) or isinstance(generator, random.SystemRandom):
        raise TypeError(
            f"register_rng({name!r}, ...) takes a numpy.random.Generator, numpy.random.RandomState, random.Random or "
            f"torch.Generator; {type(generator).__qualname__} is none of them. The global generators are saved anyway."
        )


def capture(generators: Mapping[str, Generator]) -> dict[str, Any]:
    """Return the state of every generator by name, as plain values and CPU tensors."""
    return {name: _capture(generator) for name, generator in generators.items()}


def restore(generators: Mapping[str, Generator], saved: Mapping[str, Any]) -> None:
    """Put back every generator that was saved and is registered."""
    for name in generators.keys() & saved.keys():
        _restore(generators[name], saved[name])


def differences(generators: Mapping[str, Generator], saved: Mapping[str, Any]) -> list[str]:
    """Name the generators that exist on one side only, or are of another kind than the one that was saved."""
    told = [f"the saved random generator {name!r} is not registered" for name in saved if name not in generators]
    told += [f"the random generator {name!r} has no saved state" for name in generators if name not in saved]
    told += [
        f"the random generator {name!r} was a {saved[name]['kind']} and is a {_kind(generators[name])}"
        for name in generators
        if name in saved and saved[name]["kind"] != _kind(generators[name])
    ]
    return told


def _kind(generator: Generator) -> str:
    if isinstance(generator, np.random.Generator):
        return f"numpy Generator ({type(generator.bit_generator).__name__})"
    device = f" on {generator.device.type}" if isinstance(generator, torch.Generator) else ""
    return f"{type(generator).__module__.partition('.')[0]} {type(generator).__name__}{device}"


def _capture(generator: Generator) -> dict[str, Any]:
    if isinstance(generator, np.random.Generator):
        state = _plain(generator.bit_generator.state)
        # How many children `spawn` has made: the next one is another.
        state["children"] = getattr(generator.bit_generator.seed_seq, "n_children_spawned", 0)
    elif isinstance(generator, np.random.RandomState):
        state = _plain(generator.get_state(legacy=False))
    elif isinstance(generator, torch.Generator):
        state = generator.get_state()
    else:
        version, words, gauss = generator.getstate()
        state = {"version": version, "words": list(words), "gauss": gauss}
    return {"kind": _kind(generator), "state": state}


def _restore(generator: Generator, saved: Mapping[str, Any]) -> None:
    state = saved["state"]
    if saved["kind"] != _kind(generator):
        return
    if isinstance(generator, np.random.Generator):
        seeds: Any = generator.bit_generator.seed_seq
        missing = state.get("children", 0) - getattr(seeds, "n_children_spawned", 0)
        if missing > 0:
            seeds.spawn(missing)
        generator.bit_generator.state = _from_plain({key: value for key, value in state.items() if key != "children"})
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_from_plain(state))
    elif isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    else:
        generator.setstate((state["version"], tuple(state["words"]), state["gauss"]))


def _plain(value: Any) -> Any:
    """NumPy's nested states, whose arrays become their type and a list of Python integers."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"array": str(value.dtype), "values": value.tolist()}
    return value.item() if isinstance(value, np.generic) else value


def _from_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "array" in value:
            return np.array(value["values"], dtype=value["array"])
        return {key: _from_plain(item) for key, item in value.items()}
    return value
