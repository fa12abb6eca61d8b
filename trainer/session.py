"""The trainer's link to whoever watches over it; a null object when nobody does."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from trainerd.trainer.base import TrainerBase


class Session(Protocol):
    """What a trainer tells its keeper; called from the training thread only."""

    def mark(self, phase: str, step: int) -> None:
        """Note that `phase` began with `step` completed iterations; called several times per step, so cheap."""

    def began(self, trainer: "TrainerBase") -> None:
        """Note that everything is put back and built: the next thing is the first iteration."""

    def end_of_step(self, trainer: "TrainerBase") -> bool:
        """Act after all hooks' `after_step`, where `trainer.state_dict()` is exact; true asks to stop now."""


class NullSession:
    """The session of a trainer that nobody watches: it notes nothing and never asks to stop."""

    __slots__ = ()

    def mark(self, phase: str, step: int) -> None:
        """Note nothing."""

    def began(self, trainer: "TrainerBase") -> None:
        """Note nothing."""

    def end_of_step(self, trainer: "TrainerBase") -> bool:  # noqa: ARG002 - the protocol's signature
        """Go on."""
        return False


NULL_SESSION = NullSession()
