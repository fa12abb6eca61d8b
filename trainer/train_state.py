"""What the whole state of a trainer is, and the part of it that lives in objects.

Whole means: `iteration` and `step`, `model` with `model_versions` and `model_modes`, `gradients` if an iteration of the
user's own may need them again, `optimizer` (of several, each by its name), `grad_scaler`, `hooks` with `hook_modules`,
`events`, `late_metrics`, `data`, `rng`, `generators`, and what to hold against the code at resume: `hyperparameters`
and `environment`; a checkpoint adds `fingerprints`. A trainer that lacks one of these lacks the entry. A state without
`events` was taken before any training began; one without `step` is in detectron2's form, whose `iteration` is the
finished one.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainerd.trainer import generators, gradients, hook_state, model_modes, model_state, optimizer_state, randomness
from trainerd.trainer.data_position import DataPosition, Grade
from trainerd.trainer.errors import StateMismatch
from trainerd.trainer.model_state import shown
from trainerd.trainer.optimizer_state import named_optimizers

if TYPE_CHECKING:
    from trainerd.trainer.base import HookBase


logger = logging.getLogger(__name__)


def step_of(state: Mapping[str, Any]) -> int:
    """Return the number of completed iterations that a saved state stands for."""
    if "step" in state:
        return int(state["step"])
    return int(state["iteration"]) + 1


def taken_before_training(state: Mapping[str, Any]) -> bool:
    """Say whether a state was taken before `before_train` ever ran, so that it must be put back before it runs."""
    return "rng" in state and "events" not in state


def left_out(trainer: object, hooks: Sequence["HookBase"]) -> list[str]:
    """Name the attributes of a trainer with state of their own that its state does not hold.

    A subclass with a `state_dict` of its own knows what it needs, and so does a hook that holds the object; for any
    other, only `model` and `optimizer` are saved.
    """
    if not type(trainer).state_dict.__module__.startswith("trainerd.trainer."):  # type: ignore[attr-defined]
        return []
    model = getattr(trainer, "model", None)
    covered = {id(one) for one in named_optimizers(getattr(trainer, "optimizer", None)).values()}
    covered.add(id(getattr(trainer, "grad_scaler", None)))
    covered |= {id(value) for hook in filter(hook_state.is_stateful, hooks) for value in vars(hook).values()}
    # Our own LRScheduler saves a scheduler that it finds at the trainer.
    covered |= {id(getattr(hook, "scheduler", None)) for hook in hooks if hasattr(type(hook), "scheduler")}
    covered |= {id(module) for module in model.modules()} if isinstance(model, torch.nn.Module) else set()
    stateful = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
    found = [
        f"{name} ({type(value).__qualname__})"
        for name, value in _with_items(vars(trainer))
        if isinstance(value, stateful) and id(value) not in covered and value.state_dict()
    ]
    if outside := _outside(getattr(trainer, "optimizer", None), model):
        found.append(f"{outside} parameters of the optimizer that are none of the model's")
    return found


def _outside(optimizer: Any, model: Any) -> int:
    if not isinstance(model, torch.nn.Module):
        return 0
    inside = {id(parameter) for parameter in model.parameters()}
    groups = [group for one in named_optimizers(optimizer).values() for group in getattr(one, "param_groups", ())]
    return sum(id(parameter) not in inside for group in groups for parameter in group["params"])


def _with_items(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in attributes.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
        elif isinstance(value, list | tuple) and name != "_hooks":
            yield from ((f"{name}[{index}]", item) for index, item in enumerate(value))


@dataclass(frozen=True)
class Parts:
    """The objects of a trainer that have state."""

    model: torch.nn.Module | None
    optimizer: Any
    grad_scaler: Any
    hooks: Sequence["HookBase"]
    data: DataPosition | None
    generators: Mapping[str, generators.Generator]
    keeps_gradients: bool

    def capture(self, waiting: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the state of model, optimizers and hooks, with live tensors.

        Hooks get `waiting` once more when training begins; until then that is their state, whatever they say.
        """
        state: dict[str, Any] = {}
        if self.model is not None:
            state["model"] = model_state.capture(self.model)
            state["model_versions"] = model_state.capture_versions(self.model)
            state["model_modes"] = model_modes.capture(self.model)
            if self.keeps_gradients:
                state["gradients"] = gradients.capture(self.model)
        if self.optimizer is not None:
            names = model_state.parameter_names(self.model)
            each = {name: _optimizer_state(one, names) for name, one in named_optimizers(self.optimizer).items()}
            state["optimizer"] = each.get("", each)
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        states, state["hook_modules"] = hook_state.collect(self.hooks)
        if waiting is not None:
            states |= {key: saved for key, _, saved in self._matching(waiting).pairs}
        state["hooks"] = {key: states[key] for key in state["hook_modules"] if key in states}
        return state

    def missing_entries(self, state: Mapping[str, Any]) -> list[str]:
        """Name the entries that exist on one side only, in `state` or here."""
        here = {
            "model": self.model is not None,
            "optimizer": self.optimizer is not None,
            "grad_scaler": self.grad_scaler is not None,
            "data": self.data is not None,
        }
        told = [f"the saved {name} entry has no counterpart" for name in here if name in state and not here[name]]
        if "step" in state:
            told += [f"the {name} has no saved state" for name in here if here[name] and name not in state]
            told += generators.differences(self.generators, state.get("generators", {}))
        if self.data is not None and "data" in state:
            told += filter(None, [self.data.mismatch(state["data"])])
        return told

    def missing_hooks(self, state: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the keys of hooks whose state exists on one side only, each with what is said of it."""
        return self._matching(state).left_over

    def load(self, state: Mapping[str, Any], *, last: bool = False) -> None:
        """Load model, optimizers and hooks; what can be refused is refused before anything is touched.

        Unless it is the `last` time, a hook that builds what it needs in `before_train` may fail.
        """
        matching = self._matching(state)
        fitted = None
        if self.model is not None and "model" in state:
            fitted = OrderedDict(model_state.fit(self.model, state["model"]))
            if "model_versions" in state:
                fitted._metadata = model_state.metadata(self.model, state["model_versions"])  # type: ignore[attr-defined]
        optimizers = self._fitting_optimizers(state)
        if self.model is not None and fitted is not None:
            self.model.load_state_dict(fitted)
            if "gradients" in state:
                gradients.restore(self.model, state["gradients"])
            if "model_modes" in state and (changed := model_modes.restore(self.model, state["model_modes"])):
                logger.info("set as it was saved, other than the code left it: %s", shown(changed))
        # Before the optimizer: loading a scheduler may write learning rates, and the saved ones have the last word.
        hook_state.load(matching, last=last)
        for one, saved in optimizers:
            if isinstance(one, torch.optim.Optimizer):
                optimizer_state.load(one, saved)
            else:
                one.load_state_dict(saved)
        if self.grad_scaler is not None and state.get("grad_scaler"):  # that of a disabled scaler is empty
            self.grad_scaler.load_state_dict(state["grad_scaler"])

    def _fitting_optimizers(self, state: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        """Pair every optimizer with its saved state; StateMismatch if they are not the ones that were saved."""
        if self.optimizer is None or "optimizer" not in state:
            return []
        here = named_optimizers(self.optimizer)
        # Only the state of torch's own kind tells by its form that it is of one optimizer.
        foreign = "" in here and not isinstance(here[""], torch.optim.Optimizer)
        saved = {"": state["optimizer"]} if foreign or _is_of_one(state["optimizer"]) else state["optimizer"]
        if saved.keys() != here.keys():
            raise StateMismatch(
                f"The saved state has {_counted(saved)}, this trainer has {_counted(here)}. "
                "Build the optimizers that were saved, under the same names."
            )
        names = model_state.parameter_names(self.model)
        for name, one in here.items():
            if isinstance(one, torch.optim.Optimizer):
                optimizer_state.check(one, saved[name], names)
        return [(one, saved[name]) for name, one in here.items()]

    def fitting_data(self, state: Mapping[str, Any]) -> DataPosition | None:
        """Return the data position if it can take the saved one."""
        if self.data is None or "data" not in state or self.data.mismatch(state["data"]):
            return None
        return self.data

    def grade(self, state: Mapping[str, Any], trainer_name: str) -> tuple[Grade, str]:
        """Return how exactly `state` continues here, and why not higher."""
        if self.data is None:
            return "position only", f"{trainer_name} keeps no data position"
        if self.fitting_data(state) is None:
            return "position only", "no data position for this loader was saved, so the data starts over"
        grade, reason = self.data.grade()
        lost = randomness.shortfall(state.get("rng"))
        return ("same data", lost) if lost and grade == "bitwise" else (grade, reason)

    def _matching(self, state: Mapping[str, Any]) -> hook_state.Matching:
        return hook_state.match(self.hooks, state.get("hooks", {}), state.get("hook_modules"))


def _optimizer_state(optimizer: Any, names: Mapping[int, str]) -> Any:
    by_name = isinstance(optimizer, torch.optim.Optimizer)
    return optimizer_state.capture(optimizer, names) if by_name else optimizer.state_dict()


def _is_of_one(saved: Mapping[str, Any]) -> bool:
    return "param_groups" in saved and "state" in saved


def _counted(optimizers: Mapping[str, Any]) -> str:
    return "one optimizer" if "" in optimizers else f"the optimizers {', '.join(optimizers) or '(none)'}"
