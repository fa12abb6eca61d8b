"""The training loop: detectron2's names and order of calls, and a state that is whole."""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from trainerd.trainer import (
    arguments,
    environment,
    generators,
    hook_state,
    hyperparameters,
    randomness,
    resume_proof,
    resuming,
)
from trainerd.trainer.data_position import DataPosition, Grade
from trainerd.trainer.events import EventStorage
from trainerd.trainer.hook_base import HookBase
from trainerd.trainer.hyperparameters import Values
from trainerd.trainer.mismatch import OnMismatch
from trainerd.trainer.session import NULL_SESSION, Session
from trainerd.trainer.train_state import Parts, left_out, taken_before_training

if TYPE_CHECKING:
    from trainerd.trainer.resuming import Restored

__all__ = ["HookBase", "TrainerBase"]

logger = logging.getLogger(__name__)


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
        stopped_early: why training ended before the `max_iter` it was given; empty if it did not.
    """

    def __init__(self) -> None:
        self._hooks: list[HookBase] = []
        self._acting: dict[str, list[Callable[[], None]]] = {"before_step": [], "after_backward": [], "after_step": []}
        self.iter = 0
        self.start_iter = 0
        self.max_iter: int
        self.storage: EventStorage
        self.session: Session = NULL_SESSION
        self.current_phase = "start"
        self.save_requested = False
        self.stopped_early = ""
        self._step = 0
        self._state_step = 0
        self._training = False
        self._mid_step = False
        self._data: DataPosition | None = None
        self._generators: dict[str, generators.Generator] = {}
        self._at_step_end: list[Callable[[TrainerBase], object]] = []
        self._built: Values | None = None
        self._waiting: Restored | None = None
        self._restored: Restored | None = None

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
            if any(hook is other for other in self._hooks) or sum(hook is other for other in new) > 1:
                raise ValueError(
                    f"The hook {type(hook).__qualname__} is registered already: it would do everything twice."
                )
        for hook in new:
            hook.trainer = weakref.proxy(self)
        self._hooks.extend(new)
        if self._built is not None:
            # Training may have moved since what was captured before; only the new hooks are to be added.
            self._built = {**hyperparameters.capture(self, self._hooks), **self._built}
        self._find_acting_hooks()

    def register_rng(self, name: str, generator: generators.Generator) -> None:
        """Make a random generator object of your own part of the state, under a name that stays the same.

        TypeError for what is no NumPy Generator or RandomState, random.Random or torch.Generator; ValueError for a name
        that is taken. The global generators are saved anyway.
        """
        generators.check(name, generator)
        if name in self._generators:
            raise ValueError(f"register_rng: the name {name!r} is taken by another generator of this trainer")
        self._generators[name] = generator

    def train(self, start_iter: int, max_iter: int) -> None:
        """Run the iterations from `start_iter` up to `max_iter`, fewer if the session asks to stop.

        ValueError when a state was loaded that does not continue at `start_iter`.
        """
        start_iter, max_iter = arguments.iteration("start_iter", start_iter), arguments.iteration("max_iter", max_iter)
        if self._waiting is not None and self._waiting.step != start_iter:
            raise ValueError(
                f"The loaded state has {self._waiting.step} completed steps, but training was asked to start at "
                f"iteration {start_iter}: some iterations would be repeated or left out. "
                f"Call train({self._waiting.step}, max_iter)."
            )
        logger.debug("training from iteration %d to %d", start_iter, max_iter)
        self.iter = self.start_iter = self._step = self._state_step = start_iter
        self.max_iter = max_iter
        self.stopped_early = ""
        self._training = True
        try:
            with EventStorage(start_iter) as self.storage:
                self._train_and_clean_up()
        finally:
            self._training = False
            self._at_step_end.clear()
            self.mark("idle")

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
        if missing := left_out(self, self._hooks):
            text = "%s: %s will not be saved, so no resume will be exact; add it in state_dict and load_state_dict"
            logger.warning(text, type(self).__qualname__, ", ".join(missing))
        waiting = self._waiting
        early = waiting is not None and taken_before_training(waiting.state)
        for trainer in (self, *self._driven()):
            trainer._as_built()
        if waiting is not None and early:
            self._restored = resuming.put_back(self, waiting)
        self.before_train()
        if waiting is not None and not early:
            self._restored = resuming.put_back(self, waiting)
        self._waiting = None
        self.session.began(self)

    def _loop(self) -> None:
        self._find_acting_hooks()
        if self.stopped_early:
            self.max_iter = self._step
        while self._step < self.max_iter:
            self.iter = self._step
            self.before_step()
            self._mid_step = True
            self.run_step()
            self._mid_step = False
            self._state_step = self.iter + 1
            self.after_step()
            self._step = self._state_step
            if self.stopped_early:
                self.max_iter = self._step
            while self._at_step_end:
                self._at_step_end.pop(0)(self)
            if self.session is not NULL_SESSION and self.session.end_of_step(self):
                break
        if self.stopped_early:
            logger.info("training ends at step %d: %s", self._step, self.stopped_early)

    def _find_acting_hooks(self) -> None:
        """Note who does something in each step: a call that does nothing costs as much as one that does."""
        for moment in self._acting:
            self._acting[moment] = [getattr(hook, moment) for hook in self._hooks if hook_state.overrides(hook, moment)]

    def stop_early(self, reason: str) -> None:
        """End the training after this step as if it had reached `max_iter`, which becomes the completed step.

        For hooks: in `after_step`, or in `before_train`, when no step is trained any more.
        """
        self.stopped_early = reason or "asked to"

    def at_step_end(self, act: "Callable[[TrainerBase], object]") -> None:
        """Call `act(trainer)` when all hooks' `after_step` are done and `state_dict()` is exact; equal ones once."""
        if act not in self._at_step_end:
            self._at_step_end.append(act)

    def request_save(self) -> None:
        """Ask whoever watches over this trainer to save its state at the end of this step; nobody does by default."""
        self.save_requested = True

    def pinned_steps(self) -> tuple[int, ...]:
        """Return the steps whose checkpoints some hook wants kept whatever the retention rules say, in order."""
        return tuple(sorted({step for hook in self._hooks for step in getattr(hook, "pinned_steps", ())}))

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings that code gave this trainer and that results depend on: attribute names, plain values."""
        return {}

    def take_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Take the settings that were decided on at resume, of those that differed."""
        for name, value in values.items():
            setattr(self, name, value)

    def unscale_gradients(self) -> None:
        """Make gradients what they are without loss scaling, for hooks that look at them in `after_backward`."""

    def _as_built(self) -> Values:
        if self._built is None:
            self._built = hyperparameters.capture(self, self._hooks)
        return self._built

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
        self.storage._iter = self.iter
        for act in self._acting["before_step"]:
            act()

    def after_backward(self) -> None:
        """Call every hook's `after_backward`; for `run_step` to call between backward and the optimizer."""
        for act in self._acting["after_backward"]:
            act()

    def after_step(self) -> None:
        """Call every hook's `after_step`."""
        for act in self._acting["after_step"]:
            act()

    def run_step(self) -> None:
        """Do one iteration."""
        raise NotImplementedError(f"{type(self).__qualname__} must define run_step")

    def mark(self, phase: str) -> None:
        """Tell the session what begins now."""
        self.current_phase = phase
        if self.session is not NULL_SESSION:
            self.session.mark(phase, self._step)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Announce something long, as in `with self.trainer.phase("evaluation"):`."""
        return _Phase(self, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, with live tensors: whoever keeps it copies it.

        Exact between steps; in a hook's `after_step` it already counts this step, but hooks after that one have not
        had theirs.
        """
        waiting = self._waiting.state if self._waiting is not None else None
        state = {"iteration": self.iter, "step": self._state_step, **self._parts().capture(waiting)}
        built = dict(self._as_built())
        if self._restored is not None:
            built |= {one.difference.place: one.value for one in self._restored.decisions}
        state["hyperparameters"] = built
        state["environment"] = environment.capture(getattr(self, "model", None))
        if waiting is not None:
            # Loaded, but put back only when training begins: until then what was loaded is the state.
            return state | {key: waiting[key] for key in ("events", "data", "rng", "generators") if key in waiting}
        if hasattr(self, "storage"):
            state["events"] = self.storage.state_dict()
        if self._data is not None:
            state["data"] = self._data.state_dict()
        state["rng"] = randomness.capture()
        if self._mid_step:
            state["mid_step"] = True  # interrupted, or asked in between: a batch is used and its update may not be done
        if self._generators:
            state["generators"] = generators.capture(self._generators)
        return state

    def checkpoint_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: the whole state, and `fingerprints` by which its resume is proven."""
        return {**self.state_dict(), "fingerprints": self.fingerprints()}

    def fingerprints(self, rng: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Return hashes of the parameters, of the random streams, and of the next batch's sample ids if they are known.

        In a saved state they are computed again when it is put back, and the grade falls if one differs. The model is
        read whole for it. `rng` are the random streams; those of this moment when left out.
        """
        owner = self._owner_of_data()
        samples = owner._data.next_samples() if owner._data is not None else None
        return resume_proof.fingerprints(getattr(owner, "model", None), rng or randomness.capture(), samples)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, on_mismatch: str | Mapping[str, Any] | OnMismatch = "error"
    ) -> None:
        """Load a state into the running objects; model, optimizer and hooks at once, the rest when `train` begins.

        Everything is put back once more after `before_train`, random numbers last, so keep `state_dict` unchanged until
        then. `on_mismatch` (see OnMismatch) says what happens where state and code differ: hooks or whole entries on
        one side only, learning rates and other settings; "error" raises StateMismatch. A model or an optimizer that
        does not fit is always refused. Detectron2's form loads as well; it has no model, random numbers or data
        position.
        """
        policy = OnMismatch.of(on_mismatch)
        if self._training:
            raise RuntimeError("A state cannot be loaded while train() runs: load it before.")
        self._waiting = self._restored = resuming.load(self, state_dict, policy)
        self.iter = state_dict["iteration"]
        self._step = self._state_step = self._waiting.step
        self._mid_step = False

    @property
    def restored_grade(self) -> Grade:
        """How exactly the loaded state continues: "bitwise", "same data" or "position only"."""
        return self._grade()[0]

    @property
    def restored_reason(self) -> str:
        """Why `restored_grade` is not higher; empty for "bitwise"."""
        return self._grade()[1]

    def _grade(self) -> tuple[Grade, str]:
        restored = self._owner_of_data()._restored or self._restored
        if restored is None:
            return "position only", f"{type(self).__qualname__} loaded no state through TrainerBase"
        return restored.grade, restored.reason

    def _owner_of_data(self) -> "TrainerBase":
        """The trainer that fetches the data: this one, or the one that it drives."""
        driven = self._driven()
        return driven[0] if self._data is None and len(driven) == 1 else self

    def _driven(self) -> list["TrainerBase"]:
        return [inner for inner in vars(self).values() if isinstance(inner, TrainerBase)]

    def _parts(self) -> Parts:
        model = getattr(self, "model", None)
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"{type(self).__qualname__}.model is {arguments.described(model)}, and has to be a torch.nn.Module; "
                "several models go into one torch.nn.ModuleDict."
            )
        return Parts(
            model,
            getattr(self, "optimizer", None),
            getattr(self, "grad_scaler", None),
            self._hooks,
            self._data,
            self._generators,
            keeps_gradients=not type(self).run_step.__module__.startswith("trainerd.trainer."),
        )
