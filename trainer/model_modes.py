"""What a model is set to beside its tensors: which parameters are frozen, which modules are in evaluation mode.

A hook that freezes layers at some iteration would not run again after a resume; so this belongs to the state.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainerd.trainer.model_state import named_parameters, without_wrappers


def capture(model: nn.Module) -> dict[str, list[str]]:
    """Return the names, without wrappers, of frozen parameters and of modules in evaluation mode ("" is the model)."""
    return {
        "frozen": sorted({name for name, parameter in named_parameters(model) if not parameter.requires_grad}),
        "evaluating": sorted({name for name, module in _modules(model) if not module.training}),
    }


def restore(model: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """Set the model as it was saved; return what that changed, in words."""
    frozen, evaluating = set(saved["frozen"]), set(saved["evaluating"])
    changed = []
    for name, parameter in named_parameters(model):
        if parameter.requires_grad == (name in frozen):
            parameter.requires_grad_(name not in frozen)
            changed.append(f"{name} {'frozen' if name in frozen else 'trained'}")
    for name, module in _modules(model):
        if module.training == (name in evaluating):
            module.training = name not in evaluating
            changed.append(f"{name or 'the model'} in {'evaluation' if name in evaluating else 'training'} mode")
    return changed


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    # With a dot at the end a wrapped module's own name is seen as what lies below the wrapper, too.
    named = {f"{name}." if name else "": module for name, module in model.named_modules()}
    return [(short.removesuffix("."), named[name]) for name, short in without_wrappers(list(named), model).items()]
