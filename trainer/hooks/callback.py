"""Plain functions as a hook."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainerd.trainer.hook_base import HookBase

if TYPE_CHECKING:
    from trainerd.trainer.base import TrainerBase

Callback = Callable[["TrainerBase"], object]


class CallbackHook(HookBase):
    """Calls a function with the trainer at each moment that has one."""

    def __init__(
        self,
        *,
        before_train: Callback | None = None,
        after_train: Callback | None = None,
        before_step: Callback | None = None,
        after_backward: Callback | None = None,
        after_step: Callback | None = None,
    ) -> None:
        self._callbacks = {
            "before_train": before_train,
            "after_train": after_train,
            "before_step": before_step,
            "after_backward": after_backward,
            "after_step": after_step,
        }
        for name, callback in self._callbacks.items():
            if callback is not None and not callable(callback):
                raise TypeError(f"CallbackHook: {name} is {callback!r}, which cannot be called.")

    def _call(self, name: str) -> None:
        callback = self._callbacks[name]
        if callback is not None:
            callback(self.trainer)

    def before_train(self) -> None:
        """Call its function."""
        self._call("before_train")

    def after_train(self) -> None:
        """Call its function."""
        self._call("after_train")

    def before_step(self) -> None:
        """Call its function."""
        self._call("before_step")

    def after_backward(self) -> None:
        """Call its function."""
        self._call("after_backward")

    def after_step(self) -> None:
        """Call its function."""
        self._call("after_step")
