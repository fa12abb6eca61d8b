"""The worker: the process that holds the trainer. Torch is imported inside functions: the daemon may import this."""

import logging
import socket
import sys
from typing import TYPE_CHECKING

from trainerd.checkpoint.errors import CheckpointError, StorageUnusable, TakenOver, UnsupportedState
from trainerd.checkpoint.storage import open_storage
from trainerd.daemon.claim import claimed
from trainerd.daemon.exit_codes import ExitCode
from trainerd.daemon.job import Job
from trainerd.daemon.job_errors import JobError
from trainerd.daemon.keep_rules import keep_of
from trainerd.daemon.keeper import Daemon, Keeper, Ourselves
from trainerd.daemon.messages import Failed, Finished, LastWord, Ready, Start, Stopped
from trainerd.daemon.process_tree import children_die_with_us, die_with_parent
from trainerd.daemon.restart_policy import backoff_seconds
from trainerd.daemon.signals import catch_stop_signals, ignore_stop_signals, keep_stop_signals_from_children
from trainerd.daemon.status_page import StatusPage
from trainerd.daemon.target import build_trainer
from trainerd.daemon.user_frames import at, fingerprint, one_paragraph, without_ours
from trainerd.daemon.worker_session import WorkerSession
from trainerd.trainer.errors import StateError

if TYPE_CHECKING:
    from trainerd.checkpoint.store import CheckpointStore
    from trainerd.trainer.base import TrainerBase

LAST_SAVE_TRIES = 5

logger = logging.getLogger("trainerd.worker")


def main() -> int:
    """Work for the daemon that started this process; return the exit code."""
    link_fd, page_fd, daemon_pid = map(int, sys.argv[1:])
    die_with_parent(daemon_pid)
    page = StatusPage(page_fd)
    prepare_process(page)
    daemon = Daemon(socket.socket(fileno=link_fd))
    start = daemon.listen()
    assert isinstance(start, Start)
    return work(Job.from_json(start.job.encode()), start.fresh, page, daemon)


def train_here(job: Job, *, fresh: bool, take_over: bool) -> int:
    """Train in this process, without a daemon and without restarts; return the exit code of `trainerd run`.

    Raises, before anything was trained, what `claimed` raises. Main thread only; a stop during the start-up takes
    effect when the trainer is built and loaded.
    """
    page = StatusPage.create()
    prepare_process(page)
    try:
        with claimed(job, fresh=fresh, take_over=take_over, stop_asked=lambda: page.stop_requested) as claim:
            if claim.nothing_to_do:
                logger.info("%s", claim.nothing_to_do)
                return ExitCode.FINISHED
            # The step in progress is the last one then; its save is refused by the store.
            claim.owner.on_lost = page.request_stop
            code = work(job, fresh, page, Ourselves(claim.owner))
            if claim.owner.lost and code != ExitCode.RUN_OWNED:
                raise claim.owner.lost
            return code
    finally:
        ignore_stop_signals()


def prepare_process(page: StatusPage) -> None:
    """Set up what belongs to the process: signals, its children's lives, a line of log per event on standard error."""
    import faulthandler

    catch_stop_signals(lambda _name: page.request_stop())
    keep_stop_signals_from_children(lambda: page.stop_requested)
    children_die_with_us()
    faulthandler.enable()
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    ours = logging.getLogger("trainerd")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    # The root logger is the user's: whatever it does, our lines are printed once.
    ours.propagate = False


def work(job: Job, fresh: bool, page: StatusPage, keeper: Keeper) -> int:
    """Build, load, train, save; tell the keeper how it ended, and return the exit code."""
    last_word = _work(job, fresh, page, keeper)
    keeper.tell(last_word)
    match last_word:
        case Finished():
            return ExitCode.FINISHED
        case Stopped():
            return ExitCode.PREEMPTED_SAVED if last_word.saved else ExitCode.PREEMPTED_UNSAVED
        case Failed():
            return last_word.exit_code


