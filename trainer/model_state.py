"""The model's share of the state: names without wrappers, and a load that refuses whatever does not fit."""

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trainerd.trainer.errors import StateMismatch

SHOWN_NAMES = 20
_WRAPPER_PART = re.compile(r"(^|\.)(?:(?:module|_orig_mod)\.)+")


def _wrappers(model: nn.Module) -> list[tuple[str, str]]:
    """Return (prefix of the wrapped module, what to cut off its end), innermost first."""
    found = []
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (DataParallel, DistributedDataParallel)):
            child = "module."
        elif type(module).__name__ == "OptimizedModule":  # by name: importing torch._dynamo takes a second
            child = "_orig_mod."
        else:
            continue
        found.append((f"{name}.{child}" if name else child, child))
    return sorted(found, key=lambda pair: len(pair[0]), reverse=True)


def without_wrappers(names: list[str], model: nn.Module) -> dict[str, str]:
    """Map every name to the one it has without DataParallel, DistributedDataParallel and torch.compile around it."""
    if not any("module." in name or "_orig_mod." in name for name in names):
        return {name: name for name in names}
    wrappers = _wrappers(model)
    bare = {}
    for name in names:
        short = name
        for prefix, child in wrappers:
            if short.startswith(prefix):
                short = prefix.removesuffix(child) + short[len(prefix) :]
        bare[name] = short
    return bare


def capture(model: nn.Module) -> dict[str, Any]:
    """Return the model's live state under names without wrappers; tied tensors appear under each of their names."""
    live = model.state_dict()
    bare = without_wrappers(list(live), model)
    return {bare[name]: value for name, value in live.items()}


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return every parameter once, with its (first) name without wrappers."""
    named = dict(model.named_parameters())
    return [(short, named[name]) for name, short in without_wrappers(list(named), model).items()]


def named_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return every buffer once, with its (first) name without wrappers."""
    named = dict(model.named_buffers())
    return [(short, named[name]) for name, short in without_wrappers(list(named), model).items()]


def parameter_names(model: nn.Module | None) -> dict[int, str]:
    """Map `id(parameter)` to its (first) name without wrappers."""
    return {} if model is None else {id(parameter): name for name, parameter in named_parameters(model)}


def capture_versions(model: nn.Module) -> dict[str, int]:
    """Return the state version of every module whose version is not 1, by name without wrappers."""
    return {name: version for name, version in _versions(model) if version != 1}


def metadata(model: nn.Module, versions: Mapping[str, int]) -> OrderedDict[str, dict[str, int]]:
    """Return what load_state_dict has to know, or modules would take their state for that of an old version."""
    bare = without_wrappers([f"{name}." for name, _ in model.named_modules() if name], model)
    names = {"": ""} | {name.removesuffix("."): short.removesuffix(".") for name, short in bare.items()}
    return OrderedDict((name, {"version": versions.get(short, 1)}) for name, short in names.items())


def _versions(model: nn.Module) -> list[tuple[str, int]]:
    named = {f"{name}." if name else "": module._version for name, module in model.named_modules()}
    return [(short.removesuffix("."), named[name]) for name, short in without_wrappers(list(named), model).items()]


def fit(model: nn.Module, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved tensors under the model's own names; StateMismatch lists all that does not fit."""
    live = model.state_dict()
    names = {short: name for name, short in without_wrappers(list(live), model).items()}
    saved = _renamed_to(names, saved)
    problems = {
        "missing in the saved state": [name for name in names if name not in saved],
        "unknown to this model": [name for name in saved if name not in names],
        "of another shape": [],
        "of another dtype": [],
    }
    for short in names.keys() & saved.keys():
        old, new = saved[short], live[names[short]]
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
            continue
        if nn.parameter.is_lazy(new) or nn.parameter.is_lazy(old):
            continue
        if old.shape != new.shape:
            problems["of another shape"].append(f"{short} (saved {tuple(old.shape)}, now {tuple(new.shape)})")
        elif old.dtype != new.dtype:
            problems["of another dtype"].append(f"{short} (saved {old.dtype}, now {new.dtype})")
    told = [f"{what}: {shown(sorted(which))}" for what, which in problems.items() if which]
    if told:
        raise StateMismatch(
            f"The saved model does not fit this {type(model).__qualname__}. {'; '.join(told)}. "
            "Build the model that was saved, or begin a new run with this one."
        )
    return {names[short]: value for short, value in saved.items()}


def _renamed_to(names: Mapping[str, str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Find saved names that differ by wrappers of a kind we don't know, as files of other programs have them."""
    unmatched = {_WRAPPER_PART.sub(r"\1", name): name for name in names if name not in saved}
    renamed = {}
    for name, value in saved.items():
        stripped = _WRAPPER_PART.sub(r"\1", name)
        renamed[name if name in names else unmatched.get(stripped, name)] = value
    return renamed


def shown(names: list[str]) -> str:
    """Return the first of many names, and how many more there are."""
    more = f", and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more
