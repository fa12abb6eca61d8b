"""When metrics are written, and that a resumed training neither repeats nor loses a row."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from trainerd.trainer.arguments import require_count
from trainerd.trainer.hook_base import HookBase
from trainerd.trainer.writers import EventWriter


class PeriodicWriter(HookBase):
    """Lets writers write every `period` iterations, after the last one and after training; register it last.

    Its state holds what each writer has written. Taking the state makes that durable, so that no checkpoint knows of
    rows which a power failure could still lose.

    TypeError for what is no EventWriter, ValueError for a period below 1.
    """

    def __init__(self, writers: Iterable[EventWriter], period: int = 20) -> None:
        require_count("PeriodicWriter", "period", period)
        if isinstance(writers, EventWriter):
            raise TypeError("PeriodicWriter takes a list of writers, not a single one: put it in brackets.")
        self._writers = list(writers)
        for writer in self._writers:
            _check(writer)
        self._period = period
        self._begun = False

    def before_train(self) -> None:
        """Let every writer take out what an earlier attempt wrote after this point."""
        self._begun = True
        for writer in self._writers:
            writer.resume(self.trainer.start_iter)

    def after_step(self) -> None:
        """Write if it is time."""
        done = self.trainer.iter + 1
        if done % self._period == 0 or done >= self.trainer.max_iter or self.trainer.stopped_early:
            for writer in self._writers:
                writer.write()

    def after_train(self) -> None:
        """Write what came after the last write, and close every writer, whatever the others do."""
        if not self._begun:
            return  # another hook's before_train failed, and no file was looked at
        self._begun = False
        failures = []
        for writer in self._writers:
            for act in (writer.write, writer.close):
                try:
                    act()
                except Exception as error:
                    failures.append(error)
        if failures:
            first, *others = failures
            for other in others:
                first.add_note(f"another writer failed as well: {type(other).__name__}: {other}")
            raise first

    def state_dict(self) -> dict[str, Any]:
        """Return each writer's state with the name of its class, after making durable what was written."""
        for writer in self._writers:
            writer.sync()
        return {"writers": [{"class": _name(writer), "state": writer.state_dict()} for writer in self._writers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give the writers of each class their states, in order.

        Writers may have been added, removed or moved, as long as it is clear which is which: ValueError if there are
        two or more of a class and their number has changed, unless none of them had anything to save.
        """
        saved = [each for each in state_dict["writers"] if each["state"]]
        before = Counter(each["class"] for each in saved)
        now = Counter(map(_name, self._writers))
        for name, number in before.items():
            if now[name] not in (0, number):
                raise ValueError(
                    f"PeriodicWriter: the saved state is of {_listed(state_dict['writers'])}, but there are now "
                    f"{', '.join(map(_name, self._writers)) or 'none'}; which {name} continues which cannot be told."
                )
        states = {name: [each["state"] for each in saved if each["class"] == name] for name in before}
        for writer in self._writers:
            if waiting := states.get(_name(writer)):
                writer.load_state_dict(waiting.pop(0))


def _check(writer: Any) -> None:
    if isinstance(writer, EventWriter):
        return
    kind, text = type(writer), "derives from no EventWriter"
    if isinstance(writer, type):
        kind, text = writer, "is a class; an object of it is needed"
    raise TypeError(f"PeriodicWriter: {kind.__module__}.{kind.__qualname__} {text}.")


def _name(writer: EventWriter) -> str:
    return type(writer).__qualname__


def _listed(saved: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(each["class"] for each in saved) or "none"
