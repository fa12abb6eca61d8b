"""Hooks and the training loop: detectron2's names and order of calls, and a state that is whole."""

import logging
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from trainerd.trainer import hook_state, randomness, train_state
from trainerd.trainer.data_position import DataPosition, Grade
from trainerd.trainer.errors import StateMismatch
from trainerd.trainer.events import EventStorage
from trainerd.trainer.session import NULL_SESSION, Session

logger = logging.getLogger(__name__)


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


class _Phase(AbstractContextManager[None]):
    def __init__(self, trainer: "TrainerBase", name: str) -> None:
        self._trainer = trainer
        self._name = name
        self._outer = trainer.current_phase

    def __enter__(self) -> None:
        self._trainer.mark(self._name)

    def __exit__(self, *exc_info: object) -> None:
        self._trainer.mark(self._outer)


class TrainerBase:
    """A loop with hooks; a subclass says in `run_step` what one iteration is.

    Attributes named `model` (a Module) and `optimizer` belong to the state when they exist.

    Attributes:
        iter: the current iteration, from 0.
        start_iter: the iteration that this `train` call began with.
        max_iter: the iteration that it ends before.
        storage: the metrics of this `train` call.
        session: whoever watches over this trainer; by default nobody.
    """

    def __init__(self) -> None:
        self._hooks: list[HookBase] = []
        self.iter = 0
        self.start_iter = 0
        self.max_iter: int
        self.storage: EventStorage
        self.session: Session = NULL_SESSION
        self.current_phase = "start"
        self._step = 0
        self._state_step = 0
        self._training = False
        self._data: DataPosition | None = None
        self._to_restore: Mapping[str, Any] | None = None
        self._restored: tuple[Grade, str] | None = None

    @property
    def step(self) -> int:
        """The number of completed iterations: `run_step` and all hooks' `after_step` are done."""
        return self._step

    def register_hooks(self, hooks: Iterable[HookBase | None]) -> None:
        """Add hooks, to run in this order after those registered before; None is passed over.

        TypeError for anything that is no hook, or a hook that defines only one of `state_dict` and `load_state_dict`.
        """
        new = [hook for hook in hooks if hook is not None]
        for hook in new:
            if not isinstance(hook, HookBase):
                raise TypeError(f"A hook derives from HookBase; {type(hook).__qualname__} does not.")
            hook_state.check_hook(hook)
        for hook in new:
            hook.trainer = weakref.proxy(self)
        self._hooks.extend(new)

    def train(self, start_iter: int, max_iter: int) -> None:
        """Run the iterations from `start_iter` up to `max_iter`, fewer if the session asks to stop.

        ValueError when a state was loaded that does not continue at `start_iter`.
        """
        self._check_start(start_iter)
        logger.debug("training from iteration %d to %d", start_iter, max_iter)
        self.iter = self.start_iter = self._step = self._state_step = start_iter
        self.max_iter = max_iter
        self._training = True
        try:
            with EventStorage(start_iter) as self.storage:
                self._train_and_clean_up()
        finally:
            self._training = False
            self.mark("idle")

    def _check_start(self, start_iter: int) -> None:
        if self._to_restore is None:
            return
        step = train_state.step_of(self._to_restore)
        if step != start_iter:
            raise ValueError(
                f"The loaded state has {step} completed steps, but training was asked to start at iteration "
                f"{start_iter}: some iterations would be repeated or left out. Call train({step}, max_iter)."
            )

    def _train_and_clean_up(self) -> None:
        try:
            self._begin()
            self._loop()
            # after_train tells success from failure by iter == max_iter.
            self.iter = self._step
        except BaseException as first:
            try:
                self.after_train()
            except Exception as second:
                logger.exception("after_train failed as well, after the training had failed")
                first.add_note(f"after_train failed as well: {type(second).__name__}: {second}")
                second.__context__ = first.__context__
                raise first  # noqa: B904 - the first failure is the answer; raising it here chains the second to it
            raise
        else:
            self.after_train()

    def _begin(self) -> None:
        self.mark("start")
        if missing := train_state.left_out(self, self._hooks):
            text = "%s: %s will not be saved, so no resume will be exact; add it in state_dict and load_state_dict"
            logger.warning(text, type(self).__qualname__, ", ".join(missing))
        saved = self._to_restore
        early = saved is not None and train_state.taken_before_training(saved)
        if saved is not None and early:
            self._restore_all(saved)
        self.before_train()
        if saved is not None and not early:
            self._restore_all(saved)
        self._to_restore = None

    def _loop(self) -> None:
        for iteration in range(self.start_iter, self.max_iter):
            self.iter = iteration
            self.before_step()
            self.run_step()
            self._state_step = iteration + 1
            self.after_step()
            self._step = self._state_step
            if self.session.end_of_step(self):
                break

    def before_train(self) -> None:
        """Call every hook's `before_train`."""
        for hook in self._hooks:
            hook.before_train()

    def after_train(self) -> None:
        """Call every hook's `after_train`."""
        self.storage.iter = self.iter
        for hook in self._hooks:
            hook.after_train()

    def before_step(self) -> None:
        """Call every hook's `before_step`, with `storage.iter == iter`."""
        self.storage.iter = self.iter
        for hook in self._hooks:
            hook.before_step()

    def after_backward(self) -> None:
        """Call every hook's `after_backward`; for `run_step` to call between backward and the optimizer."""
        for hook in self._hooks:
            hook.after_backward()

    def after_step(self) -> None:
        """Call every hook's `after_step`."""
        for hook in self._hooks:
            hook.after_step()

    def run_step(self) -> None:
        """Do one iteration."""
        raise NotImplementedError(f"{type(self).__qualname__} must define run_step")

    def mark(self, phase: str) -> None:
        """Tell the session what begins now."""
        self.current_phase = phase
        self.session.mark(phase, self._step)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Announce something long, as in `with self.trainer.phase("evaluation"):`."""
        return _Phase(self, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, with live tensors: whoever keeps it copies it.

        Exact between steps; in a hook's `after_step` it already counts this step, but hooks after that one have not
        had theirs.
        """
        waiting = self._to_restore
        state = {"iteration": self.iter, "step": self._state_step, **self._parts().capture(waiting)}
        if waiting is not None:
            # Loaded, but put back only when training begins: until then what was loaded is the state.
            return state | {key: waiting[key] for key in ("events", "data", "rng") if key in waiting}
        if hasattr(self, "storage"):
            state["events"] = self.storage.state_dict()
        if self._data is not None:
            state["data"] = self._data.state_dict()
        state["rng"] = randomness.capture()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *, on_mismatch: str = "error") -> None:
        """Load a state into the running objects; model, optimizer and hooks at once, the rest when `train` begins.

        Everything is put back once more after `before_train`, random numbers last, so keep `state_dict` unchanged until
        then. `on_mismatch` says what happens when hooks or whole entries exist on one side only: "error" raises
        StateMismatch and "warn" logs one warning. A model or an optimizer that does not fit is always refused.
        Detectron2's form loads as well; it has no model, random numbers or data position.
        """
        if on_mismatch not in ("error", "warn"):
            raise ValueError(f'on_mismatch is "error" or "warn", not {on_mismatch!r}')
        if self._training:
            raise RuntimeError("A state cannot be loaded while train() runs: load it before.")
        parts = self._parts()
        self._tell(parts.differences(state_dict), on_mismatch)
        parts.load(state_dict)
        data = parts.fitting_data(state_dict)
        if data is not None:
            data.prepare(state_dict["data"])
        if "step" not in state_dict:
            logger.warning("the state is in detectron2's form: its optimizer is matched by position, not by name")
        self.iter = state_dict["iteration"]
        self._step = self._state_step = train_state.step_of(state_dict)
        self._to_restore = state_dict
        self._restored = parts.grade(state_dict, type(self).__qualname__)
        if missing := train_state.left_out(self, self._hooks):
            self._restored = "position only", f"{', '.join(missing)} of the trainer was not saved"

    @property
    def restored_grade(self) -> Grade:
        """How exactly the loaded state continues: "bitwise", "same data" or "position only"."""
        return self._grade()[0]

    @property
    def restored_reason(self) -> str:
        """Why `restored_grade` is not higher; empty for "bitwise"."""
        return self._grade()[1]

    def _grade(self) -> tuple[Grade, str]:
        driven = self._driven()
        if self._data is None and len(driven) == 1 and driven[0]._restored is not None:
            return driven[0]._restored  # the data is the inner trainer's
        nothing: Grade = "position only"
        return self._restored or (nothing, f"{type(self).__qualname__} loaded no state through TrainerBase")

    def _driven(self) -> list["TrainerBase"]:
        return [inner for inner in vars(self).values() if isinstance(inner, TrainerBase)]

    def _parts(self) -> train_state.Parts:
        return train_state.Parts(
            getattr(self, "model", None),
            getattr(self, "optimizer", None),
            self._hooks,
            self._data,
            keeps_gradients=not type(self).run_step.__module__.startswith("trainerd.trainer."),
        )

    def _tell(self, differences: list[str], on_mismatch: str) -> None:
        if not differences:
            return
        text = f"The saved state and this {type(self).__qualname__} differ: {'; '.join(differences)}."
        if on_mismatch == "error":
            raise StateMismatch(f'{text} Bring that code back, or pass on_mismatch="warn" to load_state_dict.')
        logger.warning("%s What has no counterpart is ignored, what has no saved state starts afresh.", text)

    def _restore_all(self, state: Mapping[str, Any]) -> None:
        """Put everything back, random numbers last: creating a data iterator draws some."""
        if "events" in state:
            self.storage.load_state_dict(state["events"])
        self._restore_objects(state)
        for inner in self._driven():
            if inner._to_restore is not None:
                inner._restore_as_driven()
        if "rng" in state:
            randomness.restore(state["rng"])

    def _restore_as_driven(self) -> None:
        """Put back what was loaded into a trainer whose `run_step` another trainer calls, as it never sees `train`.

        The random numbers are the other one's, which has put them back and may have drawn from them since.
        """
        saved, self._to_restore = self._to_restore, None
        assert saved is not None
        streams = randomness.capture_raw()
        self._restore_objects(saved)
        randomness.restore_raw(streams)

    def _restore_objects(self, state: Mapping[str, Any]) -> None:
        parts = self._parts()
        parts.load(state, last=True)
        data = parts.fitting_data(state)
        if data is not None:
            data.load_state_dict(state["data"])
