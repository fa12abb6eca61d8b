"""What the code set: options of optimizers, settings of hooks and of the trainer, compared between two builds of it.

Recorded as built, before training moves a learning rate. So a schedule is no difference and an edit of the code is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainerd.trainer import hook_state
from trainerd.trainer.errors import StateMismatch
from trainerd.trainer.mismatch import Action, OnMismatch
from trainerd.trainer.optimizer_state import named_optimizers
from trainerd.trainer.plain_numbers import without_numpy

if TYPE_CHECKING:
    from trainerd.trainer.base import HookBase, TrainerBase

Values = dict[str, Any]

SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Difference:
    """One setting that was another when the checkpoint's code built it."""

    place: str  # "optimizer.param_groups.0.lr", "hooks.LRScheduler.T_max"
    item: str  # as on_mismatch names it: "optimizer.lr"
    saved: Any
    code: Any

    @property
    def is_class(self) -> bool:
        """Whether it is another class, which cannot be set: only the code's can count."""
        return self.place.rpartition(".")[2] in ("class", "classes")


@dataclass(frozen=True)
class Decision:
    """A difference, and whose value is taken."""

    difference: Difference
    action: Action

    @property
    def value(self) -> Any:
        """The value that counts from now on."""
        return self.difference.code if self.action == "code" else self.difference.saved


def capture(trainer: "TrainerBase", hooks: Sequence["HookBase"]) -> Values:
    """Return every setting by its place, as plain values; what is not plain (functions, large tensors) is left out."""
    values: Values = {}
    for prefix, group in _groups(getattr(trainer, "optimizer", None)):
        # A scheduler moves `lr`, and keeps what it was built with as `initial_lr`.
        options = {**group, "lr": group.get("initial_lr", group["lr"])} if "lr" in group else group
        skipped = ("params", "param_names", "initial_lr")
        values |= {f"{prefix}.{name}": value for name, value in options.items() if name not in skipped}
    for name, one in named_optimizers(getattr(trainer, "optimizer", None)).items():
        values[".".join(filter(None, ("optimizer", name, "class")))] = type(one).__qualname__
    for key, hook in hook_state.numbered(hooks).items():
        values |= {f"hooks.{key}.{name}": value for name, value in hook.hyperparameters().items()}
    values |= {f"trainer.{name}": value for name, value in trainer.hyperparameters().items()}
    plain = {place: _plain(value) for place, value in values.items()}
    return {place: value for place, value in plain.items() if value is not _NOT_PLAIN}


def differences(saved: Mapping[str, Any], code: Mapping[str, Any]) -> list[Difference]:
    """Return the settings that both sides have with different values."""
    return [
        Difference(place, _item(place), saved[place], code[place])
        for place in code
        if place in saved and not _same(_plain(saved[place]), code[place])
    ]


def decide(found: Sequence[Difference], policy: OnMismatch) -> list[Decision]:
    """Apply the policy; StateMismatch, with all refused ones and both values of each, if it refuses one."""
    decisions = [Decision(difference, _possible(policy.action(difference.item), difference)) for difference in found]
    if refused := [decision.difference for decision in decisions if decision.action == "error"]:
        text = "; ".join(f"{one.place} (saved {_short(one.saved)}, code {_short(one.code)})" for one in refused)
        example = refused[0].item
        raise StateMismatch(
            f"The code sets other values than the saved state was built with: {text}. Set them back, or say per item "
            f'whose value counts with on_mismatch, such as {example}=saved or {example}=code (or "saved" for all).'
        )
    return decisions


def _possible(action: Action, found: Difference) -> Action:
    if not found.is_class:
        return action
    return "error" if action in ("error", "saved") else "code"


def table(decisions: Sequence[Decision]) -> str:
    """Return a table of places, both values and whose is taken, one line each."""
    rows = [("setting", "saved", "code", "taken")]
    for decision in decisions:
        found = decision.difference
        taken = "code" if decision.action == "code" else "saved"
        rows.append((found.place, _short(found.saved), _short(found.code), taken))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  " + "  ".join([*map(str.ljust, row, widths), row[3]]) for row in rows)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def apply(decisions: Sequence[Decision], trainer: "TrainerBase", hooks: Sequence["HookBase"]) -> None:
    """Set what was decided; a state that was loaded before has set all saved options of optimizers already."""
    if not decisions:
        return
    chosen = {decision.difference.place: decision for decision in decisions}
    # All values before any is set: groups may share one tensor as their rate.
    options = [
        (group, name, _moved(group[name], decision.difference))
        for prefix, group in _groups(getattr(trainer, "optimizer", None))
        for option in list(group)
        if (decision := chosen.get(f"{prefix}.{option}")) is not None and decision.action == "code"
        for name in ((option, "initial_lr") if option == "lr" and "initial_lr" in group else (option,))
    ]
    for group, name, value in options:
        if isinstance(group[name], torch.Tensor):
            group[name].fill_(value)
        else:
            group[name] = value
    new_rates = any(decision.difference.item == "optimizer.lr" for decision in decisions if decision.action == "code")
    for key, hook in hook_state.numbered(hooks).items():
        if values := _below(f"hooks.{key}.", chosen):
            hook.take_hyperparameters(values)
        if new_rates:
            hook.take_rates()
    if values := _below("trainer.", chosen):
        trainer.take_hyperparameters(values)


def _below(prefix: str, chosen: Mapping[str, Decision]) -> Values:
    return {
        place.removeprefix(prefix): decision.value
        for place, decision in chosen.items()
        if place.startswith(prefix) and not decision.difference.is_class
    }


def _groups(optimizer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, one in named_optimizers(optimizer).items():
        if isinstance(one, torch.optim.Optimizer):
            for index, group in enumerate(one.param_groups):
                yield ".".join(filter(None, ("optimizer", name, "param_groups", str(index)))), group


def _moved(now: Any, found: Difference) -> Any:
    """Return the code's value; where a schedule has moved the saved one meanwhile, moved in the same proportion."""
    current, value = _plain(now), found.code
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (value, found.saved, current))
    if numbers and found.saved and current != found.saved:
        return current * (value / found.saved)
    return tuple(value) if isinstance(now, tuple) else value


def _item(place: str) -> str:
    """Parameter groups have one item together."""
    root, *parts = place.split(".")
    return f"optimizer.{parts[-1]}" if root == "optimizer" else place


def _same(one: Any, other: Any) -> bool:
    """Equal as numbers, so 0 is 0.0; and a NaN equals itself."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other or (one != one and other != other))


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    value = without_numpy(value)
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else _NOT_PLAIN
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return _NOT_PLAIN if any(item is _NOT_PLAIN for item in items) else items
    if isinstance(value, Mapping):
        pairs = {str(key): _plain(item) for key, item in value.items()}
        return _NOT_PLAIN if any(item is _NOT_PLAIN for item in pairs.values()) else pairs
    return value if value is None or isinstance(value, bool | int | float | str) else _NOT_PLAIN
