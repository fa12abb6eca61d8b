"""Which hook a piece of saved state belongs to: keys `Name`, `Name#2`, ... and the module each class came from."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from trainerd.checkpoint import codec
from trainerd.trainer.errors import HookStateError
from trainerd.trainer.hook_base import HookBase


def overrides(hook: HookBase, method: str) -> bool:
    """Say whether a hook, its class or itself, has a method of its own."""
    return getattr(getattr(hook, method), "__func__", None) is not getattr(HookBase, method)


def is_stateful(hook: HookBase) -> bool:
    """Say whether a hook can give and take state."""
    return overrides(hook, "state_dict") and overrides(hook, "load_state_dict")


def check_hook(hook: HookBase) -> None:
    """Refuse a hook that could not be resumed: TypeError names its class."""
    gives, takes = overrides(hook, "state_dict"), overrides(hook, "load_state_dict")
    if gives != takes:
        has, lacks = ("state_dict", "load_state_dict") if gives else ("load_state_dict", "state_dict")
        raise TypeError(
            f"The hook {type(hook).__module__}.{type(hook).__qualname__} defines {has} but not {lacks}, so it could "
            "not be resumed. Define both, or neither."
        )


def keyed(hooks: Iterable[HookBase]) -> dict[str, HookBase]:
    """Return the stateful hooks by key."""
    return numbered(filter(is_stateful, hooks))


def numbered(hooks: Iterable[HookBase]) -> dict[str, HookBase]:
    """Return hooks by class name, numbered per name in the order of registration: `Name`, `Name#2`, ..."""
    seen: Counter[str] = Counter()
    named: dict[str, HookBase] = {}
    for hook in hooks:
        name = type(hook).__qualname__
        seen[name] += 1
        named[name if seen[name] == 1 else f"{name}#{seen[name]}"] = hook
    return named


def collect(hooks: Iterable[HookBase]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the state of every hook that has some, and the module of every stateful hook, both by key.

    A key with a module but no state is a hook that had nothing to save: at resume that is no mismatch.
    """
    states: dict[str, Any] = {}
    modules: dict[str, str] = {}
    for key, hook in keyed(hooks).items():
        modules[key] = type(hook).__module__
        state = _state_of(key, hook)
        if not _is_nothing(state):
            states[key] = state
    return states, modules


def _is_nothing(state: Any) -> bool:
    # Not `not state`: 0, False and an empty list are states, and a tensor has no truth value. An empty dict is what
    # HookBase itself returns.
    return state is None or (isinstance(state, dict) and not state)


def _state_of(key: str, hook: HookBase) -> Any:
    try:
        return hook.state_dict()
    except Exception as error:
        raise HookStateError(
            f"The hook {key} ({type(hook).__module__}) could not give its state: {_text(error)}"
        ) from error


@dataclass(frozen=True)
class Matching:
    """Which saved state goes to which hook, and what is left over on either side, as text for the user."""

    pairs: list[tuple[str, HookBase, Any]]
    left_over: list[tuple[str, str]]  # the hook's key, and what is said of it


def match(hooks: Iterable[HookBase], states: Mapping[str, Any], modules: Mapping[str, str] | None) -> Matching:
    """Assign saved state to hooks without touching them.

    Hooks of one class are assigned in order; a class of another module is another class, except that a class of
    `__main__` is taken for the class of that name in the module that the same file is today. Without `modules`
    (detectron2's form) the class name alone decides.
    """
    waiting: defaultdict[str, list[tuple[str, HookBase]]] = defaultdict(list)
    for key, hook in keyed(hooks).items():
        waiting[type(hook).__qualname__].append((key, hook))
    pairs, left_over = [], []
    for key in states if modules is None else modules:
        module = None if modules is None else modules[key]
        candidates = waiting[key.partition("#")[0]]
        found = next((c for c in candidates if _same_class(c[1], module)), None)
        if found is not None:
            candidates.remove(found)
            if key in states:
                pairs.append((found[0], found[1], states[key]))
        elif key in states:
            origin = f" ({module})" if module else ""
            left_over.append((key, f"saved state of the hook {key}{origin} finds no such hook"))
    for rest in waiting.values():
        for key, hook in rest:
            # detectron2's form doesn't tell a hook that was absent from one that had nothing to save.
            if modules is not None or not _is_nothing(_state_of(key, hook)):
                left_over.append((key, f"the hook {key} ({type(hook).__module__}) has no saved state"))
    return Matching(pairs, left_over)


def _same_class(hook: HookBase, module: str | None) -> bool:
    return module is None or module == type(hook).__module__ or "__main__" in (module, type(hook).__module__)


def load(matching: Matching, *, last: bool) -> None:
    """Give every matched hook a copy of its saved state; HookStateError names the hook that fails.

    Unless it is the `last` time, one that has a `before_train` may fail: it may build there what it loads into.
    """
    for key, hook, state in matching.pairs:
        try:
            # A copy: hooks keep and change what they are given, and the saved state is handed out once more.
            hook.load_state_dict(_copied(state))
        except Exception as error:
            if not last and type(hook).before_train.__qualname__ != "HookBase.before_train":
                continue
            raise HookStateError(
                f"The hook {key} ({type(hook).__module__}) could not take its saved state back: {_text(error)}"
            ) from error


def _copied(state: Any) -> Any:
    try:
        return deepcopy(state)
    except NotImplementedError:  # compressed sparse tensors, for one, cannot be deep-copied
        tree, leaves = codec.encode(state)
        return codec.decode(tree, lambda name: leaves[name].tensor.detach().clone())


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
