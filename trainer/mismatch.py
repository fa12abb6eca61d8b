"""What happens where a saved state and the code differ: one policy, with an answer for every item."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Action = Literal["error", "warn", "saved", "code"]

# Options such as optimizer.lr; hooks on one side only and settings such as hooks.LRScheduler.T_max; settings such as
# trainer.precision; entries on one side only; software and switches that decide over bits; all that is not named.
ITEMS = ("optimizer", "hooks", "trainer", "entries", "environment", "default")
WHOLE = ("entries", "environment", "default")


@dataclass(frozen=True)
class OnMismatch:
    """The action for each item; a longer name goes before a shorter one, `default` answers for the rest.

    "error" refuses, "warn" takes the saved value and tells, "saved" and "code" take that side's value. Where there is
    nothing to take (a hook without saved state, say), "warn" and "code" go on without it, "saved" refuses.
    """

    actions: Mapping[str, Action]

    @classmethod
    def of(cls, policy: "str | Mapping[str, Any] | OnMismatch") -> "OnMismatch":
        """Read an action for everything, or a table of actions by item.

        ValueError and TypeError name what is wrong and what there is.
        In a table, `{"optimizer": {"lr": "code"}}` is the same as `{"optimizer.lr": "code"}`, and so is the text
        "optimizer.lr=code".
        """
        if isinstance(policy, OnMismatch):
            return policy
        if not isinstance(policy, str | Mapping):
            raise TypeError(f"on_mismatch is an action or a table of actions by item, not {policy!r}")
        table = _of_text(policy) if isinstance(policy, str) else _flat(policy, "")
        for item, action in table.items():
            if item.partition(".")[0] not in ITEMS:
                raise ValueError(f"on_mismatch knows no item {item!r}; there are {', '.join(ITEMS)}")
            if "." in item and item.partition(".")[0] in WHOLE:
                raise ValueError(f"on_mismatch decides about {item.partition('.')[0]} as a whole, not about {item!r}")
            if action not in get_args(Action):
                what = "on_mismatch" if item == "default" else f"on_mismatch for {item}"
                raise ValueError(f'{what} is "error", "warn", "saved" or "code", not {action!r}')
        return cls(table)

    def action(self, item: str) -> Action:
        """Return what to do about `item`, such as "optimizer.lr"."""
        name = item
        while name:
            if name in self.actions:
                return self.actions[name]
            name = name.rpartition(".")[0]
        if item == "environment":
            return "warn"  # another machine is what this is for
        return self.actions.get("default", "error")

    def __str__(self) -> str:
        """Return the text that `of` reads back."""
        if self.actions.keys() == {"default"}:
            return self.actions["default"]
        return ", ".join(f"{item}={action}" for item, action in self.actions.items())


def _of_text(text: str) -> dict[str, Any]:
    if "=" not in text:
        return {"default": text.strip()}
    pairs = [part.partition("=") for part in text.split(",")]
    return {item.strip(): action.strip() for item, _, action in pairs}


def _flat(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
