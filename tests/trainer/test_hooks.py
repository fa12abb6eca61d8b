"""What each hook does in a training, and that its state survives one; test_exactness.py kills them all together."""

import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from support.trainers import Net, StopAt, assert_same, batches, seed, through_a_file
from torch import nn

from trainerd.trainer import AMPTrainer, EventWriter, HookBase, ResumableLoader, SimpleTrainer, StateMismatch, hooks
from trainerd.trainer.errors import HookStateError


def build(*some_hooks: HookBase, model: nn.Module | None = None, **options: Any) -> SimpleTrainer:
    seed(1)
    model = model or Net()
    trainer = SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), lr=0.05), **options)
    trainer.register_hooks(some_hooks)
    return trainer


class Scores(HookBase):
    """Puts a score in each iteration that the list has one for."""

    def __init__(self, scores: list[float | None]) -> None:
        self.scores = scores

    def after_step(self) -> None:
        score = self.scores[self.trainer.iter] if self.trainer.iter < len(self.scores) else None
        if score is not None:
            self.trainer.storage.put_scalar("score", score, smoothing_hint=False)


# EMA


def test_averages_are_not_those_of_the_formula() -> None:
    """average = decay * average + (1 - decay) * parameter, tied parameters once; warm-up and period as said."""
    for warmup, every in ((False, 1), (True, 1), (False, 3)):
        ema = hooks.EMA(0.9, warmup=warmup, every=every)
        expected: dict[str, torch.Tensor] = {}
        number = 0

        def follow(trainer: Any, expected: Any = expected, warmup: bool = warmup, every: int = every) -> None:
            nonlocal number
            if (trainer.iter + 1) % every:
                return
            number += 1
            decay = min(0.9, (1 + number) / (10 + number)) if warmup else 0.9
            for name, value in trainer.model.named_parameters():
                expected[name] = decay * expected[name] + (1 - decay) * value.detach()

        trainer = build(ema, hooks.CallbackHook(after_step=follow))
        expected.update({name: value.detach().clone() for name, value in trainer.model.named_parameters()})
        trainer.train(0, 10)
        assert "last.weight" not in expected
        state = ema.state_dict()
        assert state["updates"] == number
        assert state["averages"].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(state["averages"][name], value, atol=1e-6)


def test_looking_at_averages_changes_the_weights() -> None:
    """`averaged` puts the averages in and the weights back, bit for bit, whatever happens inside."""
    ema = hooks.EMA(0.5)
    trainer = build(ema)
    trainer.train(0, 5)
    before = through_a_file(trainer.model.state_dict())
    with ema.averaged() as model:
        assert torch.equal(model.first.weight, ema.state_dict()["averages"]["first.weight"])
        assert not torch.equal(model.first.weight, before["first.weight"])
    assert_same(through_a_file(trainer.model.state_dict()), before)
    with pytest.raises(RuntimeError), ema.averaged() as model:
        model(torch.ones(1))
    assert_same(through_a_file(trainer.model.state_dict()), before)


def test_small_steps_are_lost_in_coarse_averages() -> None:
    """Averages of bfloat16 parameters are float32; buffers are averaged if asked for."""
    model = Net().bfloat16()
    ema = hooks.EMA(0.999, use_buffers=True)
    trainer = SimpleTrainer(
        model, [batch.bfloat16() for batch in batches()], torch.optim.SGD(model.parameters(), lr=0.1)
    )
    trainer.register_hooks([ema])
    trainer.train(0, 3)
    averages = ema.state_dict()["averages"]
    assert {value.dtype for value in averages.values()} == {torch.float32}
    assert "norm.running_mean" in averages
    with ema.averaged():
        assert model.norm.running_mean.dtype == torch.bfloat16


