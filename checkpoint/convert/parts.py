"""What a foreign checkpoint consists of, told by the keys that each program gives it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trainerd.checkpoint.convert.errors import NotConverted

_MODEL = ("model", "state_dict", "model_state_dict")
_OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict")
_SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")
_SCALER = ("grad_scaler", "scaler", "scaler_state_dict")


@dataclass
class Parts:
    """The parts that a trainer of ours knows, and the `rest`. `step` counts completed iterations; None: not told.

    `whole` is a state of our own trainer, which needs no mapping.
    """

    kind: str
    model: Mapping[str, Any] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    hooks: dict[str, Any] = field(default_factory=dict)
    grad_scaler: Any = None
    step: int | None = None
    rest: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    whole: dict[str, Any] | None = None


def parts_of(values: Any, place: str, kind: str = "torch.save file") -> Parts:
    """Find the parts of what a file holds. NotConverted if there are no weights in it."""
    if not isinstance(values, Mapping):
        raise NotConverted(f"{place} holds a {type(values).__qualname__}; a dict with the model's weights is needed.")
    if set(values) == {"app"} and isinstance(values["app"], Mapping):
        values = values["app"]  # as the tutorial of torch.distributed.checkpoint has it
    if _is_ours(values):
        return Parts("state of trainerd's trainer", model=values["model"], step=values["step"], whole=dict(values))
    if "pytorch-lightning_version" in values or {"state_dict", "global_step"} <= set(values):
        parts = _lightning(dict(values))
    elif is_weights(values):
        parts = Parts(kind if kind != "torch.save file" else "file of weights", model=values)
    else:
        parts = _named(dict(values), kind)
    if not is_weights(parts.model):
        raise NotConverted(
            f"{place} holds no model's weights where they are looked for ({', '.join(_MODEL)}). It has the keys "
            f"{', '.join(map(str, list(values)[:20])) or '(none)'}."
        )
    return parts


def _is_ours(values: Mapping[str, Any]) -> bool:
    """Whether it counts iterations in both of our ways: the finished one, and how many were completed."""
    iteration, step = _count(values.get("iteration")), _count(values.get("step"))
    return iteration is not None and step in (iteration, iteration + 1) and is_weights(values.get("model"))


def is_weights(value: Any) -> bool:
    """Whether a value is what `model.state_dict()` returns: names, and tensors but for extra state."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    # Extra state that modules may add is rare, so most are tensors; `{"model": ..., "loss": tensor(0.1)}` is not that.
    tensors = sum(isinstance(item, torch.Tensor) for item in value.values())
    return 2 * tensors > len(value)


def _lightning(rest: dict[str, Any]) -> Parts:
    parts = Parts("Lightning checkpoint", model=rest.pop("state_dict"), step=_count(rest.pop("global_step", None)))
    parts.optimizers = _list(rest.pop("optimizer_states", None))
    parts.schedulers = _list(rest.pop("lr_schedulers", None))
    parts.grad_scaler = rest.pop("MixedPrecision", None)
    if len(parts.optimizers) > 1:
        parts.notes.append(
            f"global_step counts the steps of all {len(parts.optimizers)} optimizers; if your iterations are fewer, "
            f"say which one it is: --step"
        )
    parts.rest = rest
    return parts


def _named(rest: dict[str, Any], kind: str) -> Parts:
    """As fvcore's Checkpointer and most scripts save it; detectron2 adds its trainer."""
    # Both count the iteration that was finished last, from 0.
    iteration = _count(rest.pop("iteration", None))
    parts = Parts(kind, step=None if iteration is None else iteration + 1)
    if kind == "torch.save file" and iteration is not None:
        parts.kind = "detectron2 or fvcore checkpoint"
    parts.model = _taken(rest, _MODEL) or {}
    optimizer, scheduler = _taken(rest, _OPTIMIZER), _taken(rest, _SCHEDULER)
    parts.grad_scaler = _taken(rest, _SCALER)
    trainer = rest.get("trainer")
    if isinstance(trainer, Mapping) and "iteration" in trainer:
        outer = dict(rest.pop("trainer"))
        inner = dict(outer.pop("_trainer", {}))
        finished = _count(outer.pop("iteration"))
        if parts.step is None and finished is not None:
            parts.step = finished + 1
        parts.hooks = {**outer.pop("hooks", {}), **inner.pop("hooks", {})}
        inner.pop("iteration", None)
        left = {**outer, **inner}
        optimizer = left.pop("optimizer", None) or optimizer
        parts.grad_scaler = left.pop("grad_scaler", None) or parts.grad_scaler
        if left:
            rest["trainer"] = left
    parts.optimizers = [optimizer] if optimizer else []
    parts.schedulers = [scheduler] if scheduler else []
    parts.rest = rest
    return parts


def _taken(rest: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((rest.pop(name) for name in names if name in rest), None)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
