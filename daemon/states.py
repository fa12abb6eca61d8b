"""The states of one worker as its daemon sees it, and the moves between them. A leaf: it imports nothing of ours."""

import enum


class WorkerState(enum.Enum):
    """Where one worker's life stands."""

    STARTING = "starting"  # launched: imports torch, builds the trainer, loads; nothing trained that could be lost
    TRAINING = "training"  # told to begin; the status page says at which step it is
    STOPPING = "stopping"  # asked to finish its step, save and leave, before a deadline
    LEAVING = "leaving"  # has said its last word (finished, stopped, failed) and only needs to exit
    GONE = "gone"  # nothing of its process tree is alive


MOVES: dict[WorkerState, frozenset[WorkerState]] = {
    # A stop during the start-up leads straight to GONE: nothing unsaved exists, so nothing is waited for.
    WorkerState.STARTING: frozenset({WorkerState.TRAINING, WorkerState.LEAVING, WorkerState.GONE}),
    WorkerState.TRAINING: frozenset({WorkerState.STOPPING, WorkerState.LEAVING, WorkerState.GONE}),
    WorkerState.STOPPING: frozenset({WorkerState.LEAVING, WorkerState.GONE}),
    WorkerState.LEAVING: frozenset({WorkerState.GONE}),
    WorkerState.GONE: frozenset(),
}


def move(old: WorkerState, new: WorkerState) -> WorkerState:
    """Return `new`; ValueError when a worker cannot get there from `old`."""
    if new not in MOVES[old]:
        raise ValueError(f"a worker cannot go from {old.value} to {new.value}")
    return new
