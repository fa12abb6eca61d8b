"""Metrics in files and on the terminal: a killed and resumed training shows each row once, and none is lost.

Run as a program, this file is a training that kills itself: `test_writers.py FOLDER SAVE_AT DIE_AT`.
"""

import io
import json
import math
import os
import pathlib
import resource
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.trainers import Recorder, StopAt, simple_trainer, through_a_file

from trainerd.trainer import late_metrics
from trainerd.trainer.base import HookBase, TrainerBase
from trainerd.trainer.errors import HookStateError
from trainerd.trainer.events import EventStorage
from trainerd.trainer.hooks.lr_scheduler import LRScheduler
from trainerd.trainer.hooks.periodic_writer import PeriodicWriter
from trainerd.trainer.session import NullSession
from trainerd.trainer.terminal_writer import CommonMetricPrinter
from trainerd.trainer.writers import EventWriter, JSONWriter

STEPS = 17
PERIOD = 5


@pytest.fixture(autouse=True)
def _every_device_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let metrics that may be written late be late here, as on a device that computes beside us."""
    monkeypatch.setattr(late_metrics, "must_wait", lambda _losses: True)


class Validates(HookBase):
    """Puts a scalar between two writes, so that some checkpoints are taken while it waits for its row."""

    def after_step(self) -> None:
        if (self.trainer.iter + 1) % 4 == 0:
            weight = self.trainer.model.first.weight.detach().sum()
            self.trainer.storage.put_scalar("validation/sum", weight, smoothing_hint=False)


class SaveAndDie(NullSession):
    def __init__(self, path: pathlib.Path, save_at: int, die_at: int) -> None:
        self.path, self.save_at, self.die_at = path, save_at, die_at

    def end_of_step(self, trainer: Any) -> bool:
        if trainer.step == self.save_at:
            torch.save(trainer.state_dict(), self.path)
        if trainer.step == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return False


def build(folder: pathlib.Path) -> Any:
    trainer = simple_trainer()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, T_max=STEPS)
    writers = [JSONWriter(folder / "logs" / "metrics.json"), CommonMetricPrinter(STEPS)]
    trainer.register_hooks([LRScheduler(schedule), Validates(), PeriodicWriter(writers, PERIOD)])
    return trainer


def child(folder: pathlib.Path, save_at: int, die_at: int) -> None:
    trainer = build(folder)
    trainer.session = SaveAndDie(folder / "state.pt", save_at, die_at)
    trainer.train(0, STEPS)


def rows_of(path: pathlib.Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "data_time"} for row in rows]


def test_a_killed_training_has_a_row_twice_or_not_at_all(tmp_path: pathlib.Path) -> None:
    """After a SIGKILL, the resumed training's file has the rows of an undisturbed one, in the same order."""
    build(tmp_path / "undisturbed").train(0, STEPS)
    folder = tmp_path / "killed"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    # Validation 11 waits in the state of step 12, and is written at iteration 14 by the attempt that dies.
    command = [sys.executable, __file__, str(folder), "12", "16"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    path = folder / "logs" / "metrics.json"
    assert [row["iteration"] for row in rows_of(path)] == [3, 4, 7, 9, 11, 14]
    with path.open("ab") as file:
        file.write(b'{"iteration": 15, "total_l')
    trainer = build(folder)
    trainer.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    trainer.train(trainer.step, STEPS)
    assert rows_of(path) == rows_of(tmp_path / "undisturbed" / "logs" / "metrics.json")
    aside = (path.parent / "metrics.json.superseded").read_text().splitlines()
    assert [line[:16] for line in aside] == ['{"iteration": 11', '{"iteration": 14', '{"iteration": 15']


class Puts(TrainerBase):
    """Puts scalars at once, one iteration late, now and then, and smoothed or not; none depends on a clock."""

    def run_step(self) -> None:
        step = self.iter
        self.storage.put_scalar("total_loss", math.sin(step))
        self.storage.put_scalar("lr", 1 / (step + 1), smoothing_hint=False)
        if step:
            self.storage.put_scalar("late_loss", math.cos(step), cur_iter=step - 1)
        if step % 3 == 0:
            self.storage.put_scalar("validation", float(step), smoothing_hint=False)


class Snapshot(StopAt):
    """Takes the state at one step, and at a later one what the file held when the process was killed there."""

    def __init__(self, path: pathlib.Path, save_at: int, die_at: int) -> None:
        super().__init__(save_at)
        self.path, self.die_at = path, die_at
        self.safe, self.at_death = b"", b""

    def read(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def end_of_step(self, trainer: Any) -> bool:
        if super().end_of_step(trainer):
            self.safe = self.read()
        if trainer.step == self.die_at:
            self.at_death = self.read()
        return False


def puts(path: pathlib.Path, period: int) -> Puts:
    trainer = Puts()
    trainer.register_hooks([PeriodicWriter([JSONWriter(path)], period)])
    return trainer


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_some_kill_leaves_other_bytes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Saved at any step, killed at any later one with the file torn anywhere: the same bytes as undisturbed."""
    folder = tmp_path_factory.mktemp("kill")
    path = folder / "metrics.json"
    period = data.draw(st.integers(1, 6))
    save_at = data.draw(st.integers(1, STEPS - 1))
    die_at = data.draw(st.integers(save_at, STEPS))
    trainer = puts(path, period)
    trainer.session = session = Snapshot(path, save_at, die_at)
    trainer.train(0, STEPS)
    undisturbed = path.read_bytes()
    left = data.draw(st.integers(len(session.safe), len(session.at_death)))
    torn = session.at_death[:left]
    path.write_bytes(torn)
    trainer = puts(path, period)
    trainer.load_state_dict(session.state)
    trainer.train(save_at, STEPS)
    assert path.read_bytes() == undisturbed
    aside = folder / "metrics.json.superseded"
    moved = aside.read_bytes() if aside.exists() else b""
    assert moved.rstrip(b"\n") == torn[len(session.safe) :].rstrip(b"\n")


def test_a_graceful_stop_leaves_a_row_that_no_undisturbed_training_has(tmp_path: pathlib.Path) -> None:
    """What is written when a session stops the training is taken out again at the resume."""
    puts(tmp_path / "undisturbed.json", 5).train(0, STEPS)
    path = tmp_path / "stopped.json"
    trainer = puts(path, 5)
    trainer.session = StopAt(8)
    trainer.train(0, STEPS)
    assert '{"iteration": 7, ' in path.read_text()
    resumed = puts(path, 5)
    resumed.load_state_dict(trainer.session.state)
    resumed.train(8, STEPS)
    assert path.read_bytes() == (tmp_path / "undisturbed.json").read_bytes()


def test_a_fresh_start_keeps_rows_of_a_killed_attempt(tmp_path: pathlib.Path) -> None:
    """Training from 0 without a state moves all rows aside; other lines stay, and so does nothing half-written."""
    path = tmp_path / "metrics.json"
    path.write_bytes(b'# mine\n{"iteration": 3, "a": NaN}\n[[[\n\xff\n{"iteration": true}\n{"iteration": 0}\n{"iter')
    puts(path, 5).train(0, 5)
    lines = path.read_bytes().splitlines()
    assert lines[:4] == [b"# mine", b"[[[", b"\xff", b'{"iteration": true}']
    assert [json.loads(line)["iteration"] for line in lines[4:]] == [3, 4]
    aside = tmp_path / "metrics.json.superseded"
    assert aside.read_bytes() == b'{"iteration": 3, "a": NaN}\n{"iteration": 0}\n{"iter\n'


def test_a_file_with_nothing_to_cut_is_replaced(tmp_path: pathlib.Path) -> None:
    """Without late rows the file stays the same file; a last row that only lacks its line end is no torn one."""
    path = tmp_path / "metrics.json"
    path.write_text('{"iteration": 1, "a": 2.0}\n')
    before = path.stat()
    writer = JSONWriter(path)
    writer.resume(2)
    writer.close()
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    path.write_text('{"iteration": 1, "a": 2.0}')
    writer.resume(2)
    with EventStorage(1) as storage:
        storage.put_scalar("a", 2.0)  # the row is there already
        writer.write()
        storage.put_scalar("a", 3.0, cur_iter=2)
        writer.write()
    writer.close()
    assert path.read_text() == '{"iteration": 1, "a": 2.0}\n{"iteration": 2, "a": 2.5}\n'
    assert os.listdir(tmp_path) == ["metrics.json"]


def test_training_on_with_the_same_trainer_loses_rows(tmp_path: pathlib.Path) -> None:
    """Several train() calls write one file; one that begins again takes out what comes again."""
    path = tmp_path / "metrics.json"
    trainer = puts(path, 5)
    trainer.train(0, 10)
    trainer.train(10, 15)
    shown = [row["iteration"] for row in rows_of(path) if "lr" in row]
    assert shown == [4, 9, 14]
    trainer.train(5, 10)
    assert [row["iteration"] for row in rows_of(path) if "lr" in row] == [4, 9]
    trainer.train(0, 10)
    puts(tmp_path / "once.json", 5).train(0, 10)
    assert path.read_bytes() == (tmp_path / "once.json").read_bytes()


def test_metrics_that_come_late_are_never_written(tmp_path: pathlib.Path) -> None:
    """A loss that arrives an iteration after the learning rate of its own is written as well."""
    trainer = simple_trainer(async_write_metrics=True)
    schedule = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer)
    trainer.register_hooks([LRScheduler(schedule), PeriodicWriter([JSONWriter(tmp_path / "metrics.json")], 1)])
    trainer.train(0, 6)
    rows = rows_of(tmp_path / "metrics.json")
    for name in ("lr", "total_loss"):
        assert [row["iteration"] for row in rows if name in row] == [0, 1, 2, 3, 4, 5]


def test_a_full_disk_glues_two_rows_together(tmp_path: pathlib.Path) -> None:
    """A write that fails half-way is an error and leaves no half row; the next one writes it whole."""
    path = tmp_path / "metrics.json"
    writer = JSONWriter(path)
    writer.resume(0)
    with EventStorage() as storage:
        storage.put_scalar("a", 1.0)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                writer.write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert path.read_text() == ""
        writer.write()
    writer.close()
    assert path.read_text() == '{"iteration": 0, "a": 1.0}\n'


def test_values_that_are_not_finite_break_the_file(tmp_path: pathlib.Path) -> None:
    """NaN and infinity are read back by Python's json, and a scalar cannot change the iteration."""
    writer = JSONWriter(tmp_path / "metrics.json")
    with EventStorage(7) as storage:
        storage.put_scalars(a=math.nan, b=math.inf, c=-math.inf, iteration=3.0)
        writer.write()
    writer.close()
    assert (tmp_path / "metrics.json").read_text() == '{"iteration": 7, "a": NaN, "b": Infinity, "c": -Infinity}\n'


def test_a_checkpoint_knows_of_rows_that_are_not_durable(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking the state flushes the rows to the disk, once."""
    flushed: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    writer = JSONWriter(tmp_path / "metrics.json")
    hook = PeriodicWriter([writer])
    writer.resume(0)
    monkeypatch.setattr(os, "fsync", fsync)
    with EventStorage() as storage:
        storage.put_scalar("a", 1.0)
        writer.write()
        assert hook.state_dict() == {"writers": [{"class": "JSONWriter", "state": {"written": {"a": 0}}}]}
        assert hook.state_dict()
    writer.close()
    assert flushed == [str(tmp_path / "metrics.json")]


@pytest.mark.parametrize("name", ["file/metrics.json", "folder.json"])
def test_a_path_that_cannot_be_written_is_found_in_mid_training(tmp_path: pathlib.Path, name: str) -> None:
    """A path that is no good is refused before the first step, by name."""
    (tmp_path / "file").touch()
    trainer, recorder = simple_trainer(), Recorder()
    writer = JSONWriter(tmp_path / name)
    (tmp_path / "folder.json").mkdir()
    trainer.register_hooks([recorder, PeriodicWriter([writer])])
    with pytest.raises(OSError, match="JSONWriter cannot use its file, give it another path.*" + name.split("/")[0]):
        trainer.train(0, 3)
    assert recorder.rows == []
    with pytest.raises(ValueError, match=r"folder\.json is a folder; name a file in it"):
        JSONWriter(tmp_path / "folder.json")


class Own(EventWriter):
    def __init__(self, calls: list[str], error: str = "") -> None:
        self.calls, self.error = calls, error

    def write(self) -> None:
        self.calls.append("write")

    def close(self) -> None:
        self.calls.append("close")
        if self.error:
            raise RuntimeError(self.error)


def test_a_writer_of_ones_own_needs_more_than_write_and_close() -> None:
    """A writer with only write and close is called in due time, and its trainer can be saved and resumed."""
    calls: list[str] = []
    trainer = simple_trainer()
    trainer.register_hooks([PeriodicWriter([Own(calls)], 5)])
    trainer.session = StopAt(6)
    trainer.train(0, 12)
    assert calls == ["write", "write", "close"]
    calls.clear()
    resumed = simple_trainer()
    resumed.register_hooks([PeriodicWriter([Own(calls)], 5)])
    resumed.load_state_dict(trainer.session.state)
    resumed.train(6, 12)
    assert calls == ["write", "write", "write", "close"]


def test_one_writer_that_fails_keeps_others_open(tmp_path: pathlib.Path) -> None:
    """Each writer is closed and has its last rows, whatever the others do, and the failure is raised."""
    first: list[str] = []
    last: list[str] = []
    trainer = Puts()
    json_writer = JSONWriter(tmp_path / "metrics.json")
    trainer.register_hooks([PeriodicWriter([Own(first, "one"), Own([], "two"), json_writer, Own(last)])])
    with pytest.raises(RuntimeError, match="one") as caught:
        trainer.train(0, 3)
    assert caught.value.__notes__ == ["another writer failed as well: RuntimeError: two"]
    assert first == last == ["write", "write", "close"]
    with EventStorage(5) as storage:
        storage.put_scalar("lr", 1.0)
        json_writer.write()  # opens it again
    json_writer.close()
    assert [row["iteration"] for row in rows_of(tmp_path / "metrics.json")] == [0, 1, 2, 5]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([object()],), TypeError, r"builtins\.object derives from no EventWriter"),
        (([JSONWriter],), TypeError, "JSONWriter is a class; an object of it is needed"),
        ((CommonMetricPrinter(),), TypeError, "takes a list of writers"),
        (([], 0), ValueError, "period is 0"),
        (([], 2.0), ValueError, "period is 2.0"),
    ],
)
def test_a_bad_argument_shows_up_in_mid_training(arguments: Any, error: type[Exception], text: str) -> None:
    """What cannot work is refused when the hook is made."""
    with pytest.raises(error, match=text):
        PeriodicWriter(*arguments)
    for make in (JSONWriter, lambda _, size: CommonMetricPrinter(None, size)):
        with pytest.raises(ValueError, match="window_size is 0"):
            make("metrics.json", 0)
    with pytest.raises(TypeError, match="json_file is a path, not int"):
        JSONWriter(3)  # type: ignore[arg-type]


def test_a_state_goes_to_the_wrong_writer(tmp_path: pathlib.Path) -> None:
    """Writers without state come and go; two of a class that become one are refused, and both lists are named."""

    def made(*names: str) -> Puts:
        trainer = Puts()
        files = [JSONWriter(tmp_path / name) for name in names]
        trainer.register_hooks([PeriodicWriter([CommonMetricPrinter(), *files, Own([])], 2)])
        return trainer

    trainer = made("a", "b")
    trainer.session = StopAt(4)
    trainer.train(0, 8)
    resumed = made("a")
    resumed.load_state_dict(trainer.session.state)
    with pytest.raises(HookStateError, match=r"is of .*JSONWriter, JSONWriter, Own, but there are now .*Printer, JSON"):
        resumed.train(4, 8)
    other = Puts()
    other.register_hooks([PeriodicWriter([JSONWriter(tmp_path / "a"), JSONWriter(tmp_path / "b")], 2)])
    other.load_state_dict(trainer.session.state)
    other.train(4, 8)
    made("once").train(0, 8)
    once = (tmp_path / "once").read_bytes()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == once
    assert through_a_file(trainer.session.state)["hooks"]


def put_all(storage: EventStorage) -> None:
    storage.put_scalar("loss[/red]", 0.12345)
    storage.put_scalar("a_long_name_of_a_loss_that_fills_a_terminal_on_its_own" * 2, 2.0)
    storage.put_scalar("other", 5.0)
    storage.put_scalar("time", 2.0, smoothing_hint=False)
    storage.put_scalar("data_time", 0.5)
    storage.put_scalar("lr", 0.001, smoothing_hint=False)


def test_names_in_brackets_or_long_lines_are_mangled(capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no terminal a write prints one plain line, and the next one nothing if nothing is new."""
    writer = CommonMetricPrinter(max_iter=101)
    with EventStorage(0) as storage:
        put_all(storage)
        writer.write()
        writer.write()
        storage.iter = 101
        storage.put_scalar("after_loss", 1.0)
        writer.write()  # as after_train does
    printed = capsys.readouterr().out
    expected = (
        "eta: 0:03:20  iter: 0  loss[/red]: 0.1235  "
        + "a_long_name_of_a_loss_that_fills_a_terminal_on_its_own" * 2
        + ": 2  time: 2.0000  last_time: 2.0000  data_time: 0.5000  last_data_time: 0.5000  lr: 0.001"
    )
    assert printed.partition("  max_mem")[0].rstrip("\n") == expected
    assert printed.count("\n") == 1


def test_a_terminal_shows_a_line_in_pieces() -> None:
    """A terminal gets the same text with dim labels, wrapped by itself only, and no time left without max_iter."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=30)
    writer = CommonMetricPrinter(console=console)
    with EventStorage(4) as storage:
        put_all(storage)
        writer.write()
    text = file.getvalue()
    assert text.startswith("\x1b[2miter: \x1b[0m4  \x1b[2mloss[/red]: \x1b[0m0.1235  ")
    assert text.count("\n") == 1
    assert "eta" not in text


def test_a_training_without_metrics_fails_in_the_printer(capsys: pytest.CaptureFixture[str]) -> None:
    """A training that puts nothing prints nothing."""
    trainer = TrainerBase()
    trainer.run_step = lambda: None  # type: ignore[method-assign]
    trainer.register_hooks([PeriodicWriter([CommonMetricPrinter(3)], 1)])
    trainer.train(0, 3)
    assert capsys.readouterr().out == ""


if __name__ == "__main__":
    child(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
