"""The proof of a resume: what comes next is fingerprinted when it is saved, and again when it is put back."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from support.trainers import Net, seed, through_a_file

from trainerd.trainer import randomness
from trainerd.trainer.base import HookBase
from trainerd.trainer.data import ResumableLoader
from trainerd.trainer.simple import SimpleTrainer


def build(hooks: tuple[HookBase, ...] = (), **options: Any) -> SimpleTrainer:
    seed(1)
    model = Net()
    loader = ResumableLoader(torch.randn(30, 4), 6, shuffle=True, seed=3, **options)
    trainer = SimpleTrainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.register_hooks(hooks)
    return trainer


def saved_after(steps: int) -> dict[str, Any]:
    trainer = build()
    trainer.train(0, steps)
    return through_a_file({**trainer.state_dict(), "fingerprints": trainer.fingerprints()})


@pytest.mark.parametrize("steps", [0, 3, 5, 7])
def test_a_true_resume_keeps_its_grade(steps: int) -> None:
    """Before the first step, in an epoch, at its end: parameters, streams and the next samples are proven."""
    state = saved_after(steps)
    assert state["fingerprints"].keys() == {"parameters", "rng", "samples"}
    resumed = build()
    resumed.load_state_dict(state)
    resumed.train(steps, steps)
    assert (resumed.restored_grade, resumed.restored_reason) == ("bitwise", "")
    assert resumed.fingerprints() == state["fingerprints"]


def test_the_next_samples_are_those_that_come() -> None:
    """What the loader says it will hand out is what it hands out, across epochs, for each rank."""
    for rank in (0, 1):
        loader = ResumableLoader(list(range(21)), 4, shuffle=True, seed=7, rank=rank, world_size=2)
        for _ in range(3):
            for _ in range(len(loader)):
                said = loader.next_samples()
                assert loader.next_samples() == said
                assert next(iter(loader)).tolist() == said


class Meddling(HookBase):
    """Draws a number whenever its state is put back: after the trainer's own streams were saved."""

    def __init__(self, what: str) -> None:
        self.what = what

    def state_dict(self) -> dict[str, Any]:
        return {"what": self.what}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.what == "parameters":
            with torch.no_grad():
                self.trainer.model.first.bias.add_(1e-6)


def test_parameters_that_changed_on_the_way_are_called_bitwise(caplog: Any) -> None:
    """A hook that touches the model while its state is loaded is found out: the grade falls, and says why."""

    def make() -> SimpleTrainer:
        return build((Meddling("parameters"),))

    trainer = make()
    trainer.train(0, 3)
    state = through_a_file({**trainer.state_dict(), "fingerprints": trainer.fingerprints()})
    resumed = make()
    resumed.load_state_dict(state)
    resumed.train(3, 4)
    assert resumed.restored_grade == "position only"
    assert "the parameters and buffers are not those that were saved" in resumed.restored_reason
    assert "the proof of this resume fails" in caplog.text


def test_a_dataset_in_another_order_is_called_the_same_data() -> None:
    """A fingerprint of other samples lowers the grade to the position alone."""
    state = saved_after(3)
    state["fingerprints"]["samples"] = "0" * 32
    state["fingerprints"]["rng"] = "0" * 32
    resumed = build()
    resumed.load_state_dict(state)
    resumed.train(3, 4)
    assert resumed.restored_grade == "position only"
    assert "made of other samples" in resumed.restored_reason
    assert "the random streams are not" in resumed.restored_reason


GENERATORS = {
    "pcg": lambda: np.random.default_rng(5),
    "mt": lambda: np.random.Generator(np.random.MT19937(5)),
    "philox": lambda: np.random.Generator(np.random.Philox(5)),
    "sfc": lambda: np.random.Generator(np.random.SFC64(5)),
    "legacy": lambda: np.random.RandomState(5),
    "python": lambda: __import__("random").Random(5),
    "torch": lambda: torch.Generator().manual_seed(5),
}


def draw(generator: Any) -> list[float]:
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    if isinstance(generator, np.random.RandomState):
        return generator.standard_normal(3).tolist()
    if isinstance(generator, np.random.Generator):
        return [*generator.standard_normal(3).tolist(), float(generator.integers(1000, dtype=np.int32))]
    return [generator.gauss(0, 1)]


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_registered_generator_starts_over(kind: str) -> None:
    """NumPy's, Python's and torch's generator objects go on where they were, in the middle of a pair of normals too."""

    def make() -> tuple[SimpleTrainer, Any]:
        trainer, generator = build(), GENERATORS[kind]()
        trainer.register_rng("augmentation", generator)
        return trainer, generator

    trainer, generator = make()
    trainer.train(0, 2)
    draw(generator)
    state = through_a_file(trainer.state_dict())
    expected = draw(generator)
    resumed, again = make()
    resumed.load_state_dict(state)
    draw(again)
    resumed.train(2, 2)
    assert draw(again) == expected


def test_a_generator_of_another_kind_is_passed_over() -> None:
    """What is no generator, a taken name, and a generator without counterpart are refused by name."""
    trainer = build()
    with pytest.raises(TypeError, match=r"takes a numpy\.random\.Generator.*int is none of them"):
        trainer.register_rng("seed", 5)  # type: ignore[arg-type]
    trainer.register_rng("noise", np.random.default_rng(0))
    with pytest.raises(ValueError, match="'noise' is taken"):
        trainer.register_rng("noise", np.random.default_rng(0))
    state = through_a_file(trainer.state_dict())
    with pytest.raises(ValueError, match="the saved random generator 'noise' is not registered"):
        build().load_state_dict(state)
    other = build()
    other.register_rng("noise", np.random.RandomState(0))
    with pytest.raises(ValueError, match=r"'noise' was a numpy Generator \(PCG64\) and is a numpy RandomState"):
        other.load_state_dict(state)


def test_a_second_device_breaks_the_proof(monkeypatch: Any) -> None:
    """Streams of devices that were not there when it was saved are none of the resume's. A stream stands in for one."""
    state = saved_after(3)
    real = randomness.capture
    monkeypatch.setattr(randomness, "capture", lambda: {**real(), "torch_cuda": [torch.zeros(16, dtype=torch.uint8)]})
    resumed = build()
    resumed.load_state_dict(state)
    resumed.train(3, 4)
    assert resumed.restored_grade == "bitwise"


def test_a_generator_without_state_fails_at_the_first_save() -> None:
    """SystemRandom draws from the machine, and cannot be brought back."""
    with pytest.raises(TypeError, match="SystemRandom is none of them"):
        build().register_rng("noise", random.SystemRandom())
