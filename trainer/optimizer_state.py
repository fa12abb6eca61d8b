"""An optimizer's state matched by parameter name, and put back bit for bit."""

from collections.abc import Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from trainerd.trainer.errors import StateMismatch
from trainerd.trainer.plain_numbers import without_numpy

SHOWN_NAMES = 40
ADDED_BY_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}


def named_optimizers(optimizer: Any) -> dict[str, Any]:
    """Return a trainer's optimizers by name: of a mapping or a sequence each, a single one as ""."""
    if optimizer is None:
        return {}
    if isinstance(optimizer, Mapping):
        return {str(name): one for name, one in optimizer.items()}
    if isinstance(optimizer, list | tuple):
        return {str(index): one for index, one in enumerate(optimizer)}
    return {"": optimizer}


def group_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Name every parameter of every group; `names` maps `id(parameter)` to its name in the model.

    A parameter outside the model has the name that the optimizer was given with it, else its place.
    """
    return [
        [
            names.get(id(parameter)) or _own_name(group, place) or f"(outside the model) {index}.{place}"
            for place, parameter in enumerate(group["params"])
        ]
        for index, group in enumerate(optimizer.param_groups)
    ]


def _own_name(group: Mapping[str, Any], place: int) -> str | None:
    own = group.get("param_names")
    return str(own[place]) if own else None


def capture(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return torch's own state_dict, with `param_names` in every group; tensors are the live ones."""
    state = optimizer.state_dict()
    state["param_groups"] = [
        {**without_numpy(group), "param_names": named}
        for group, named in zip(state["param_groups"], group_names(optimizer, names), strict=True)
    ]
    return state


def check(optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Refuse state of other parameters, another order of them, or another kind of optimizer: StateMismatch.

    State without names (detectron2's form) can only be held against the number of parameters in each group.
    """
    groups = saved["param_groups"]
    if all("param_names" in group for group in groups):
        before, now = [list(group["param_names"]) for group in groups], group_names(optimizer, names)
        if before != now:
            raise StateMismatch(_names_differ(before, now))
    else:
        sizes = [len(group["params"]) for group in groups], [len(g["params"]) for g in optimizer.param_groups]
        if sizes[0] != sizes[1]:
            raise StateMismatch(
                f"The saved optimizer state has groups of {sizes[0]} parameters, this optimizer has {sizes[1]}."
            )
    for group, current in zip(groups, optimizer.param_groups, strict=True):
        lacking = sorted(set(optimizer.defaults) - set(group))
        foreign = sorted(set(group) - set(current) - ADDED_BY_SCHEDULERS - {"param_names"})
        if lacking and foreign:
            raise StateMismatch(
                f"The saved state is of another optimizer than this {type(optimizer).__qualname__}: it lacks the "
                f"options {', '.join(lacking)} and has {', '.join(foreign)}. Build the optimizer that was saved."
            )


def _names_differ(before: list[list[str]], now: list[list[str]]) -> str:
    flat_before, flat_now = list(chain.from_iterable(before)), list(chain.from_iterable(now))
    known_before, known_now = set(flat_before), set(flat_now)
    added = [name for name in flat_now if name not in known_before]
    removed = [name for name in flat_before if name not in known_now]
    if added or removed:
        what = "; ".join(f"{label}: {_shown(names)}" for label, names in (("gone", removed), ("new", added)) if names)
    elif flat_before == flat_now:
        what = f"the groups have {[len(g) for g in before]} parameters saved and {[len(g) for g in now]} now"
    else:
        what = "the order differs"
    return (
        f"The optimizer does not hold the parameters that were saved ({what}), so its state would go to wrong ones. "
        f"Saved: {_shown_groups(before)}. Now: {_shown_groups(now)}. "
        "Hand the optimizer the same parameters in the same order."
    )


def _shown(names: list[str]) -> str:
    more = f", and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def _shown_groups(groups: list[list[str]]) -> str:
    return " | ".join(f"[{_shown(names)}]" for names in groups)


def load(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load state that `check` accepted; tensors keep their saved dtype and bits and lie where torch puts them."""
    own_names = [group.get("param_names") for group in optimizer.param_groups]
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in saved["param_groups"]]
    optimizer.load_state_dict({**saved, "param_groups": groups})
    # torch refuses a later add_param_group when some groups have names and others don't: leave it as it was built.
    for group, own in zip(optimizer.param_groups, own_names, strict=True):
        if own is not None:
            group["param_names"] = own
    places = chain.from_iterable(group["params"] for group in groups)
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for place, parameter in zip(places, parameters, strict=True):
        if place in saved["state"] and parameter in optimizer.state:
            optimizer.state[parameter] = _exact(saved["state"][place], optimizer.state[parameter])


def _exact(saved: Any, loaded: Any) -> Any:
    """Undo torch's casts: `loaded` decides the device and the container, `saved` every value."""
    if isinstance(saved, torch.Tensor):
        if not isinstance(loaded, torch.Tensor) or loaded.shape != saved.shape:
            return loaded  # the optimizer converts its own state, an older form of it for example
        return saved.detach().to(device=loaded.device, copy=True)
    if isinstance(saved, Mapping) and isinstance(loaded, dict):
        for key in loaded.keys() & saved.keys():
            loaded[key] = _exact(saved[key], loaded[key])
        return loaded
    if isinstance(saved, list) and isinstance(loaded, list) and len(saved) == len(loaded):
        return [_exact(one, other) for one, other in zip(saved, loaded, strict=True)]
    if isinstance(saved, tuple) and isinstance(loaded, tuple) and len(saved) == len(loaded):
        return type(saved)(_exact(one, other) for one, other in zip(saved, loaded, strict=True))
    # torch turns strings into the text of a generator; integers that became a step tensor stay converted.
    return loaded if isinstance(loaded, torch.Tensor) else deepcopy(saved)