def test_averages_of_another_model_are_taken() -> None:
    """Other names or shapes are refused with both; another decay is a setting that has changed."""
    trainer = build(hooks.EMA(0.9))
    trainer.train(0, 2)
    state = through_a_file(trainer.state_dict())
    with pytest.raises(StateMismatch, match=r"hooks\.EMA\.decay \(saved 0\.9, code 0\.99\)"):
        build(hooks.EMA(0.99)).load_state_dict(state)
    del state["hooks"]["EMA"]["averages"]["last.bias"]
    damaged = build(hooks.EMA(0.9))
    damaged.load_state_dict(state)  # the hook builds in before_train, so its word counts only then
    with pytest.raises(HookStateError, match=r"The hook EMA .* differ in last\.bias"):
        damaged.train(2, 3)
    for problem, options in (("decay is 1.5", {"decay": 1.5}), ("every is 0", {"every": 0})):
        with pytest.raises(ValueError, match=problem):
            hooks.EMA(**options)


# EarlyStopping


def test_a_hopeless_training_goes_on() -> None:
    """After `patience` evaluations without improvement the training ends as if max_iter were reached there."""
    ended = []
    scores = [5.0, None, 4.0, 4.5, None, math.nan, 3.995, 9.0]
    trainer = build(
        Scores(scores),
        hooks.EarlyStopping("score", 3, min_delta=0.01),
        hooks.EvalHook(0, lambda: ended.append("evaluated")),
        hooks.CallbackHook(after_train=lambda t: ended.append((t.iter, t.max_iter))),
    )
    trainer.train(0, 100)
    assert trainer.step == 7
    assert ended == ["evaluated", (7, 7)]
    assert "score was best in iteration 2 (4), 3 evaluations ago" in trainer.stopped_early


def test_a_run_that_has_ended_early_trains_on_at_each_start() -> None:
    """Started again it trains nothing; with more patience, or without the hook, it goes on."""

    def make(patience: int) -> SimpleTrainer:
        return build(Scores([1.0, 2.0, 3.0, 4.0, 5.0]), hooks.EarlyStopping("score", patience))

    trainer = make(2)
    trainer.train(0, 10)
    assert trainer.step == 3
    state = through_a_file(trainer.state_dict())
    again, patient = make(2), make(4)
    again.load_state_dict(state)
    again.train(3, 10)
    assert (again.step, again.iter, again.max_iter) == (3, 3, 3)
    patient.load_state_dict(state)
    patient.train(3, 10)
    assert patient.step == 5


def test_patience_starts_over_after_a_kill() -> None:
    """Best value and bad evaluations are state."""

    def make() -> SimpleTrainer:
        return build(Scores([1.0, 2.0, 3.0, 0.5, 2.0, 2.0, 2.0, 2.0]), hooks.EarlyStopping("score", 3))

    trainer = make()
    for start, stop in ((0, 2), (2, 5), (5, 6)):
        trainer.session = StopAt(stop)
        trainer.train(start, 20)
        state = trainer.session.state
        trainer = make()
        trainer.load_state_dict(state)
    trainer.train(6, 20)
    assert trainer.step == 7


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"mode": "up"}, 'mode is "min" or "max"'), ({"patience": 0}, "patience is 0"), ({"min_delta": -1}, "min_delta")],
)
def test_a_mistake_shows_after_hours(options: dict[str, Any], problem: str) -> None:
    """Arguments are checked when the hook is made."""
    with pytest.raises(ValueError, match=problem):
        hooks.EarlyStopping("score", **{"patience": 1, **options})


# EvalHook


def test_the_last_evaluation_is_not_in_the_last_state() -> None:
    """Every period and at the end, where it belongs to the state; the phase is announced, nested results flattened."""
    seen = []

    def evaluate() -> dict[str, Any]:
        seen.append((trainer.step, trainer.current_phase))
        return {"a": 1, "set": {"b": torch.tensor(2.0), "c": {"d": np.float32(3)}}}

    trainer = build(hooks.EvalHook(3, evaluate))
    trainer.session = StopAt(7)
    trainer.train(0, 7)
    assert seen == [(2, "evaluation"), (5, "evaluation"), (6, "evaluation")]
    assert trainer.session.state["events"]["latest"]["set/c/d"] == [3.0, 6]
    assert {"a", "set/b"} <= trainer.session.state["events"]["latest"].keys()


