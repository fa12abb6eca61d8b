"""Checkpoints as other programs write them, made by these programs where they are installed."""

import json
import os
import subprocess
import sys

import safetensors.torch
import torch
from torch import nn


def network():
    """BatchNorm for its buffers; two layers of one shape, which only names tell apart."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


class Model(nn.Module):
    """What our trainer trains; `net` also is the name under which the Lightning module below has it."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, batch):
        return (self.net(batch) - batch).square().mean()


def optimizer_of(model, groups=1):
    parameters = list(model.parameters())
    if groups == 1:
        return torch.optim.AdamW(parameters, lr=0.01)
    matrices = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1}
    return torch.optim.AdamW([matrices, {"params": [p for p in parameters if p.dim() < 2]}], lr=0.01)


def trained(steps=5, groups=1):
    """A model, its optimizer and its scheduler after some steps."""
    torch.manual_seed(0)
    model = Model()
    optimizer = optimizer_of(model, groups)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def fvcore_folder(folder, **more):
    """As fvcore's Checkpointer writes it: a file, and `last_checkpoint` with its name."""
    model, optimizer, scheduler = trained()
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    values = {name: part.state_dict() for name, part in parts.items()}
    folder.mkdir()
    torch.save({**values, "iteration": 4, **more}, folder / "model_0000004.pth")
    (folder / "last_checkpoint").write_text("model_0000004.pth")
    return model, optimizer


def detectron2_file(path):
    """As detectron2's DefaultTrainer has it saved: the trainer's state beside the model."""
    model, optimizer, scheduler = trained()
    inner = {"iteration": 4, "optimizer": optimizer.state_dict()}
    trainer = {"iteration": 4, "hooks": {"LRScheduler": scheduler.state_dict()}, "_trainer": inner}
    torch.save({"model": model.state_dict(), "trainer": trainer, "iteration": 4}, path)
    return model, optimizer


def hugging_face_folder(folder, *, sharded=False):
    """As transformers' Trainer lays out `checkpoint-5`, built by hand from its documentation: it is not installed."""
    model, optimizer, scheduler = trained(groups=2)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    folder.mkdir()
    if sharded:
        names = list(weights)
        shards = {"model-00001-of-00002.safetensors": names[:4], "model-00002-of-00002.safetensors": names[4:]}
        for file, inside in shards.items():
            safetensors.torch.save_file({n: weights[n] for n in inside}, folder / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: file for file, inside in shards.items() for name in inside}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    import random

    import numpy as np

    random_states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    torch.save(random_states, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 5, "epoch": 0.5, "log_history": []}))
    (folder / "config.json").write_text("{}")
    (folder / "training_args.bin").write_bytes(b"a pickle of a class")
    return model, optimizer


_LIGHTNING = """
import sys, warnings
warnings.simplefilter("ignore")
import lightning, torch
from support.foreign import network

class Module(lightning.LightningModule):
    def __init__(self, width=4):
        super().__init__()
        self.save_hyperparameters()
        self.net = network()

    def training_step(self, batch, _):
        return (self.net(batch) - batch).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": sys.argv[2]}}

lightning.seed_everything(0)
data = torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=4)
trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)
module = Module()
trainer.fit(module, data)
trainer.save_checkpoint(sys.argv[1])
torch.save({"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}, sys.argv[1] + ".truth")
"""


def lightning_file(path, interval="step"):
    """A real one, of 6 steps in 2 epochs; what its module and optimizer were lies beside it in `*.truth`."""
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", _LIGHTNING, str(path), interval],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(f"{path}.truth", weights_only=True)
