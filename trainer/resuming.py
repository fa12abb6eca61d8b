"""From a saved state to a trainer that goes on: load, hold against the code, put back when training begins, prove."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainerd.trainer import environment, generators, hyperparameters, randomness, resume_proof, train_state
from trainerd.trainer.data_position import Grade
from trainerd.trainer.errors import StateMismatch
from trainerd.trainer.hyperparameters import Decision
from trainerd.trainer.mismatch import OnMismatch

if TYPE_CHECKING:
    from trainerd.trainer.base import TrainerBase

logger = logging.getLogger("trainerd.trainer")


@dataclass(frozen=True)
class Restored:
    """What a trainer's state came to when it was loaded: the grade, and the decisions about what the code changed."""

    state: Mapping[str, Any]
    grade: Grade
    reason: str
    decisions: tuple[Decision, ...]

    @property
    def step(self) -> int:
        """The number of completed iterations."""
        return train_state.step_of(self.state)

    def capped(self, grade: Grade, reason: str) -> "Restored":
        """The same, with a grade that is not above `grade`, if there is a reason."""
        order = ("position only", "same data", "bitwise")
        if not reason or order.index(self.grade) < order.index(grade):
            return self
        reasons = f"{self.reason}; {reason}" if self.grade == grade else reason
        return replace(self, grade=grade, reason=reasons)


def load(trainer: "TrainerBase", state: Mapping[str, Any], policy: OnMismatch) -> Restored:
    """Load model, optimizers and hooks at once, and let the data loader prepare; the rest waits for `put_back`.

    StateMismatch before anything is touched, if the policy refuses a difference or model or optimizer do not fit.
    """
    _require_state(state)
    parts = trainer._parts()
    missing = [("entries", text) for text in parts.missing_entries(state)]
    missing += [(f"hooks.{key}", text) for key, text in parts.missing_hooks(state)]
    _tell_missing(missing, policy, type(trainer).__qualname__)
    changed = _changed_environment(trainer, state, policy)
    found = hyperparameters.differences(state.get("hyperparameters", {}), trainer._as_built())
    decisions = tuple(hyperparameters.decide(found, policy))
    parts.load(state)
    hyperparameters.apply(decisions, trainer, trainer._hooks)
    if decisions:
        text = "the code sets other values than those the saved state was built with:\n%s"
        logger.warning(text, hyperparameters.table(decisions))
    data = parts.fitting_data(state)
    if data is not None:
        data.prepare(state["data"])
    if "step" not in state:
        logger.warning("the state is in detectron2's form: its optimizer is matched by position, not by name")
    grade, reason = parts.grade(state, type(trainer).__qualname__)
    restored = Restored(state, grade, reason, decisions)
    if left_out := train_state.left_out(trainer, trainer._hooks):
        restored = restored.capped("position only", f"{', '.join(left_out)} of the trainer was not saved")
    if state.get("mid_step"):
        restored = restored.capped("position only", "the state was taken in the middle of a step, not between two")
    if any(decision.action == "code" for decision in decisions):
        restored = restored.capped("same data", "settings of the code were taken in place of saved ones")
    restored = restored.capped("same data", environment.unrepeatable(getattr(trainer, "model", None)))
    return restored.capped("same data", "; ".join(changed))


def _require_state(state: Any) -> None:
    if not isinstance(state, Mapping) or "iteration" not in state:
        found = f"keys {', '.join(map(str, state))}" if isinstance(state, Mapping) else type(state).__qualname__
        raise StateMismatch(f"This is no state of a trainer, whose keys include `iteration`: {found}.")


def _tell_missing(missing: list[tuple[str, str]], policy: OnMismatch, trainer_name: str) -> None:
    refused = [(item, text) for item, text in missing if policy.action(item) in ("error", "saved")]
    if refused:
        text = "; ".join(text for _, text in refused)
        raise StateMismatch(
            f"The saved state and this {trainer_name} differ: {text}. Bring that code back, or go on without it: "
            f"on_mismatch {refused[0][0].partition('.')[0]}=warn."
        )
    if missing:
        text = "; ".join(text for _, text in missing)
        note = "What has no counterpart is ignored, what has no saved state starts afresh."
        logger.warning("The saved state and this %s differ: %s. %s", trainer_name, text, note)


def _changed_environment(trainer: "TrainerBase", state: Mapping[str, Any], policy: OnMismatch) -> list[str]:
    now = environment.capture(getattr(trainer, "model", None))
    changed = environment.differences(state.get("environment", {}), now)
    if changed:
        text = f"What decides over bits has changed since the state was saved: {'; '.join(changed)}."
        if policy.action("environment") == "error":
            raise StateMismatch(f"{text} Go back, or accept other bits with on_mismatch environment=warn.")
        logger.warning("%s", text)
    return changed


def put_back(trainer: "TrainerBase", restored: Restored) -> Restored:
    """Put everything back, random numbers last: creating a data iterator draws some. Return what the proof left of it.

    Meant for after `before_train`, so that no hook's beginning undoes it.
    """
    state = restored.state
    if "events" in state:
        trainer.storage.load_state_dict(state["events"])
    _put_objects_back(trainer, restored)
    for inner in trainer._driven():
        put_back_as_driven(inner)
    if "generators" in state:
        generators.restore(trainer._generators, state["generators"])
    if "rng" in state:
        randomness.restore(state["rng"])
    grade, reason = _proof(trainer, state)
    owner = trainer._owner_of_data()
    if owner is not trainer and owner._restored is not None:
        owner._restored = owner._restored.capped(grade, reason)  # it is its grade that is shown
    return restored.capped(grade, reason)


def put_back_as_driven(inner: "TrainerBase") -> None:
    """Put back what was loaded into a trainer whose `run_step` another trainer calls, as it never sees `train`.

    The random numbers are the other one's, which has put them back and may have drawn from them since.
    """
    waiting, inner._waiting = inner._waiting, None
    if waiting is None:
        return
    streams = randomness.capture_raw()
    _put_objects_back(inner, waiting)
    generators.restore(inner._generators, waiting.state.get("generators", {}))
    randomness.restore_raw(streams)


def _put_objects_back(trainer: "TrainerBase", restored: Restored) -> None:
    parts = trainer._parts()
    parts.load(restored.state, last=True)
    hyperparameters.apply(restored.decisions, trainer, trainer._hooks)
    data = parts.fitting_data(restored.state)
    if data is not None:
        data.load_state_dict(restored.state["data"])


def _proof(trainer: "TrainerBase", state: Mapping[str, Any]) -> tuple[Grade, str]:
    """Compute the fingerprints again; return the highest grade that they leave, and why it is not a higher one."""
    if "fingerprints" not in state:
        return "bitwise", ""
    rng = randomness.capture()
    saved = state.get("rng", rng)
    # Streams of devices that there were not are none of this resume's; of fewer, the grade has spoken already.
    rng["torch_cuda"] = rng["torch_cuda"][: len(saved["torch_cuda"])]
    now = trainer.fingerprints(rng)
    if len(rng["torch_cuda"]) < len(saved["torch_cuda"]):
        now.pop("rng")
    broken = resume_proof.broken(state["fingerprints"], now)
    reason = "; ".join(broken.values())
    if broken:
        logger.warning("the proof of this resume fails: %s", reason)
    return ("same data" if broken.keys() <= {"rng"} else "position only"), reason
