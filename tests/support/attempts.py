"""Trainings that are killed with SIGKILL: each attempt is a process of its own that loads, trains, saves and dies.

They are forked from a server that has imported torch, so an attempt starts in a fraction of a second.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import traceback
from typing import Any

import torch

from trainerd.checkpoint import CheckpointStore, RunOwner, open_storage
from trainerd.trainer.base import HookBase, TrainerBase
from trainerd.trainer.session import NullSession


class SaveAndDie(NullSession):
    """Saves every `every` steps and at the end; kills its own process after the step `die_at`, saved or not."""

    def __init__(self, store: CheckpointStore, every: int, die_at: int | None) -> None:
        self.store = store
        self.every = every
        self.die_at = die_at
        self.began_with = ("", "")

    def began(self, trainer: TrainerBase) -> None:
        self.began_with = (trainer.restored_grade, trainer.restored_reason)

    def end_of_step(self, trainer: TrainerBase) -> bool:
        if trainer.step % self.every == 0 or trainer.step >= trainer.max_iter:
            state = {**trainer.state_dict(), "fingerprints": trainer.fingerprints()}
            self.store.save(trainer.step, state, pinned=trainer.pinned_steps())
        if trainer.step == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return False


class Witness(HookBase):
    """Writes down what each iteration trained on and came to; of several lines of an iteration the last one counts."""

    def __init__(self, path: pathlib.Path) -> None:
        self.file = path.open("a", buffering=1)

    def after_step(self) -> None:
        trainer: Any = self.trainer
        rates = [float(group["lr"]) for one in all_optimizers(trainer) for group in one.param_groups]
        losses = trainer.storage.histories().get("total_loss")  # written late, there is none at first
        loss = losses and losses.latest().hex()
        row = {"iteration": trainer.iter, "loss": loss, "rates": rates, "samples": trainer.model.seen}
        self.file.write(json.dumps(row) + "\n")


def all_optimizers(trainer: Any) -> list[torch.optim.Optimizer]:
    found = trainer.optimizer
    return list(found.values()) if isinstance(found, dict) else [found]


def attempt(job: dict[str, Any]) -> None:
    """One attempt, in a process of its own."""
    from support.exactness import build

    folder = pathlib.Path(job["folder"])
    storage = open_storage(str(folder))
    owner = RunOwner.acquire(storage)
    trainer = build(folder, **job["options"])
    trainer.register_hooks([Witness(folder / "witness")])
    loaded = CheckpointStore(storage).load()
    if loaded is not None:
        trainer.load_state_dict(loaded.state)
    store = CheckpointStore(storage, term=owner.ensure_term(0 if loaded is None else loaded.step))
    session = trainer.session = SaveAndDie(store, job["every"], job["die_at"])
    trainer.train(0 if loaded is None else loaded.step, job["max_iter"])
    (folder / "grade").write_text(json.dumps(session.began_with))
    owner.release()


class Attempts:
    """A process that has imported torch and run none of it, so that the attempts it forks have sound threads."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, "-c", "from support.attempts import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])},
        )

    def close(self) -> None:
        """End the server."""
        self.server.communicate(timeout=60)

    def run(self, **job: Any) -> int:
        """Make one attempt; return its exit status, negative for a signal."""
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def train(
        self, options: dict[str, Any], folder: pathlib.Path, max_iter: int, every: int, kills: list[int]
    ) -> dict[str, Any]:
        """Train in `folder`, killed after each of the steps; return the final state and the rows that count."""
        folder.mkdir()
        for die_at in [*kills, None]:
            status = self.run(options=options, folder=str(folder), max_iter=max_iter, every=every, die_at=die_at)
            assert status == (0 if die_at is None else -signal.SIGKILL), die_at
        loaded = CheckpointStore(open_storage(str(folder))).load()
        assert loaded is not None
        assert loaded.step == max_iter
        rows: dict[int, Any] = {}
        for line in (folder / "witness").read_text().splitlines():
            row = json.loads(line)
            rows[row["iteration"]] = row  # the last one is of the history that counts
        clocks = ("time", "data_time")
        lines = (folder / "metrics.json").read_text().splitlines()
        metrics = [{name: value for name, value in json.loads(line).items() if name not in clocks} for line in lines]
        # IterationTimer warms up after each start, so the clock may have rows of its own.
        metrics = [row for row in metrics if row.keys() != {"iteration"}]
        grade = json.loads((folder / "grade").read_text())
        return {"state": loaded.state, "rows": rows, "metrics": metrics, "grade": grade}


def serve() -> None:
    """Fork an attempt for each line of standard input, and answer with its exit status."""
    import support.exactness  # noqa: F401 - what attempts need is imported once
    import torch._dynamo  # the first step of an optimizer would import it in every attempt

    torch.set_num_threads(1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.dup2(2, 1)  # standard output is the server's
            try:
                attempt(json.loads(line))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
