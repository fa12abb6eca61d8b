"""Metrics in TensorBoard's event files, as its own reader shows them after kills and torn files.

Run as a program, this file is a training that kills itself: `test_tensorboard_writer.py FOLDER SAVE_AT DIE_AT`.
"""

import logging
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from support.trainers import Recorder, StopAt, simple_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from trainerd.trainer import event_files
from trainerd.trainer.base import HookBase, TrainerBase
from trainerd.trainer.events import EventStorage
from trainerd.trainer.hooks.periodic_writer import PeriodicWriter
from trainerd.trainer.session import NullSession
from trainerd.trainer.tensorboard_writer import TensorboardXWriter

STEPS = 17
PERIOD = 5

Shown = dict[str, list[tuple[int, float]]]


def shown(folder: pathlib.Path) -> Shown:
    """What TensorBoard shows: each tag's steps and values, but for the clock's readings."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "histograms": 0})
    reader.Reload()
    tags = reader.Tags()
    scalars = {tag: [(one.step, one.value) for one in reader.Scalars(tag)] for tag in tags["scalars"]}
    images = {tag: [(one.step, one.width) for one in reader.Images(tag)] for tag in tags["images"]}
    histograms = {
        tag: [(one.step, one.histogram_value.sum) for one in reader.Histograms(tag)] for tag in tags["histograms"]
    }
    scalars.pop("data_time", None)
    return {tag: values for tag, values in (scalars | images | histograms).items() if values}


class Validates(HookBase):
    """Puts a scalar, an image and a histogram between two writes."""

    def after_step(self) -> None:
        if (self.trainer.iter + 1) % 4 == 0:
            weight = self.trainer.model.first.weight.detach()
            self.trainer.storage.put_scalar("validation/sum", weight.sum(), smoothing_hint=False)
            self.trainer.storage.put_image("image", torch.full((3, 2, 4), 0.5))
            self.trainer.storage.put_histogram("weights", weight, bins=5)


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
    trainer.register_hooks([Validates(), PeriodicWriter([TensorboardXWriter(folder / "events")], PERIOD)])
    return trainer


def child(folder: pathlib.Path, save_at: int, die_at: int) -> None:
    trainer = build(folder)
    trainer.session = SaveAndDie(folder / "state.pt", save_at, die_at)
    trainer.train(0, STEPS)


def torn(folder: pathlib.Path) -> None:
    """Cut the newest event file in the middle of its last record."""
    path = event_files.marked(str(folder))[-1]
    os.truncate(path, os.path.getsize(path) - 7)


def test_a_killed_training_shows_a_step_twice_or_not_at_all(tmp_path: pathlib.Path) -> None:
    """After a SIGKILL that tears a record, TensorBoard shows what it does for an undisturbed training."""
    build(tmp_path / "undisturbed").train(0, STEPS)
    folder = tmp_path / "killed"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    # Validation 11 waits in the state of step 12, and is written at iteration 14 by the attempt that dies.
    command = [sys.executable, __file__, str(folder), "12", "16"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    before = shown(folder / "events")
    assert [step for step, _ in before["validation/sum"]] == [3, 7, 11]
    assert [step for step, _ in before["total_loss"]] == [4, 9, 14]
    torn(folder / "events")
    trainer = build(folder)
    trainer.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    trainer.train(trainer.step, STEPS)
    expected = shown(tmp_path / "undisturbed" / "events")
    assert {"validation/sum", "image", "weights", "fit"} < expected.keys()
    assert shown(folder / "events") == expected
    aside = [name for name in os.listdir(folder / "events") if "superseded" in name]
    assert len(aside) == 1


class Puts(TrainerBase):
    def run_step(self) -> None:
        self.storage.put_scalar("loss", float(self.iter), smoothing_hint=False)
        if self.iter % 3 == 0:
            self.storage.put_scalar("validation", float(self.iter), smoothing_hint=False)


def puts(folder: pathlib.Path, **options: Any) -> Puts:
    trainer = Puts()
    trainer.register_hooks([PeriodicWriter([TensorboardXWriter(folder, **options)], 2)])
    return trainer


def test_an_earlier_attempt_shines_through(tmp_path: pathlib.Path) -> None:
    """Without a state, what is shown from the step on is the new attempt's, though the old file is torn."""
    puts(tmp_path / "twice").train(0, 9)
    torn(tmp_path / "twice")
    puts(tmp_path / "twice").train(4, 7)
    puts(tmp_path / "once").train(0, 7)
    assert [step for step, _ in shown(tmp_path / "twice")["loss"]] == [1, 3, 5, 6]
    assert shown(tmp_path / "twice") == shown(tmp_path / "once")
    puts(tmp_path / "twice").train(0, 0)
    assert shown(tmp_path / "twice") == {}