def test_an_interrupted_training_is_evaluated_as_if_it_had_ended() -> None:
    """Stopped or failed, it has no final evaluation; with nothing left to train it has one."""
    seen: list[int] = []
    trainer = build(hooks.EvalHook(0, lambda: seen.append(1)))
    trainer.session = StopAt(3)
    trainer.train(0, 7)
    assert seen == []
    trainer.session = StopAt(99)
    trainer.train(3, 7)
    assert seen == [1]
    trainer.train(7, 7)
    assert seen == [1, 1]
    quiet = build(hooks.EvalHook(2, lambda: seen.append(2), eval_after_train=False))
    quiet.train(0, 4)
    assert seen == [1, 1, 2]


def test_results_that_are_no_numbers() -> None:
    """The message names the result and its type."""
    with pytest.raises(ValueError, match=r"eval_function returned set/b = 'x', a str"):
        build(hooks.EvalHook(1, lambda: {"set": {"b": "x"}})).train(0, 1)
    with pytest.raises(TypeError, match="a dict of numbers, or None, not list"):
        build(hooks.EvalHook(1, lambda: [1])).train(0, 1)
    with pytest.raises(TypeError, match="cannot be called"):
        hooks.EvalHook(1, {"a": 1})  # type: ignore[arg-type]


# GradientClip


def test_gradients_are_clipped_while_they_are_scaled() -> None:
    """Under an AMPTrainer gradients are unscaled first; the written norm is that before clipping."""
    norms = []

    def look(trainer: Any) -> None:
        grads = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
        norms.append(float(torch.cat(grads).norm()))

    seed(1)
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = AMPTrainer(model, batches(), optimizer, gather_metric_period=2, grad_scaler=scaler)
    trainer.register_hooks([hooks.GradientClip(0.1), hooks.CallbackHook(after_backward=look)])
    trainer.train(0, 6)
    assert norms == pytest.approx([0.1] * 6, rel=1e-3)
    written = trainer.storage.history("grad_norm").values()
    assert [iteration for _, iteration in written] == [1, 3, 5]
    assert all(0.1 < norm < 100 for norm, _ in written)


def test_each_element_is_clipped_to_the_value() -> None:
    """max_value bounds single elements, of chosen parameters if there is a choice."""
    found = []
    model = Net()
    clip = hooks.GradientClip(max_value=1e-4, parameters=[model.last.bias])
    look = hooks.CallbackHook(after_backward=lambda t: found.append((t.model.last.bias.grad, t.model.norm.bias.grad)))
    build(clip, look, model=model).train(0, 1)
    assert float(found[0][0].abs().max()) == pytest.approx(1e-4)
    assert float(found[0][1].abs().max()) > 1e-4
    for options in ({}, {"max_norm": 1.0, "max_value": 1.0}):
        with pytest.raises(ValueError, match="one of max_norm and max_value"):
            hooks.GradientClip(**options)
    with pytest.raises(ValueError, match="a bound above 0, not -1"):
        hooks.GradientClip(-1)


# PreciseBN


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.5)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(batch)).square().mean()


def test_statistics_are_not_those_of_the_data() -> None:
    """Mean and unbiased variance of all values of all batches together, batches of any size; nothing else changes."""
    data = [torch.randn(size, 3, 4, 4, generator=torch.Generator().manual_seed(size)) * size for size in (2, 5, 3)]
    seed(1)
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = SimpleTrainer(model, [torch.randn(4, 3, 4, 4)], optimizer)
    precise = hooks.PreciseBN(0, model, data, 3)
    before: dict[str, Any] = {}

    def remember(trainer: Any) -> None:
        before.update(rng=torch.get_rng_state(), tracked=int(model.norm.num_batches_tracked))

    trainer.register_hooks([hooks.CallbackHook(after_step=remember), precise])
    trainer.train(0, 4)
    values = torch.cat([batch.transpose(0, 1).flatten(1) for batch in data], dim=1)
    assert torch.allclose(model.norm.running_mean, values.mean(1), atol=1e-5)
    assert torch.allclose(model.norm.running_var, values.var(1), rtol=1e-5)
    assert int(model.norm.num_batches_tracked) == before["tracked"] == 4
    assert torch.equal(torch.get_rng_state(), before["rng"])
    assert model.norm.momentum == 0.1


