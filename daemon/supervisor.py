"""The daemon: owns a run, holds a worker that trains it, and after any death starts another. Never imports torch."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.scrub import Scrubber
from trainerd.checkpoint.storage import open_storage
from trainerd.daemon.attempt import Attempt
from trainerd.daemon.claim import Claim, claimed
from trainerd.daemon.exit_codes import ExitCode
from trainerd.daemon.job import Job
from trainerd.daemon.launcher import Worker, launch
from trainerd.daemon.output import Output
from trainerd.daemon.process_tree import Process, become_subreaper
from trainerd.daemon.progress import Progress, short_time
from trainerd.daemon.restart_policy import Cause, End, History, Incident, Restart, decide
from trainerd.daemon.signals import Stop, catch_stop_signals, ignore_stop_signals


def supervise(job: Job, *, fresh: bool, take_over: bool) -> int:
    """Train `job` to its end, and return the exit code of `trainerd run`.

    Raises, before anything was trained, what `claimed` raises. Main thread only. SIGTERM, SIGINT and SIGHUP are ignored
    when it returns, so that a late one cannot replace the exit code: the caller has only to exit.
    """
    stop = Stop()
    catch_stop_signals(stop.ask)
    become_subreaper()
    output = Output()
    output.take_log("trainerd")
    try:
        with claimed(job, fresh=fresh, take_over=take_over, stop_asked=lambda: stop.asked) as claim:
            return asyncio.run(Supervisor(job, claim, stop, output, fresh=fresh).run())
    finally:
        output.close()
        ignore_stop_signals()


class Supervisor:
    """The loop over workers, and what is known across their deaths."""

    def __init__(self, job: Job, claim: Claim, stop: Stop, output: Output, *, fresh: bool) -> None:
        self._job = job
        self._claim = claim
        self._stop = stop
        self._output = output
        self._progress = Progress(output)
        self._fresh = fresh
        self._history = History(durable_step=claim.newest_step)
        self._workers = 0
        self._survivors: list[Process] = []
        self._started_at = time.monotonic()
        self._news = asyncio.Event()
        self._worker: Worker | None = None
        self._damaged: list[str] = []

    async def run(self) -> int:
        """Start workers until one of them brings the run to its end; return the exit code."""
        if self._claim.nothing_to_do:
            return self._end(End(ExitCode.FINISHED, self._claim.nothing_to_do))
        owner = self._claim.owner
        self._stop.on_ask = owner.on_lost = self._waker()
        with self._scrubbing():
            return await self._train(owner)

    async def _train(self, owner: RunOwner) -> int:
        while not self._stop.asked and not owner.lost:
            incident = await self._one_worker()
            jitter = random.random()  # noqa: S311 # nobody must be unable to guess it
            decision, self._history = decide(self._history, incident, self._job.restart, jitter)
            if isinstance(decision, End):
                return self._end(decision)
            if self._survivors:
                return self._end(End(ExitCode.BAD_HOST, _cannot_be_killed(self._survivors)))
            await self._pause(decision, incident)
        if owner.lost:
            return self._end(End(ExitCode.RUN_OWNED, str(owner.lost)))
        return self._end(End(ExitCode.PREEMPTED_SAVED, f"stopped by {self._stop.reason} while no worker ran"))

    async def _one_worker(self) -> Incident:
        self._workers += 1
        try:
            worker = launch(self._job, fresh=self._fresh, step=self._history.durable_step, output=self._output)
        except OSError as error:
            return Incident(Cause.CRASH, self._history.durable_step, f"no worker could be started: {error}")
        worker.attend(self._news.set)
        self._worker = worker
        for path in self._damaged:
            worker.distrust(path)
        self._progress.event(f"worker {worker.pid} started")
        attempt = Attempt(
            worker,
            self._job,
            self._claim.owner,
            self._stop,
            self._progress,
            durable_step=self._history.durable_step,
            restarts=self._workers - 1,
        )
        incident = replace(await attempt.follow(self._next_news), first_start=self._workers == 1)
        self._worker = None
        self._survivors = attempt.survivors
        if attempt.resumed_from is not None:
            # Its term has begun: what this run has saved from now on counts, and the next worker resumes from it.
            self._fresh = False
            self._history = self._history.went_back_to(attempt.resumed_from)
        self._history = self._history.after_durable(attempt.durable_step)
        return incident

    async def _pause(self, restart: Restart, incident: Incident) -> None:
        """Tell of the incident and wait before the next worker; a stop ends the wait."""
        again = f"restarting in {restart.delay_seconds:.1f} s (restart {restart.restart} of {restart.allowed})"
        self._progress.event(f"the worker died at step {incident.step}: {incident.reason}")
        self._progress.event(again)
        self._progress.waiting(again)
        until = time.monotonic() + restart.delay_seconds
        while not self._stop.asked and not self._claim.owner.lost and (left := until - time.monotonic()) > 0:
            await self._next_news(left)

    @contextlib.contextmanager
    def _scrubbing(self) -> Iterator[None]:
        """Look for damage in what is stored, beside the training, as long as the block runs."""
        bytes_per_hour = self._job.checkpoint.scrub_bytes_per_hour
        if not bytes_per_hour:
            yield
            return
        loop = asyncio.get_running_loop()

        def found(path: str, text: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._tell_of_damage, path, text)

        scrubber = Scrubber(open_storage(self._job.dir, self._job.storage), bytes_per_hour, found)
        scrubber.start()
        try:
            yield
        finally:
            scrubber.stop()

    def _tell_of_damage(self, path: str, text: str) -> None:
        self._progress.event(f"DAMAGE: {text}")
        self._damaged.append(path)
        if self._worker is not None:
            self._worker.distrust(path)

    def _waker(self) -> Callable[[], None]:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._news.set)

        return wake

    async def _next_news(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
        self._news.clear()

    def _end(self, end: End) -> int:
        told_by_itself = end.exit_code in {ExitCode.FINISHED, ExitCode.PREEMPTED_SAVED, ExitCode.PREEMPTED_UNSAVED}
        self._progress.event(end.reason + self._totals() if told_by_itself else end.reason)
        if end.exit_code is not ExitCode.FINISHED:
            self._progress.event(f"exit status {int(end.exit_code)}: {end.exit_code.meaning.replace('*', '')}")
        return int(end.exit_code)

    def _totals(self) -> str:
        if not self._workers:
            return ""
        checkpoints, restarts = self._progress.checkpoints, self._workers - 1
        return (
            f" ({checkpoints} checkpoint{'s' * (checkpoints != 1)}, {restarts} restart{'s' * (restarts != 1)}, "
            f"{short_time(time.monotonic() - self._started_at)})"
        )


def _cannot_be_killed(survivors: list[Process]) -> str:
    pids = ", ".join(str(process.pid) for process in survivors)
    return f"processes of the last worker cannot be killed ({pids}): no other is started beside them, look at this host"
