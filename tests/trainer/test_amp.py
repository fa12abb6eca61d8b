"""AMPTrainer: autocast on the CPU, a scaler whose state is the trainer's, and gradients as hooks need them."""

from typing import Any

import pytest
import torch
from support.trainers import Net, StopAt, assert_same, batches, seed, through_a_file

from trainerd.trainer.amp import AMPTrainer
from trainerd.trainer.base import HookBase, TrainerBase
from trainerd.trainer.errors import StateMismatch
from trainerd.trainer.simple import SimpleTrainer


class Watch(HookBase):
    """Notes the gradient of one parameter and the loss's dtype in every iteration."""

    def __init__(self, unscale: bool = False) -> None:
        self.unscale = unscale
        self.gradients: list[torch.Tensor] = []

    def after_backward(self) -> None:
        if self.unscale:
            self.trainer.unscale_gradients()
            self.trainer.unscale_gradients()
        self.gradients.append(self.trainer.model.last.bias.grad.clone())


def build(precision: torch.dtype = torch.float16, **options: Any) -> AMPTrainer:
    seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if "growth" in options:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=options.pop("growth"))
        options["grad_scaler"] = scaler
    return AMPTrainer(model, batches(), optimizer, precision=precision, **options)


def test_the_forward_pass_computes_in_the_asked_precision() -> None:
    """Under autocast a linear layer's output has the trainer's precision, and parameters stay float32."""
    for precision in (torch.float16, torch.bfloat16):
        trainer = build(precision)
        seen = []
        trainer.model.first.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out.dtype))
        trainer.train(0, 2)
        assert seen == [precision] * 2
        assert trainer.model.first.weight.dtype == torch.float32


def test_the_scaler_starts_over_after_a_resume() -> None:
    """Scale and growth count are part of the state: a scale that has grown twice goes on from there, bit for bit."""
    expected = build(growth=3)
    expected.train(0, 12)
    assert expected.grad_scaler.get_scale() == 2.0**14
    trainer = build(growth=3)
    for start, stop in ((0, 4), (4, 5), (5, 11)):
        trainer.session = StopAt(stop)
        trainer.train(start, 12)
        state = trainer.session.state
        assert state["grad_scaler"]["_growth_tracker"] == stop % 3
        trainer = build(growth=3)
        trainer.load_state_dict(state)
    trainer.train(11, 12)
    assert_same(through_a_file(trainer.state_dict()), through_a_file(expected.state_dict()))


def test_an_overflow_skips_the_update_and_halves_the_scale() -> None:
    """A step whose scaled gradients overflow changes no parameter."""
    trainer = build(grad_scaler=torch.amp.GradScaler("cpu", init_scale=2.0**127))
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train(0, 1)
    assert trainer.grad_scaler.get_scale() == 2.0**126
    assert all(torch.equal(before[name], value) for name, value in trainer.model.named_parameters())


def test_hooks_can_have_true_gradients() -> None:
    """Gradients are scaled as in detectron2 until a hook asks for true ones, as often as hooks like."""
    raw, plain = Watch(), Watch(unscale=True)
    trainers = []
    for watch in (raw, plain):
        trainer = build(grad_scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8))
        trainer.register_hooks([watch])
        trainer.train(0, 3)
        trainers.append(trainer)
    scaled, true = trainers
    factor = 2.0**8
    assert torch.allclose(raw.gradients[0], plain.gradients[0] * factor)
    assert_same(through_a_file(scaled.model.state_dict()), through_a_file(true.model.state_dict()))


def test_bfloat16_scales_nothing_by_default() -> None:
    """Its range is float32's; a scaler that is handed in is used all the same."""
    assert not build(torch.bfloat16).grad_scaler.is_enabled()
    assert build(torch.float16).grad_scaler.is_enabled()
    trainer = build(torch.bfloat16, grad_scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    trainer.train(0, 1)
    assert trainer.grad_scaler.get_scale() == 4.0


def test_options_are_dropped_on_the_way_to_the_base() -> None:
    """detectron2's signature, positions included; async_write_metrics reaches the trainer that acts on it."""
    seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    trainer = AMPTrainer(model, batches(), optimizer, 5, True, scaler, torch.bfloat16, True, True)
    assert (trainer.gather_metric_period, trainer.zero_grad_before_forward) == (5, True)
    assert (trainer.grad_scaler, trainer.precision) == (scaler, torch.bfloat16)
    assert (trainer.log_grad_scaler, trainer.async_write_metrics) == (True, True)
    trainer.train(0, 10)
    assert [i for _, i in trainer.storage.history("total_loss").values()] == [4, 9]
    assert trainer.storage.history("[metric]grad_scaler").values() == [(8.0, i) for i in range(10)]


def test_replicas_would_compute_without_autocast() -> None:
    """DataParallel is refused, and so are precisions that autocast has not."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(TypeError, match="AMPTrainer cannot train a DataParallel over several devices"):
        AMPTrainer(torch.nn.DataParallel(model), batches(), optimizer)
    with pytest.raises(ValueError, match=r"precision is torch\.float32"):
        AMPTrainer(model, batches(), optimizer, precision=torch.float32)


def test_a_state_of_another_precision_is_taken_silently() -> None:
    """Precision is a setting of the code; a state without scaler, as SimpleTrainer saves it, is refused as well."""
    half = build()
    half.train(0, 2)
    state = through_a_file(half.state_dict())
    brain = build(torch.bfloat16)
    with pytest.raises(StateMismatch, match=r"trainer\.precision \(saved 'float16', code 'bfloat16'\)"):
        brain.load_state_dict(state)
    brain.load_state_dict(state, on_mismatch={"trainer.precision": "saved"})
    assert brain.precision == torch.float16
    seed(1)
    model = Net()
    simple = SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    simple.train(0, 2)
    with pytest.raises(StateMismatch, match="the grad_scaler has no saved state"):
        build().load_state_dict(through_a_file(simple.state_dict()))


def test_float16_trains_unscaled_after_a_resume() -> None:
    """Taking the saved precision takes a scaler that scales, with the saved scale; one that was handed in stays."""
    half = build(growth=2)
    half.train(0, 3)
    state = through_a_file(half.state_dict())
    resumed = build(torch.bfloat16)
    resumed.load_state_dict(state, on_mismatch="saved")
    resumed.train(3, 3)
    assert resumed.grad_scaler.is_enabled()
    assert resumed.grad_scaler.get_scale() == half.grad_scaler.get_scale()


def test_a_driven_trainer_cannot_log_its_scale() -> None:
    """The scale goes where metrics go, into the open storage."""

    class Outer(TrainerBase):
        def __init__(self) -> None:
            super().__init__()
            self._trainer = build(torch.bfloat16, log_grad_scaler=True)

        def run_step(self) -> None:
            self._trainer.iter = self.iter
            self._trainer.run_step()

    outer = Outer()
    outer.train(0, 2)
    assert len(outer.storage.history("[metric]grad_scaler").values()) == 2
