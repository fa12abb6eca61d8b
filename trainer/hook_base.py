"""What a hook is."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainerd.trainer.base import TrainerBase


class HookBase:
    """Something that a trainer does beside its steps; register it with `TrainerBase.register_hooks`.

    A hook with state defines both `state_dict` and `load_state_dict`. Saved state is loaded when the trainer loads
    its own, and once more after `before_train`: however a hook begins, what was saved wins.
    """

    # A weak proxy, set at registration: hooks must not keep their trainer alive.
    trainer: "TrainerBase" = None  # type: ignore[assignment]

    def before_train(self) -> None:
        """Run before the first iteration of a `train` call."""

    def after_train(self) -> None:
        """Run after the last iteration, also when training failed; `trainer.iter == trainer.max_iter` if it did not."""

    def before_step(self) -> None:
        """Run before each iteration; keep it short, timers attribute it to nobody."""

    def after_backward(self) -> None:
        """Run when gradients are there and the optimizer has not used them yet, if the trainer's step announces it."""

    def after_step(self) -> None:
        """Run after each iteration."""

    def state_dict(self) -> Any:
        """Return what must be saved; nothing, for hooks without state."""
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        """Take back what `state_dict` returned; called only on hooks that define both."""

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings that code gave this hook and that results depend on: attribute names, plain values.

        They are compared at resume with those of the saved state, and `on_mismatch` decides whose count.
        """
        return {}

    def take_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Take the settings that were decided on, of those that differed; called after each `load_state_dict`."""
        for name, value in values.items():
            setattr(self, name, value)

    def take_rates(self) -> None:
        """Note that the code's learning rates were put into the optimizers in place of the saved ones."""