def _work(job: Job, fresh: bool, page: StatusPage, keeper: Keeper) -> LastWord:
    try:
        trainer, store, ready = _prepare(job, fresh)
    except StorageUnusable as error:
        return Failed(ExitCode.STORAGE_UNUSABLE, str(error), "")
    except (JobError, CheckpointError, StateError) as error:
        return Failed(ExitCode.BAD_JOB, str(error), fingerprint(error.__cause__ or error, page.read().step))
    page.mark("start", ready.step)
    if page.stop_requested:
        return Stopped(ready.step, saved=True)
    try:
        store.term = keeper.begin(ready)
        return _train(job, trainer, _session(job, page, store, keeper, ready), page)
    except TakenOver as error:
        return Failed(ExitCode.RUN_OWNED, str(error), "")


def _prepare(job: Job, fresh: bool) -> tuple["TrainerBase", "CheckpointStore", Ready]:
    """Build the trainer, load the newest state that is whole, and make sure that it can be saved."""
    trainer = build_trainer(job)
    from trainerd.checkpoint.store import CheckpointStore

    store = CheckpointStore(open_storage(job.dir, job.storage), keep=keep_of(job.checkpoint.keep))
    loaded = store.load(fresh=fresh)
    if loaded is None:
        ready = Ready(0, "", "", "", ())
    else:
        _load(trainer, loaded.state, loaded.step, job)
        ready = Ready(loaded.step, "storage", trainer.restored_grade, trainer.restored_reason, loaded.skipped)
    _check(trainer, store)
    return trainer, store, ready


def _load(trainer: "TrainerBase", state: object, step: int, job: Job) -> None:
    try:
        trainer.load_state_dict(state, on_mismatch=job.checkpoint.on_mismatch)  # type: ignore[arg-type] # a mapping
    except Exception as error:
        raise JobError(
            f'the checkpoint of step {step} in {job.dir} does not fit the trainer that "{job.target}" builds'
            f"{at(error)}: {one_paragraph(error)}. Bring back the code that saved it, or start anew with --fresh or "
            "another --dir."
        ) from error


def _check(trainer: "TrainerBase", store: "CheckpointStore") -> None:
    try:
        store.check(trainer.state_dict())
    except (CheckpointError, StateError):
        raise
    except Exception as error:
        raise JobError(
            f"the trainer's state cannot be taken{at(error)}: {one_paragraph(error)}. "
            "state_dict() must work before training."
        ) from error


def _session(job: Job, page: StatusPage, store: "CheckpointStore", keeper: Keeper, ready: Ready) -> WorkerSession:
    return WorkerSession(
        page,
        store,
        keeper.tell,
        resumed_from=ready.source,
        every=job.checkpoint.every,
        saved_step=ready.step,
        distrusted=keeper.distrusted,
        last_save_delays=tuple(backoff_seconds(n, job.restart, jitter=1.0) for n in range(1, LAST_SAVE_TRIES)),
    )


def _train(job: Job, trainer: "TrainerBase", session: WorkerSession, page: StatusPage) -> LastWord:
    trainer.session = session
    try:
        trainer.train(session.saved_step, job.max_iter)
    except (UnsupportedState, StateError) as error:
        return Failed(ExitCode.BAD_JOB, str(error), fingerprint(error, trainer.step))
    except TakenOver:
        raise
    except BaseException as error:  # sys.exit() in a step is a failure of the step, too
        text = "training failed after step %d"
        logger.error(text, trainer.step, exc_info=(type(error), error, without_ours(error)))  # noqa: TRY400
        return Failed(
            ExitCode.BUDGET_USED_UP,
            f"training failed{at(error)}: {one_paragraph(error)}",
            fingerprint(error, trainer.step),
        )
    step = trainer.step
    if step >= trainer.max_iter:
        if not session.save_last(trainer):  # zero iterations were left, or the state could not be saved before
            return Failed(ExitCode.STORAGE_UNUSABLE, f"the last state could not be saved: {session.last_error}", "")
        return Finished(step)
    if page.stop_requested:
        return Stopped(step, saved=session.saved_step == step)
    return Failed(
        ExitCode.BUDGET_USED_UP,
        f"{type(trainer).__qualname__}.train returned after step {step}, before max_iter {job.max_iter}, unasked",
        f"train returned, step {step}",
    )


if __name__ == "__main__":
    sys.exit(main())
