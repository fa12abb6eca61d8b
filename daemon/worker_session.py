"""The trainer's session under a daemon: marks on the status page, and saves at the instant where the state is exact."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from trainerd.checkpoint.errors import StorageUnusable
from trainerd.daemon.durations import Interval
from trainerd.daemon.messages import Saved, SaveFailed
from trainerd.daemon.save_schedule import SaveRecord, is_due
from trainerd.daemon.status_page import StatusPage

if TYPE_CHECKING:
    from trainerd.checkpoint.store import CheckpointStore
    from trainerd.trainer.base import TrainerBase

LOSS = "total_loss"  # the name under which detectron2's trainers store it

logger = logging.getLogger("trainerd.worker")


class WorkerSession:
    """Saves when due, at the end, and before a stop; `tell` receives what the daemon should know.

    `resumed_from` is where the loaded state came from, "" for none. `last_save_delays` are the seconds to wait between
    tries of a save that no later one can make up for; `distrusted` gives data files that were found damaged since it
    was last asked.
    """

    def __init__(
        self,
        page: StatusPage,
        store: "CheckpointStore",
        tell: Callable[[Saved | SaveFailed], None],
        *,
        resumed_from: str,
        every: Interval,
        saved_step: int,
        last_save_delays: tuple[float, ...],
        distrusted: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self.mark = page.mark
        self.last_error = ""
        self._page = page
        self._store = store
        self._tell = tell
        self._resumed_from = resumed_from
        self._every = every
        self._record = SaveRecord(saved_step, tried_at=time.monotonic())
        self._last_save_delays = last_save_delays
        self._distrusted = distrusted

    @property
    def saved_step(self) -> int:
        """The newest step that a checkpoint holds."""
        return self._record.saved_step

    def began(self, trainer: "TrainerBase") -> None:
        """Say where training goes on, and how exactly."""
        if not self._resumed_from:
            logger.info("starting from step 0")
            return
        why = f": {trainer.restored_reason}" if trainer.restored_reason else ""
        text = "resumed from step %d (%s, grade %s%s)"
        logger.info(text, trainer.step, self._resumed_from, trainer.restored_grade, why)

    def end_of_step(self, trainer: "TrainerBase") -> bool:
        """Publish step and loss, save if it is time to; true once a stop was asked for."""
        step = trainer.step
        self._page.mark("step", step)
        history = trainer.storage.histories().get(LOSS)
        if history is not None:
            self._page.publish_loss(history.latest())
        stop = self._page.stop_requested
        if stop or step >= trainer.max_iter:
            self.save_last(trainer)
        elif trainer.save_requested or is_due(self._every, self._record, step, time.monotonic()):
            self._save(trainer)
        trainer.save_requested = False
        return stop

    def save_last(self, trainer: "TrainerBase") -> bool:
        """Save the state that nothing follows, with retries, once; return whether a checkpoint holds it."""
        if self.saved_step == trainer.step:
            return True
        delays, self._last_save_delays = self._last_save_delays, ()
        for delay_seconds in delays:
            if self._save(trainer):
                return True
            time.sleep(delay_seconds)
        return self._save(trainer)

    def _save(self, trainer: "TrainerBase") -> bool:
        step = trainer.step
        with trainer.phase("save"):
            try:
                self._store.distrust(self._distrusted())
                state = trainer.checkpoint_state()
                metrics = {name: value for name, (value, _) in trainer.storage.latest().items()}
                saved = self._store.save(step, state, pinned=trainer.pinned_steps(), metrics=metrics)
            except StorageUnusable as error:
                self._record = self._record.failed_at(time.monotonic())
                self.last_error = str(error)
                text = "THE STATE OF STEP %d IS NOT SAVED (the newest saved step is %d): %s"
                logger.error(text, step, self.saved_step, error)  # noqa: TRY400 # the text says it all
                self._tell(SaveFailed(step, str(error)))
                return False
        self._record = self._record.succeeded(step, saved.seconds, time.monotonic())
        self._tell(Saved(step, saved.bytes, saved.seconds))
        return True
