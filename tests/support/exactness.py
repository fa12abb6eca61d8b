"""The trainers of the exactness tests: every combination of parts that users meet."""

import pathlib
import random
from typing import Any

import numpy as np
import torch
from support.trainers import seed
from torch import nn
from torch.optim import lr_scheduler

from trainerd.trainer import AMPTrainer, JSONWriter, ResumableLoader, SimpleTrainer, hooks, late_metrics

EPOCH = 7  # batches
STEPS = 3 * EPOCH


class Samples(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Samples with augmentation from every global stream."""

    def __len__(self) -> int:
        return 4 * EPOCH - 1

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = random.random() + float(np.random.rand()) + torch.rand(4)
        return index, torch.full((4,), float(index) / 28) + 0.1 * noise


class Net(nn.Module):
    """Dropout, BatchNorm, tied weights, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.frozen = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.drop(self.norm(self.first(x))).relu()))


class Task(nn.Module):
    """Returns the losses and remembers which samples it saw in this iteration."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.seen: list[int] = []

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        ids, x = batch
        self.seen += ids.tolist()
        out = self.net(x)
        return {"fit": (out - x).square().mean(), "size": 0.01 * out.abs().mean()}


class ForgetSeen(hooks.HookBase):
    def before_step(self) -> None:
        self.trainer.model.seen = []


def evaluate(model: Task) -> dict[str, Any]:
    """An evaluation that switches modes and draws random numbers."""
    model.eval()
    with torch.no_grad():
        out = model.net(torch.rand(5, 4))
    model.train()
    return {"validation": {"size": float(out.abs().mean())}}


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}

SCHEDULERS: dict[str, Any] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1, cycle_momentum=False),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=5, T_mult=2),
    "warmup": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.StepLR(o, 3, 0.7)], milestones=[4]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1, threshold=0.5),
}


def optimizers(name: str, model: Task) -> Any:
    net: Any = model.net
    if name != "two":
        return OPTIMIZERS[name]([p for p in net.parameters() if p.requires_grad])
    return {
        "sgd": torch.optim.SGD([net.first.weight, net.first.bias], lr=0.05, momentum=0.9),
        "adamw": torch.optim.AdamW([*net.norm.parameters(), net.last.bias], lr=0.01),
    }


def build(
    folder: pathlib.Path,
    *,
    optimizer: str = "sgd",
    scheduler: str = "cosine",
    workers: int = 0,
    precision: str = "",
    accumulate: int = 1,
    backend: str = "",
    late: bool = False,
) -> SimpleTrainer:
    seed(1)
    if late:
        late_metrics.must_wait = lambda _losses: True  # as on a device that computes beside us
    net: Any = Net()
    model = Task(torch.compile(net, backend=backend, dynamic=False) if backend else net)
    loader = ResumableLoader(Samples(), 4, shuffle=True, seed=5, num_workers=workers)
    options: dict[str, Any] = {"gradient_accumulation_steps": accumulate, "async_write_metrics": late}
    made = optimizers(optimizer, model)
    if precision:
        options["precision"] = getattr(torch, precision)
        if precision == "float16":
            options["grad_scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=5)
        trainer: SimpleTrainer = AMPTrainer(model, loader, made, **options)
    else:
        trainer = SimpleTrainer(model, loader, made, **options)
    each = made.values() if isinstance(made, dict) else [made]
    metric = {"metric": "validation/size"} if scheduler == "plateau" else {}
    trainer.register_hooks(
        [
            ForgetSeen(),
            hooks.GradientClip(max_norm=0.5),
            hooks.EMA(0.9, warmup=True),
            hooks.EvalHook(4, lambda: evaluate(model)),
            *(
                hooks.LRScheduler(one, SCHEDULERS[scheduler](one), scalar=f"lr_{i}", **metric)
                for i, one in enumerate(each)
            ),
            hooks.BestCheckpointer(4, None, "validation/size", "min"),
            hooks.EarlyStopping("validation/size", 10**6),
            hooks.PreciseBN(9, model, ResumableLoader(Samples(), 4, seed=6), 2),
            hooks.IterationTimer(),
            hooks.PeriodicWriter([JSONWriter(folder / "metrics.json", 3)], period=4),
        ]
    )
    return trainer