def test_kill_after_kill_leaves_traces(tmp_path: pathlib.Path) -> None:
    """Resumes from older and newer states in turn show an undisturbed training's steps; other files are let be."""
    puts(tmp_path / "undisturbed").train(0, STEPS)
    folder = tmp_path / "events"
    other = SummaryWriter(str(folder))
    other.add_scalar("other", 1.0, 40)
    other.close()
    (foreign,) = folder.iterdir()
    content = foreign.read_bytes()
    states: dict[int, Any] = {}

    class Keep(NullSession):
        def end_of_step(self, trainer: Any) -> bool:
            stop = StopAt(trainer.iter + 1)
            stop.end_of_step(trainer)
            states.setdefault(trainer.step, stop.state)
            return bool(trainer.step == self.until)

    for start, until in [(0, 7), (4, 9), (8, 12), (5, STEPS)]:
        trainer = puts(folder)
        trainer.session = Keep()
        trainer.session.until = until
        if start:
            trainer.load_state_dict(states[start])
        trainer.train(start, STEPS)
    assert foreign.read_bytes() == content
    assert shown(folder) == shown(tmp_path / "undisturbed")


def test_training_on_with_the_same_trainer_loses_steps(tmp_path: pathlib.Path) -> None:
    """Several train() calls show every step once, in files whose names sort in the order of writing."""
    trainer = puts(tmp_path / "parts")
    trainer.train(0, 4)
    trainer.train(4, 8)
    puts(tmp_path / "once").train(0, 8)
    assert shown(tmp_path / "parts") == shown(tmp_path / "once")


def test_every_row_needs_a_clean_end(tmp_path: pathlib.Path) -> None:
    """What write has returned from is in the file, images and histograms too, and shown once."""
    writer = TensorboardXWriter(tmp_path, max_queue=100, flush_secs=1000)
    writer.resume(0)
    assert list(tmp_path.iterdir()) == []  # no file before there is something to write
    with EventStorage(3) as storage:
        writer.write()
        assert list(tmp_path.iterdir()) == []
        storage.put_scalar("a", 1.0)
        storage.put_image("image", torch.zeros(3, 2, 5))
        storage.put_histogram("histogram", torch.ones(4), bins=3)
        writer.write()
        assert (storage.images, storage.histograms) == ([], [])
        writer.write()
        assert shown(tmp_path) == {"a": [(3, 1.0)], "image": [(3, 5)], "histogram": [(3, 4.0)]}
    writer.sync()
    writer.close()


def test_a_clock_that_was_set_back_goes_unnoticed(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file from the future, after which TensorBoard would read older ones, is warned of."""
    name = f"events.out.tfevents.{int(time.time()) + 1000}.host.1.0{event_files.MARK}"
    (tmp_path / name).touch()
    with caplog.at_level(logging.WARNING):
        puts(tmp_path).train(0, 2)
    assert "was the clock set?" in caplog.text


def test_a_folder_that_cannot_be_used_is_found_in_mid_training(tmp_path: pathlib.Path) -> None:
    """A path that is no folder is refused before the first step, by name."""
    (tmp_path / "file").touch()
    trainer, recorder = simple_trainer(), Recorder()
    trainer.register_hooks([recorder, PeriodicWriter([TensorboardXWriter(tmp_path / "file")])])
    with pytest.raises(OSError, match=r"TensorboardXWriter cannot use its folder.*/file"):
        trainer.train(0, 3)
    assert recorder.rows == []


def test_a_bad_argument_shows_up_in_mid_training(tmp_path: pathlib.Path) -> None:
    """Arguments that SummaryWriter does not take are refused when the writer is made."""
    with pytest.raises(TypeError, match=r"SummaryWriter does not take these arguments: .*'nonsense'"):
        TensorboardXWriter(tmp_path, nonsense=1)
    with pytest.raises(TypeError, match="leave it out"):
        TensorboardXWriter(tmp_path, purge_step=1)
    with pytest.raises(TypeError, match="log_dir is a path, not int"):
        TensorboardXWriter(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="window_size is 0"):
        TensorboardXWriter(tmp_path, 0)


def test_a_missing_package_is_a_riddle(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tensorboard the error names what to install."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'trainerd\[tensorboard\]'"):
        TensorboardXWriter(tmp_path)


if __name__ == "__main__":
    child(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
