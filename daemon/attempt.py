"""One worker's life as its daemon leads it: from the launch until nothing of it is alive, and what came of it."""

import math
import signal
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from trainerd.checkpoint.errors import StorageUnusable, TakenOver
from trainerd.checkpoint.ownership import RunOwner
from trainerd.daemon.exit_codes import ExitCode
from trainerd.daemon.job import Job
from trainerd.daemon.launcher import Worker
from trainerd.daemon.messages import Failed, Finished, Ready, Saved, SaveFailed, Stopped, WorkerMessage
from trainerd.daemon.progress import Progress, View
from trainerd.daemon.restart_policy import Cause, Incident
from trainerd.daemon.signals import Stop
from trainerd.daemon.states import WorkerState, move

if TYPE_CHECKING:
    from trainerd.daemon.process_tree import Process

LEAVE_SECONDS = 30.0  # for a worker that has finished or failed to run its exit handlers
TICK_SECONDS = 0.25


class Attempt:
    """Follows one worker; `durable_step` is the newest step that a checkpoint holds, as far as the daemon knows."""

    def __init__(
        self,
        worker: Worker,
        job: Job,
        owner: RunOwner,
        stop: Stop,
        progress: Progress,
        *,
        durable_step: int,
        restarts: int,
    ) -> None:
        self.worker = worker
        self.state = WorkerState.STARTING
        self.durable_step = durable_step
        self.resumed_from: int | None = None
        self.survivors: list[Process] = []
        self._job = job
        self._owner = owner
        self._stop = stop
        self._progress = progress
        self._restarts = restarts
        self._deadline = math.inf
        self._last_word: Finished | Stopped | Failed | None = None
        self._storage_error = ""
        self._saved_at: float | None = None

    async def follow(self, next_news: Callable[[float], Awaitable[None]]) -> Incident:
        """Lead the worker to its end, whichever that is; `next_news` waits for news, for so many seconds at most."""
        try:
            while self.worker.exit_status is None and not self._gone:
                now = time.monotonic()
                for message in self.worker.messages():
                    self._hear(message, now)
                self._heed_loss()
                self._heed_stop(now)
                self._heed_deadline(now)
                self._show(now)
                self.worker.reap_orphans()
                if not self._gone:
                    await next_news(TICK_SECONDS)
        finally:
            self.survivors = await self.worker.end(gently=self._gone and math.isfinite(self._deadline))
        for message in self.worker.messages():
            self._hear(message, time.monotonic())
        incident = self._incident()
        self.worker.page.close()
        return incident

    @property
    def _gone(self) -> bool:
        return self.state is WorkerState.GONE

    def _hear(self, message: WorkerMessage, now: float) -> None:
        match message:
            case Ready():
                self._let_begin(message, now)
            case Saved():
                self.durable_step = message.step
                self._saved_at = now
                self._progress.saved(message.step, message.seconds, now)
            case SaveFailed():
                pass  # the worker has told the user already, in its own log line
            case Finished() | Stopped() | Failed():
                self._last_word = message
                self._leave(now)

    def _let_begin(self, ready: Ready, now: float) -> None:
        for reason in ready.skipped:
            self._progress.event(f"passed over a newer checkpoint: {reason}")
        self.durable_step = ready.step
        if self.state is not WorkerState.STARTING or self._stop.asked:
            return
        try:
            term = self._owner.ensure_term(ready.step)
        except TakenOver:
            self._heed_loss()
            return
        except StorageUnusable as error:
            self._storage_error = str(error)
            self._kill()
            return
        self.resumed_from = ready.step
        self.worker.begin(term)
        self.state = move(self.state, WorkerState.TRAINING)
        self._progress.began(ready.step, now)

    def _heed_loss(self) -> None:
        if self._owner.lost and not self._gone:
            # At once: whatever it would still save does not count.
            self._deadline = math.inf
            self._kill()

    def _heed_stop(self, now: float) -> None:
        if self.worker.page.stop_requested and not self._stop.asked:
            self._stop.ask("a signal to the worker")
        if not self._stop.asked:
            return
        if self.state is WorkerState.STARTING:
            self._kill()
        elif self.state is WorkerState.TRAINING:
            self.worker.page.request_stop()
            self.state = move(self.state, WorkerState.STOPPING)
            self._deadline = self._stop.asked_at + self._job.preemption.grace_seconds
            self._progress.event(
                f"{self._stop.reason}: finishing the step and saving, within {self._job.preemption.grace_seconds:g} s"
            )
        elif self.state is WorkerState.LEAVING:
            self._deadline = min(self._deadline, now + self._job.preemption.grace_seconds)

    def _heed_deadline(self, now: float) -> None:
        if now > self._deadline and not self._gone:
            self._kill()

    def _leave(self, now: float) -> None:
        if self.state in {WorkerState.LEAVING, WorkerState.GONE}:
            return
        self.state = move(self.state, WorkerState.LEAVING)
        self._deadline = min(self._deadline, now + LEAVE_SECONDS)

    def _kill(self) -> None:
        self.state = move(self.state, WorkerState.GONE)

    def _show(self, now: float) -> None:
        status = self.worker.page.read()
        view = View(
            self.state,
            status.phase,
            status.step,
            status.loss,
            self.durable_step,
            self._saved_at,
            self._restarts,
            self._job.max_iter,
        )
        self._progress.show(view, now)

    def _incident(self) -> Incident:
        """Name what came of this worker, from its last word, its exit status and the page it has left."""
        step = max(self.worker.page.read().step, self.durable_step)
        saved = step <= self.durable_step
        word, status = self._last_word, self.worker.exit_status
        if self._owner.lost:
            return Incident(Cause.TAKEN_OVER, step, str(self._owner.lost))
        if isinstance(word, Failed) and word.exit_code == ExitCode.RUN_OWNED:
            return Incident(Cause.TAKEN_OVER, step, word.reason)
        if isinstance(word, Finished):
            return Incident(Cause.FINISHED, word.step, f"finished at step {word.step}")
        if isinstance(word, Stopped):
            return self._preempted(word.step, word.saved)
        if self._stop.asked:
            return self._preempted(step, saved)
        if isinstance(word, Failed):
            storage = word.exit_code == ExitCode.STORAGE_UNUSABLE
            return Incident(
                Cause.STORAGE if storage else Cause.CRASH,
                step,
                word.reason,
                fingerprint=word.fingerprint,
                exit_code=word.exit_code,
                retried=storage and self.resumed_from is not None,
            )
        if self._storage_error:
            return Incident(Cause.STORAGE, step, self._storage_error)
        if status is not None and status < 0:
            return Incident(Cause.SIGNAL, step, f"it was killed by {_signal_name(-status)}")
        return Incident(
            Cause.CRASH, step, f"it exited with status {status}, without a word, before the training was finished"
        )

    def _preempted(self, step: int, saved: bool) -> Incident:
        outcome = "its state is saved" if saved else f"the newest saved step is {self.durable_step}"
        return Incident(Cause.PREEMPTED, step, f"stopped by {self._stop.reason} at step {step}; {outcome}", saved=saved)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
