"""The example: identical whenever it is started afresh or brought back, and honest about its config."""

import importlib.util
import os
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from trainerd.trainer.session import NullSession

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "char_gpt"
SMALL = {"batch_size": 4, "block_size": 16, "width": 16, "depth": 1, "heads": 2, "warmup": 3, "eval_every": 5}


@pytest.fixture(scope="module")
def train():
    spec = importlib.util.spec_from_file_location("char_gpt_train", EXAMPLE / "train.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them only wait for each other in a model this small
    yield module
    torch.set_num_threads(threads)
    del sys.modules[spec.name]


class StopAt(NullSession):
    """A session that asks to stop after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def mark(self, phase: str, step: int) -> None:
        pass

    def end_of_step(self, trainer) -> bool:
        return trainer.step == self.step


def flat(state, path="") -> dict:
    """Every leaf of a state by its path, tensors as bytes; durations left out, which no two runs share."""
    if isinstance(state, dict):
        items = [(f"{path}.{key}", value) for key, value in state.items() if key != "data_time"]
    elif isinstance(state, list | tuple):
        items = [(f"{path}.{index}", value) for index, value in enumerate(state)]
    elif isinstance(state, torch.Tensor):
        return {path: (state.dtype, state.shape, state.detach().numpy().tobytes())}
    else:
        return {path: state}
    return {name: leaf for key, value in items for name, leaf in flat(value, key).items()}


def trained(train, config, steps) -> dict:
    trainer = train.build_trainer(config)
    trainer.train(0, steps)
    return flat(trainer.state_dict())


def test_two_fresh_starts_are_identical(train):
    """Nothing random is left unseeded: a run that dies before its first checkpoint begins as it began."""
    assert trained(train, SMALL, 20) == trained(train, SMALL, 20)


@pytest.mark.parametrize("cut", [1, 7, 10, 19])
@pytest.mark.parametrize("workers_after", [0, 1])
def test_a_rebuilt_trainer_ends_with_the_undisturbed_weights(train, tmp_path, cut, workers_after):
    """Stopped, saved to a file without pickle, rebuilt, loaded: weights, optimizer, averages, data, RNG are exact."""
    first = train.build_trainer(SMALL)
    first.session = StopAt(cut)
    first.train(0, 20)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    random.seed(9)
    second = train.build_trainer({**SMALL, "num_workers": workers_after})
    torch.rand(7)
    np.random.rand(7)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.restored_grade == "bitwise"
    second.train(cut, 20)
    assert flat(second.state_dict()) == trained(train, SMALL, 20)


def test_a_run_crosses_epochs_exactly(train, monkeypatch):
    """The place where a window is cut is drawn anew in the second epoch, and exactly so after a resume."""
    monkeypatch.setattr(train, "read_standard_library", lambda: "def f(x):\n    return x\n" * 12)
    monkeypatch.setattr(train, "HELD_OUT_BYTES", 40)
    first = train.build_trainer(SMALL)
    first.session = StopAt(8)
    first.train(0, 12)
    assert first.data_loader.epoch == 2
    state = first.state_dict()  # now: building another trainer seeds the streams that are part of it
    second = train.build_trainer(SMALL)
    second.load_state_dict(state)
    second.train(8, 12)
    assert flat(second.state_dict()) == trained(train, SMALL, 12)


def test_generating_disturbs_nothing(train):
    """A sample in the middle of a training changes no random stream, no weight and no mode."""
    trainer = train.build_trainer(SMALL)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    text = train.generate(trainer, "def ", 30, seed=3)
    assert text.startswith("def ")
    assert len(text) == 34
    assert text == train.generate(trainer.model, "def ", 30, seed=3)
    assert text != train.generate(trainer.model, "def ", 30, seed=4)
    assert trainer.model.training
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_it_learns(train):
    """Forty small steps already beat guessing by far."""
    trainer = train.build_trainer({**SMALL, "batch_size": 16, "lr": 1e-2})
    trainer.train(0, 40)
    losses = trainer.storage.history("total_loss").values()
    assert losses[0][0] > 4.4
    assert losses[-1][0] < 3.7


def test_the_best_held_out_loss_is_kept(train):
    """The smallest value that was logged is the best one, and its step is pinned."""
    trainer = train.build_trainer(SMALL)
    trainer.train(0, 20)
    measured = trainer.storage.history("held_out_loss").values()
    assert [iteration for _, iteration in measured] == [4, 9, 14, 19]
    best, iteration = min(measured)
    assert trainer.state_dict()["hooks"]["BestCheckpointer"]["best"] == best
    assert trainer.pinned_steps() == (iteration + 1,)


def test_windows_stay_inside_the_text(train):
    """The last window's furthest place still has its next characters."""
    windows = train.TextWindows(torch.arange(40), 8)
    for _ in range(200):
        assert all(len(windows[index]) == 9 for index in range(len(windows)))


def test_encoding_is_undone_by_decoding(train):
    """Printable ASCII and line breaks survive; what else there is does not break anything."""
    assert train.decode(train.encode("def f():\n    return '~'\n")) == "def f():\n    return '~'\n"
    assert train.decode(train.encode("é\t")) == "?\n"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"widht": 3}, "unknown config key 'widht'; there are seed, batch_size"),
        ({"lr": "fast"}, "config key 'lr' is 'fast', but should be a number"),
        ({"depth": 1.5}, "config key 'depth' is 1.5"),
        ({"seed": True}, "config key 'seed' is True"),
        ({"max_iter": 10}, "must be more than warmup"),
    ],
)
def test_a_wrong_config_is_named(train, config, message):
    """A mistyped key must not train something else for a night."""
    with pytest.raises((ValueError, TypeError), match=message):
        train.build_trainer(config)


def test_it_trains_without_the_daemon():
    """Typed as a plain Python program it trains, prints a sample before and after, and says that nothing is saved."""
    command = [sys.executable, str(EXAMPLE / "train.py"), "--max-iter", "60"]
    # One thread: on a busy machine two of them wait for each other most of the time.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0
    assert "nobody watches over this trainer, so nothing will be saved" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "before:\ndef " in done.stdout
    assert "after:\ndef " in done.stdout
