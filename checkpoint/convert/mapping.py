"""Parts of a foreign checkpoint → a state that our trainer resumes from. What has no place there goes to `imported`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainerd.checkpoint.convert.parts import Parts
from trainerd.checkpoint.tensor_values import memory_of

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_WRAPPERS = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class Mapped:
    """A state, what it carries over and what lies under `imported`, in words for the user."""

    state: dict[str, Any]
    carried: tuple[str, ...]
    kept: tuple[str, ...]
    notes: tuple[str, ...]


def to_state(parts: Parts, step: int) -> Mapped:
    """The state of our trainer at `step`; `docs/convert.md` says what becomes of each part."""
    iteration = max(step - 1, 0)
    if parts.whole is not None:
        state = dict(parts.whole)
        if step != parts.step:
            state |= {"iteration": iteration, "step": step}
        if numbered := _by_number(state.get("optimizer")):
            state["optimizer"] = numbered
        return Mapped(state, ("the whole state",), (), tuple(parts.notes))
    notes, rest = list(parts.notes), dict(parts.rest)
    model = _unwrapped(parts.model, notes)
    state = {"iteration": iteration, "step": step, "model": model}
    carried = [f"model ({len(model)} entries)"]
    if versions := _versions(parts.model):
        state["model_versions"] = versions
    _map_optimizers(parts.optimizers, model, state, rest, carried, notes)
    if parts.grad_scaler:
        state["grad_scaler"] = parts.grad_scaler
        carried.append("grad_scaler")
    state["hooks"] = dict(parts.hooks)
    _map_schedulers(parts.schedulers, step, state["hooks"], rest, notes)
    if state["hooks"]:
        carried.append(f"hooks ({', '.join(state['hooks'])})")
    if rest:
        state["imported"] = rest
    return Mapped(state, tuple(carried), tuple(map(str, rest)), tuple(notes))


def _unwrapped(model: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    found = dict(model)
    while prefix := next((one for one in _WRAPPERS if all(name.startswith(one) for name in found)), ""):
        found = {name[len(prefix) :]: value for name, value in found.items()}
        notes.append(f"every name of the model began with {prefix!r}, which was taken off")
    return found


def _versions(model: Mapping[str, Any]) -> dict[str, int]:
    """The state versions of modules, which torch keeps beside the weights."""
    told = getattr(model, "_metadata", None)
    if not isinstance(told, Mapping):
        return {}
    versions = {name: entry.get("version") for name, entry in told.items() if isinstance(entry, Mapping)}
    return {name: number for name, number in versions.items() if type(number) is int and number != 1}


def _map_optimizers(
    optimizers: list[Any],
    model: Mapping[str, Any],
    state: dict[str, Any],
    rest: dict[str, Any],
    carried: list[str],
    notes: list[str],
) -> None:
    if not optimizers:
        return
    found = [_by_number(one) for one in optimizers]
    if None in found:
        rest["optimizers"] = optimizers
        notes.append("the optimizer's state is not in torch's form, so it was not put to use")
        return
    if len(found) == 1:
        [only] = found
        assert only is not None
        state["optimizer"] = _named(only, model)
        by_name = all("param_names" in group for group in state["optimizer"]["param_groups"])
    else:
        state["optimizer"] = {str(index): one for index, one in enumerate(found)}
        by_name = False
    carried.append(f"optimizer ({'by parameter name' if by_name else 'by position'})")
    if not by_name:
        notes.append(
            "which parameter each optimizer state belongs to is told by position alone, as torch itself does it: build "
            "the optimizer with the same groups in the same order"
        )


def _by_number(optimizer: Any) -> dict[str, Any] | None:
    """The state in torch's form, parameters by number; None if it is in no form that is known."""
    if not isinstance(optimizer, Mapping) or not isinstance(optimizer.get("state"), Mapping):
        return None
    groups = optimizer.get("param_groups")
    if not isinstance(groups, list) or not all(
        isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups
    ):
        return None
    names = [name for group in groups for name in group["params"]]
    saved = optimizer["state"]
    if names and all(isinstance(name, str) for name in names):  # as torch.distributed.checkpoint.state_dict has it
        numbers = {name: number for number, name in enumerate(names)}
        if not set(saved) <= set(numbers):
            return None
        groups = [
            {**group, "params": [numbers[n] for n in group["params"]], "param_names": group["params"]}
            for group in groups
        ]
        saved = {numbers[name]: value for name, value in saved.items()}
    elif all(isinstance(key, str) and key.isdecimal() for key in saved):  # the format had text for keys
        saved = {int(key): value for key, value in saved.items()}
    return {**optimizer, "state": dict(saved), "param_groups": [dict(group) for group in groups]}


def _named(optimizer: dict[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """The state with the names of its parameters, if there is only one way to name them."""
    groups = optimizer["param_groups"]
    if len(groups) != 1 or "param_names" in groups[0]:
        return optimizer
    # In one group, parameters stand in the order of the model, and so do the entries of its state.
    names = _parameters(model)
    places = groups[0]["params"]
    fits = len(names) == len(places) and all(
        _fits(optimizer["state"].get(place, {}), model[name]) for place, name in zip(places, names, strict=True)
    )
    return {**optimizer, "param_groups": [{**groups[0], "param_names": names}]} if fits else optimizer


def _parameters(model: Mapping[str, Any]) -> list[str]:
    """The entries that can be parameters, tied ones by their first name."""
    first: dict[Any, str] = {}
    for name, value in model.items():
        if isinstance(value, torch.Tensor) and name.rpartition(".")[2] not in _BUFFERS:
            first.setdefault(memory_of(value) if value.numel() else name, name)
    return list(first.values())


def _fits(saved: Any, parameter: torch.Tensor) -> bool:
    tensors = [item for item in saved.values() if isinstance(item, torch.Tensor) and item.dim()]
    return not tensors or any(item.shape == parameter.shape for item in tensors)


def _map_schedulers(
    schedulers: list[Any], step: int, hooks: dict[str, Any], rest: dict[str, Any], notes: list[str]
) -> None:
    """A scheduler that stepped once per iteration is what our LRScheduler hook drives; others are of another clock."""
    for index, one in enumerate(schedulers):
        stepped = one.get("last_epoch") if isinstance(one, Mapping) else None
        if stepped == step and "LRScheduler" not in rest:
            hooks["LRScheduler" if not index else f"LRScheduler#{index + 1}"] = dict(one)
            continue
        rest.setdefault("schedulers", []).append(one)
        notes.append(
            f"a learning rate scheduler stepped {stepped} times in {step} iterations, and the LRScheduler hook steps "
            f"one in every iteration: it was not put to use"
        )
