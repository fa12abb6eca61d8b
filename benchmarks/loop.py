"""What the training loop itself costs: microseconds per iteration beside a bare loop and Lightning.

Every round runs each loop once, in turn, so that a drift of the machine touches all; what is shown are medians over the
rounds, and differences within a round. The scheduler is stepped in every loop, the bare one included. Of the five hooks
one steps it and four do nothing; the usual five write a rate and a time in every iteration, and the bare loop does not.
"""

import contextlib
import logging
import os
import statistics
import sys
import time
import warnings

import torch
from torch import nn

from trainerd.trainer import SimpleTrainer, hooks

ITERATIONS = 2000
WARM_UP = 200
ROUNDS = 7
BATCH = torch.randn(8, 16)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch):
        return {"loss": self.net(batch).square().mean()}


class Endless:
    def __iter__(self):
        while True:
            yield BATCH


def parts():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10**9)


def bare():
    model, optimizer, scheduler = parts()

    def run(iterations):
        data = iter(Endless())
        for _ in range(iterations):
            loss = model(next(data))["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

    return run


class Quiet(hooks.HookBase):
    pass


def usual(scheduler):
    return [
        hooks.LRScheduler(scheduler),
        hooks.IterationTimer(),
        hooks.EvalHook(10**9, lambda: None, eval_after_train=False),
        hooks.CallbackHook(after_step=lambda _trainer: None),
        hooks.PeriodicWriter([], period=20),
    ]


def quiet(scheduler):
    step = hooks.CallbackHook(after_step=lambda _trainer: scheduler.step())
    return [step, Quiet(), Quiet(), Quiet(), Quiet()]


def ours(period, five=quiet, late=False):
    model, optimizer, scheduler = parts()
    trainer = SimpleTrainer(model, Endless(), optimizer, gather_metric_period=period, async_write_metrics=late)
    trainer.register_hooks(five(scheduler))
    return lambda iterations: trainer.train(trainer.step, trainer.step + iterations)


def lightning(every):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, _):
            loss = self.model(batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10**9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Silent(lightning.pytorch.loggers.logger.DummyLogger):
        def log_metrics(self, *args, **kwargs):
            pass

    module = Module()
    callbacks = [lightning.Callback() for _ in range(5)]

    def run(iterations):
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=iterations,
            logger=Silent(),
            log_every_n_steps=every,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
        )
        trainer.fit(module, Endless())

    return run


@contextlib.contextmanager
def silence():
    """Lightning prints at every start."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1), os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept[0], 1), os.dup2(kept[1], 2)


def main():
    torch.set_num_threads(1)
    loops = {
        "bare loop (the floor)": bare(),
        "trainerd, metrics every 20": ours(20),
        "trainerd, metrics every step": ours(1),
        "trainerd, every step, async_write_metrics": ours(1, late=True),
        "trainerd, usual hooks, metrics every 20": ours(20, usual),
        "trainerd, usual hooks, metrics every step": ours(1, usual),
    }
    try:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
        loops["Lightning, log every 20"] = lightning(20)
        loops["Lightning, log every step"] = lightning(1)
    except ImportError:
        print("(Lightning is not installed: pip install 'trainerd[bench]')")
    taken = {name: [] for name in loops}
    with silence():
        for run in loops.values():
            run(WARM_UP)
        for _ in range(ROUNDS):
            for name, run in loops.items():
                began = time.perf_counter()
                run(ITERATIONS)
                taken[name].append((time.perf_counter() - began) / ITERATIONS * 1e6)
    floor = next(iter(taken.values()))
    print(f"\n{'loop: tiny model, SGD, five hooks':<44}{'us/iteration':>14}{'over the floor':>16}")
    for name, times in taken.items():
        over = statistics.median(one - least for one, least in zip(times, floor, strict=True))
        print(f"{name:<44}{statistics.median(times):>14.1f}{over:>16.1f}", flush=True)


if __name__ == "__main__":
    main()
