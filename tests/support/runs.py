"""`trainerd run` in a child process: start it, wait for what it says or commits, signal it, collect its exit code."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from trainerd.checkpoint.reader import newest_step
from trainerd.checkpoint.storage import open_storage

TRAINERD = os.path.join(os.path.dirname(sys.executable), "trainerd")
DEADLINE_SECONDS = 60.0

# A tiny model with dropout, an order of data and an optimizer with memory: whatever a resume gets wrong shows.
TINY = """
import os, pathlib, random, signal, subprocess, sys, time
import numpy
import torch
from trainerd.trainer import HookBase, ResumableLoader, SimpleTrainer

FOLDER = pathlib.Path(__file__).parent


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.rand(4) + index


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, batch):
        return {"total_loss": (torch.nn.functional.dropout(self.layer(batch), 0.2) - batch).square().mean()}


def hold(name):
    # Wait until the test makes the file `name` + ".go".
    print(f"holding {name}", flush=True)
    while not (FOLDER / f"{name}.go").exists():
        time.sleep(0.005)


class Script(HookBase):
    # Does what the job's [config] says, at the step it says.
    def __init__(self, config):
        self.config = config

    def after_step(self):
        step = self.trainer.iter + 1
        time.sleep(self.config.get("sleep", 0.0))
        if step == self.config.get("hold_at"):
            hold("step")
        if step == self.config.get("raise_at"):
            raise ValueError(f"bad number in step {step}")
        if step in self.config.get("raise_once_at", []) and not (FOLDER / f"raised-{step}").exists():
            (FOLDER / f"raised-{step}").touch()
            raise ValueError("only once")
        EXTRA(self, step)


def EXTRA(hook, step):
    pass


def build_trainer(config):
    torch.set_num_threads(1)
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    if config.get("hold_build"):
        hold("build")
    model = Model()
    loader = ResumableLoader(Data(), shuffle=True, batch_size=4, num_workers=config.get("loaders", 0))
    trainer = SimpleTrainer(model, loader, torch.optim.AdamW(model.parameters(), lr=0.1))
    trainer.register_hooks([Script(config)])
    return trainer
"""


def write_target(folder: Path, source: str = TINY, name: str = "train.py") -> str:
    """Write a target's file; return the target."""
    (folder / name).write_text(source)
    return f"{folder / name}:build_trainer"


def eventually(
    what: str, seen: Callable[[], Any], seconds: float = DEADLINE_SECONDS, say: Callable[[], str] = str
) -> Any:
    """Return what `seen` returns as soon as it is true; fail after `seconds`, with what `say` has to add."""
    deadline = time.monotonic() + seconds
    while not (found := seen()):
        assert time.monotonic() < deadline, f"no {what} within {seconds:g} s\n{say()}"
        time.sleep(0.005)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Run:
    """One `trainerd run`; everything that it and its workers print is in `text`."""

    program: tuple[str, ...] = (TRAINERD,)

    def __init__(
        self,
        target: str,
        folder: Path | str,
        *flags: str,
        max_iter: int = 20,
        env: Mapping[str, str] | None = None,
        every: str | None = "5 steps",
        **config: Any,
    ) -> None:
        self.folder = folder
        self.log = Path(target.rpartition(":")[0]).with_name(f"run-{time.monotonic_ns()}.log")
        command = [*self.program, "run", target, "--dir", str(folder), "--max-iter", str(max_iter)]
        command += ["--restart-backoff", "0.01 s"]
        command += ["--checkpoint-every", every] if every else []
        for key, value in config.items():
            command += ["--set", f"{key}={json.dumps(value)}"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The daemon's."""
        return self.process.pid

    @property
    def text(self) -> str:
        """What was printed so far."""
        return self.log.read_text(errors="replace")

    @property
    def workers(self) -> list[int]:
        """The pids of the workers so far."""
        return [int(pid) for pid in re.findall(r"^trainerd: worker (\d+) started$", self.text, re.MULTILINE)]

    def wait_for(self, pattern: str, seconds: float = DEADLINE_SECONDS) -> re.Match[str]:
        """Wait until a regular expression matches the text; fail if the daemon ends before."""

        def seen() -> re.Match[str] | None:
            ended = self.process.poll() is not None
            match = re.search(pattern, self.text, re.MULTILINE)
            assert match or not ended, f"ended with {self.process.returncode} before {pattern!r}:\n{self.text}"
            return match

        found: re.Match[str] = eventually(repr(pattern), seen, seconds, lambda: self.text)
        return found

    def wait_for_worker(self, number: int = 1) -> int:
        """Wait for worker `number` (from 1) to be started; return its pid."""
        eventually(f"worker {number}", lambda: len(self.workers) >= number, say=lambda: self.text)
        return self.workers[number - 1]

    def wait_for_step(self, step: int) -> int:
        """Wait until a checkpoint of `step` or a later one is committed; return its step."""
        storage = open_storage(str(self.folder))
        newest: int = eventually(f"checkpoint of step {step}", lambda: (n := newest_step(storage)) and n >= step and n)
        return newest

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the daemon."""
        self.process.send_signal(number)

    def wait(self, seconds: float = DEADLINE_SECONDS) -> int:
        """Wait for the end; return the exit code, negative for a signal."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s:\n{self.text}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.workers:
            eventually(f"end of worker {pid}", lambda pid=pid: not is_alive(pid), 10)


def finish(run: Run) -> str:
    """Wait for a run that is to end with 0; return its text."""
    with run:
        assert run.wait() == 0, run.text
    return run.text


def final_state(folder: Path) -> Any:
    """The newest state of a run, without the times it measured, which differ between equal runs."""
    from trainerd.checkpoint.store import CheckpointStore

    loaded = CheckpointStore(open_storage(str(folder))).load()
    assert loaded is not None
    del loaded.state["events"]["histories"]["data_time"], loaded.state["events"]["latest"]["data_time"]
    return loaded.state