def test_layers_that_are_not_to_change(caplog: Any) -> None:
    """A frozen layer keeps its statistics; a model without layers is told; an exception leaves everything as it was."""
    model = Normed()
    model.norm.eval()
    mean = model.norm.running_mean.clone()
    hook = hooks.PreciseBN(0, model, [torch.randn(4, 3, 4, 4)], 2)
    build(hook).train(0, 1)
    assert torch.equal(model.norm.running_mean, mean)
    assert "no BatchNorm layer in training mode" in caplog.text
    model.norm.train()
    with pytest.raises(RuntimeError, match="running_mean should contain 2 elements"):
        build(hooks.PreciseBN(0, model, [torch.randn(4, 2, 4, 4)], 1)).train(0, 1)
    assert torch.equal(model.norm.running_mean, mean)
    assert not model.norm._forward_hooks


def test_the_loader_of_statistics_starts_over() -> None:
    """Its position is state."""

    def make() -> tuple[SimpleTrainer, ResumableLoader]:
        seed(1)
        model = Normed()
        loader = ResumableLoader(torch.randn(10, 3, 4, 4), 3)
        trainer = SimpleTrainer(model, [torch.randn(4, 3, 4, 4)], torch.optim.SGD(model.parameters(), lr=0.1))
        trainer.register_hooks([hooks.PreciseBN(2, model, loader, 2)])
        return trainer, loader

    trainer, _ = make()
    trainer.train(0, 2)
    resumed, loader = make()
    resumed.load_state_dict(through_a_file(trainer.state_dict()))
    resumed.train(2, 3)
    assert loader.batch == 4 % 4


# Timing, profiles, memory, callbacks, writers


def test_warm_up_is_timed(caplog: Any) -> None:
    """The first iterations of a training have no "time"."""
    caplog.set_level("INFO", "trainerd")
    trainer = build(hooks.IterationTimer(warmup_iter=2))
    trainer.train(0, 5)
    assert [iteration for _, iteration in trainer.storage.history("time").values()] == [2, 3, 4]
    assert "5 iterations in" in caplog.text
    with pytest.raises(ValueError, match="warmup_iter is -1"):
        hooks.IterationTimer(-1)


@pytest.mark.parametrize("kind", ["torch", "tensorboard", "autograd"])
def test_profiles_of_other_iterations(kind: str, tmp_path: pathlib.Path) -> None:
    """The chosen iterations have a trace that holds what was computed in them."""
    chosen = {
        "torch": lambda t: hooks.TorchProfiler(t, str(tmp_path), save_tensorboard=False),
        "tensorboard": lambda t: hooks.TorchProfiler(t, str(tmp_path)),
        "autograd": lambda t: hooks.AutogradProfiler(t, str(tmp_path)),
    }[kind](lambda trainer: trainer.iter in (1, 3))
    build(chosen).train(0, 5)
    traces = sorted(path for path in tmp_path.rglob("*.json"))
    assert len(traces) == 2
    if kind != "tensorboard":
        assert [path.name for path in traces] == ["profiler_iter1.json", "profiler_iter3.json"]
    events = json.loads(traces[0].read_text())
    names = {event.get("name") for event in (events if isinstance(events, list) else events["traceEvents"])}
    assert "aten::linear" in names


