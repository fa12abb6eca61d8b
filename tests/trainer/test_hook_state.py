"""Hooks get their own state back, all of them, or somebody says so."""

import logging
from typing import Any

import pytest
from support.trainers import assert_same, simple_trainer, through_a_file

from trainerd.trainer.base import HookBase
from trainerd.trainer.errors import HookStateError, StateMismatch


class Counter(HookBase):
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def after_step(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count} if self.count else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def of_module(module: str) -> type[Counter]:
    made = type("Tracker", (Counter,), {"__module__": module})
    made.__qualname__ = "Tracker"
    return made


FromA, FromB = of_module("package_a"), of_module("package_b")


def with_hooks(*hooks: HookBase) -> Any:
    trainer = simple_trainer()
    trainer.register_hooks([None, *hooks])
    return trainer


def test_the_second_hook_of_a_class_is_not_saved() -> None:
    """Two hooks of one class have their own keys and their own state."""
    state = through_a_file(with_hooks(Counter(3), Counter(5)).state_dict())
    assert state["hooks"] == {"Counter": {"count": 3}, "Counter#2": {"count": 5}}
    one, two = Counter(), Counter()
    with_hooks(one, two).load_state_dict(state)
    assert (one.count, two.count) == (3, 5)


def test_a_hook_with_nothing_to_save_moves_the_others_state() -> None:
    """A hook that had no state to save leaves the next one of its class its own."""
    state = through_a_file(with_hooks(Counter(0), Counter(5)).state_dict())
    assert state["hooks"] == {"Counter#2": {"count": 5}}
    one, two = Counter(), Counter()
    with_hooks(one, two).load_state_dict(state)
    assert (one.count, two.count) == (0, 5)


def test_same_named_classes_swap_their_state() -> None:
    """Classes of one name from two modules are told apart, also when registered in another order."""
    state = through_a_file(with_hooks(FromA(1), FromB(2), FromA(3)).state_dict())
    b, a1, a3 = FromB(), FromA(), FromA()
    with_hooks(b, a1, a3).load_state_dict(state)
    assert (a1.count, b.count, a3.count) == (1, 2, 3)


def test_a_class_of_another_module_takes_foreign_state() -> None:
    """State of a class is not given to a class of the same name in another module."""
    with pytest.raises(
        StateMismatch, match=r"Tracker \(package_a\) finds no such hook.*Tracker \(package_b\) has no saved"
    ):
        with_hooks(FromB()).load_state_dict(with_hooks(FromA(1)).state_dict())


def test_a_script_run_directly_loses_its_hooks_state() -> None:
    """A class of __main__ is the class of that name in the module that the script is."""
    hook = FromA()
    with_hooks(hook).load_state_dict(with_hooks(of_module("__main__")(4)).state_dict())
    assert hook.count == 4


@pytest.mark.parametrize("lacking", ["state_dict", "load_state_dict"])
def test_a_hook_fails_only_at_resume(lacking: str) -> None:
    """A hook that defines one of the two methods is refused at registration, by its class name."""
    methods = {"state_dict": lambda self: {"a": 1}, "load_state_dict": lambda self, state: None}
    del methods[lacking]
    half = type("HalfSaved", (HookBase,), methods)
    with pytest.raises(TypeError, match=rf"HalfSaved defines .* but not {lacking}"):
        with_hooks(half())


def test_no_hook_is_registered_when_one_is_refused() -> None:
    """Something that is no hook is refused, and nothing is registered."""
    trainer = simple_trainer()
    with pytest.raises(TypeError, match="HookBase"):
        trainer.register_hooks([Counter(), object()])
    assert trainer.state_dict()["hook_modules"] == {}


def test_what_differs_goes_unnoticed(caplog: pytest.LogCaptureFixture) -> None:
    """State without a hook and a hook without state are named together: in one error, or in one warning."""
    state = with_hooks(FromA(1), Counter(2)).state_dict()
    named = r"Tracker \(package_a\) finds no such hook; the hook Tracker \(package_b\) has no saved state"
    trainer = with_hooks(FromB(), Counter())
    before = through_a_file(trainer.state_dict())
    with pytest.raises(StateMismatch, match=named):
        trainer.load_state_dict(state)
    assert_same(trainer.state_dict(), before)
    with caplog.at_level(logging.WARNING):
        trainer.load_state_dict(state, on_mismatch="warn")
    assert len(caplog.records) == 1
    assert "Tracker (package_a)" in caplog.text
    assert "Tracker (package_b)" in caplog.text
    assert trainer.state_dict()["hooks"] == {"Counter": {"count": 2}}


def test_a_new_hook_starts_afresh_in_silence() -> None:
    """A stateful hook that is new to a run is named, even while it has nothing to save yet."""
    with pytest.raises(StateMismatch, match=r"Counter .* has no saved state"):
        with_hooks(Counter()).load_state_dict(with_hooks().state_dict())


def test_resume_goes_on_with_a_half_loaded_hook() -> None:
    """A hook that cannot take its state stops the resume, and is named."""

    class Picky(Counter):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise KeyError("limit")

    with pytest.raises(HookStateError, match=r"Picky.*KeyError: 'limit'") as caught:
        with_hooks(Picky()).load_state_dict(with_hooks(Picky(1)).state_dict())
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_hook_changes_the_state_it_was_loaded_from() -> None:
    """A hook may keep and change what it is given: the saved state stays as it was."""

    class Keeps(HookBase):
        def __init__(self) -> None:
            self.values: list[int] = []

        def before_train(self) -> None:
            self.values.clear()

        def state_dict(self) -> dict[str, Any]:
            return {"values": self.values}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.values = state_dict["values"]

    source = Keeps()
    source.values = [1, 2]
    trainer = with_hooks(source)
    trainer.train(0, 1)
    source.values = [1, 2]
    state = through_a_file(trainer.state_dict())
    target = Keeps()
    resumed = with_hooks(target)
    resumed.load_state_dict(state)
    resumed.train(1, 2)
    assert target.values == [1, 2]
    assert state["hooks"] == {f"{Keeps.__qualname__}": {"values": [1, 2]}}


def test_a_file_of_detectron2_is_refused() -> None:
    """The form without step, modules, model, random numbers and data loads; its iteration is the finished one."""
    source = with_hooks(Counter())
    source.train(0, 3)
    new = source.state_dict()
    old = {"iteration": 2, "optimizer": new["optimizer"], "hooks": {"Counter": {"count": 3}}}
    for group in old["optimizer"]["param_groups"]:
        del group["param_names"]
    hook = Counter()
    trainer = with_hooks(hook)
    trainer.load_state_dict(old)
    assert (trainer.step, trainer.iter, hook.count) == (3, 2, 3)
    assert trainer.restored_grade == "position only"
    trainer.train(3, 5)
    assert hook.count == 5
