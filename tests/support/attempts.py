"""Trainings that are killed with SIGKILL: each attempt is a process of its own that loads, trains, saves and dies.

Importable, so that the fork server finds it. The server has imported torch and run none of it, so that its children have
sound threads; an attempt then starts in a fraction of a second.
"""

import contextlib
import json
import multiprocessing
import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import torch

from trainerd.checkpoint import CheckpointStore, RunOwner, open_storage
from trainerd.trainer.base import HookBase, TrainerBase
from trainerd.trainer.session import NullSession

Build = Callable[..., TrainerBase]
ATTEMPT_SECONDS = 120


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
    """Writes down what each iteration trained on and came to; a line counts if its iteration is in the end's history."""

    def __init__(self, path: pathlib.Path) -> None:
        self.file = path.open("a", buffering=1)

    def after_step(self) -> None:
        trainer: Any = self.trainer
        rates = [float(group["lr"]) for one in all_optimizers(trainer) for group in one.param_groups]
        loss = trainer.storage.history("total_loss").latest().hex()
        row = {"iteration": trainer.iter, "loss": loss, "rates": rates, "samples": trainer.model.seen}
        self.file.write(json.dumps(row) + "\n")


def all_optimizers(trainer: Any) -> list[torch.optim.Optimizer]:
    found = trainer.optimizer
    return list(found.values()) if isinstance(found, dict) else [found]


def attempt(build: Build, options: dict[str, Any], folder: pathlib.Path, max_iter: int, every: int, die_at: Any) -> None:
    """One attempt, in a process of its own."""
    torch.set_num_threads(1)
    storage = open_storage(str(folder))
    owner = RunOwner.acquire(storage)
    trainer = build(folder, **options)
    trainer.register_hooks([Witness(folder / "witness")])
    loaded = CheckpointStore(storage).load()
    if loaded is not None:
        trainer.load_state_dict(loaded.state)
    store = CheckpointStore(storage, term=owner.ensure_term(0 if loaded is None else loaded.step))
    session = trainer.session = SaveAndDie(store, every, die_at)
    trainer.train(0 if loaded is None else loaded.step, max_iter)
    (folder / "grade").write_text(json.dumps(session.began_with))
    owner.release()


def train(
    build: Build, options: dict[str, Any], folder: pathlib.Path, max_iter: int, every: int, kills: list[int]
) -> dict[str, Any]:
    """Train in `folder`, killed after each of the steps; return the final state and the rows that count."""
    folder.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.attempts", "support.exactness"])
    for die_at in [*kills, None]:
        arguments = (build, options, folder, max_iter, every, die_at)
        process = context.Process(target=attempt, args=arguments)
        process.start()
        process.join(ATTEMPT_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            if process.is_alive():
                process.kill()
        assert process.exitcode == (0 if die_at is None else -signal.SIGKILL), (die_at, process.exitcode)
    loaded = CheckpointStore(open_storage(str(folder))).load()
    assert loaded is not None
    assert loaded.step == max_iter
    rows: dict[int, Any] = {}
    for line in (folder / "witness").read_text().splitlines():
        row = json.loads(line)
        rows[row["iteration"]] = row  # the last one is of the history that counts
    return {"state": loaded.state, "rows": rows, "grade": json.loads((folder / "grade").read_text())}