def test_a_failing_iteration_leaves_a_profiler_running(tmp_path: pathlib.Path) -> None:
    """after_train ends it, so the next training can be profiled."""

    def fail(trainer: Any) -> None:
        raise ZeroDivisionError

    profiler = hooks.AutogradProfiler(lambda trainer: trainer.iter == 0, str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        build(profiler, hooks.CallbackHook(after_backward=fail)).train(0, 1)
    build(profiler).train(0, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["profiler_iter0.json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without CUDA")
def test_memory_of_no_device(tmp_path: pathlib.Path, caplog: Any) -> None:
    """Without CUDA it says so and writes nothing."""
    caplog.set_level("INFO", "trainerd")
    build(hooks.TorchMemoryStats(str(tmp_path), step_period=1)).train(0, 2)
    assert "no CUDA device" in caplog.text
    assert not list(tmp_path.iterdir())


def test_memory_summaries_never_end(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """At most max_runs of them, counted across restarts. A mock: there is no CUDA device here to ask."""
    for name, value in (("max_memory_reserved", 0), ("max_memory_allocated", 0), ("memory_summary", "summary")):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    hook = hooks.TorchMemoryStats(str(tmp_path), step_period=2, max_runs=3)
    monkeypatch.setattr("trainerd.trainer.hooks.memory_stats.torch.cuda.is_available", lambda: True)
    trainer = build(hook)
    hook.trainer = trainer
    for trainer.iter in range(4):
        trainer.max_iter = 100
        hook.after_step()
    other = hooks.TorchMemoryStats(str(tmp_path), step_period=2, max_runs=3)
    other.trainer = trainer
    other.load_state_dict(hook.state_dict())
    for trainer.iter in range(4, 20):
        other.after_step()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "memory_iter1.txt",
        "memory_iter3.txt",
        "memory_iter5.txt",
    ]


def test_a_callback_is_missed() -> None:
    """Each moment calls its function with the trainer, in the order of an iteration."""
    calls = []
    names = ("before_train", "before_step", "after_backward", "after_step", "after_train")
    callbacks = {name: lambda trainer, name=name: calls.append((name, trainer.iter)) for name in names}
    build(hooks.CallbackHook(**callbacks)).train(0, 1)
    assert calls == [(name, 1 if name == "after_train" else 0) for name in names]
    with pytest.raises(TypeError, match="after_step is 3"):
        hooks.CallbackHook(after_step=3)  # type: ignore[arg-type]


def test_what_is_no_writer_is_noticed_at_the_first_write() -> None:
    """It is refused when the hook is made."""
    with pytest.raises(TypeError, match="EventWriter"):
        hooks.PeriodicWriter(["metrics.json"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="period is 0"):
        hooks.PeriodicWriter([EventWriter()], period=0)


# LRScheduler with a metric


def test_a_plateau_is_stepped_without_news() -> None:
    """ReduceLROnPlateau steps when a new value of its metric has come; killed and resumed, the rates are the same."""

    def make() -> SimpleTrainer:
        scores = [1.0, None, 1.0, 1.0, None, None, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0]
        trainer = build(Scores(scores))
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer, factor=0.5, patience=1)
        trainer.register_hooks([hooks.LRScheduler(plateau, metric="score")])
        return trainer

    expected = make()
    expected.train(0, 12)
    rates = [rate for rate, _ in expected.storage.history("lr").values()]
    assert rates == [0.05] * 4 + [0.025] * 6 + [0.0125] * 2
    for stop in range(1, 12):
        trainer = make()
        trainer.session = StopAt(stop)
        trainer.train(0, 12)
        resumed = make()
        resumed.load_state_dict(trainer.session.state)
        resumed.train(stop, 12)
        assert [rate for rate, _ in resumed.storage.history("lr").values()] == rates
        assert_same(through_a_file(resumed.state_dict()), through_a_file(expected.state_dict()))
    with pytest.raises(TypeError, match="name the scalar"):
        hooks.LRScheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(expected.optimizer))


def test_other_buffers_move_with_the_statistics() -> None:
    """Modules that change buffers in training mode, such as spectral_norm, are put back; a foreign position is none."""
    seed(1)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), nn.BatchNorm1d(3))
    trainer = build()
    hook = hooks.PreciseBN(0, model, batches(), 2)
    before = {name: value.clone() for name, value in model.named_buffers()}
    hook.trainer = trainer
    hook.update_stats()
    changed = {name for name, value in model.named_buffers() if not torch.equal(value, before[name])}
    assert changed == {"1.running_mean", "1.running_var"}
    other = hooks.PreciseBN(0, model, ResumableLoader(torch.randn(8, 4), 2), 2)
    with pytest.raises(StateMismatch, match="the data loader that was saved gave no state of its own"):
        other.load_state_dict(hook.state_dict())
