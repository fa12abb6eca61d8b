"""A character-level GPT that learns Python from the source files of the standard library.

    trainerd run examples/char_gpt/train.py:build_trainer --dir runs/a --max-iter 1200

trains it under the daemon; kill whatever you like meanwhile. The trainer needs no daemon, though:

    python examples/char_gpt/train.py                    # train here, and show what the model writes
    python examples/char_gpt/train.py --sample runs/a    # what the newest checkpoint of a run writes
"""

import argparse
import dataclasses
import pathlib
import random
import sysconfig

import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

from trainerd.trainer import HookBase, ResumableLoader, SimpleTrainer, hooks, seed_all_rng

# Text -----------------------------------------------------------------------------------------------------------

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
TOKEN_OF_BYTE = bytes(max(CHARACTERS.find(chr(byte)), 0) for byte in range(256))
TEXT_BYTES = 1_500_000
HELD_OUT_BYTES = 100_000


def encode(text):
    """Turn text into tokens; what is neither printable ASCII nor a line break becomes "?" or a line break."""
    tokens = bytearray(text.encode("ascii", "replace").translate(TOKEN_OF_BYTE))
    return torch.frombuffer(tokens, dtype=torch.uint8).long()


def decode(tokens):
    """Turn tokens back into text."""
    return "".join(CHARACTERS[token] for token in tokens)


def read_standard_library():
    """Return the beginning of all top-level modules of the standard library, in the order of their names."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    text = ""
    for path in sorted(folder.glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= TEXT_BYTES:
            break
    return text[:TEXT_BYTES]


class TextWindows:
    """Windows of `block_size + 1` tokens, one in each stretch of the text, at a place drawn anew in every epoch."""

    def __init__(self, tokens, block_size):
        self.tokens = tokens
        self.block_size = block_size

    def __len__(self):
        return len(self.tokens) // self.block_size - 1

    def __getitem__(self, index):
        # ResumableLoader seeds this draw from (seed, epoch, index): a resumed run cuts the same windows.
        start = index * self.block_size + random.randrange(self.block_size)
        return self.tokens[start : start + self.block_size + 1]


# Model ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each added to its input."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.network = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.network(x))

    def attention(self, x):
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))


class CharGPT(nn.Module):
    """Called with windows of text, it returns the mean loss of predicting each next character."""

    def __init__(self, block_size, width, depth, heads, dropout):
        super().__init__()
        self.block_size = block_size
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.positions = nn.Parameter(torch.zeros(block_size, width))
        self.blocks = nn.Sequential(*[Block(width, heads, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, len(CHARACTERS))
        self.apply(self.initialize)

    @staticmethod
    def initialize(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def logits(self, tokens):
        x = self.characters(tokens) + self.positions[: tokens.shape[1]]
        return self.out(self.norm(self.blocks(x)))

    def forward(self, windows):
        logits = self.logits(windows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def generate(trainer_or_model, prompt, length, seed=0):
    """Return `prompt` and `length` more characters; no random stream of the program moves."""
    model = getattr(trainer_or_model, "model", trainer_or_model)
    generator = torch.Generator().manual_seed(seed)
    tokens = encode(prompt).tolist()
    was_training = model.training
    model.eval()
    for _ in range(length):
        logits = model.logits(torch.tensor([tokens[-model.block_size :]]))[0, -1]
        probabilities = functional.softmax(logits / 0.8, dim=-1)
        tokens.append(torch.multinomial(probabilities, 1, generator=generator).item())
    model.train(was_training)
    return decode(tokens)


# Evaluation -----------------------------------------------------------------------------------------------------


class HeldOutLoss:
    """Measures the averaged weights, which predict better than the last ones, on text that is never trained on."""

    def __init__(self, ema, model, tokens):
        self.ema = ema
        size = model.block_size + 1
        self.windows = tokens[: len(tokens) // size * size].view(-1, size)[:256]

    @torch.no_grad()
    def __call__(self):
        with self.ema.averaged() as model:
            model.eval()
            loss = model(self.windows)
            model.train()
        return {"held_out_loss": loss}


# Trainer --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Config:
    """What the job's [config] table may say."""

    seed: int = 0
    batch_size: int = 24
    block_size: int = 64
    width: int = 64
    depth: int = 3
    heads: int = 4
    dropout: float = 0.1
    lr: float = 3e-3
    warmup: int = 50  # iterations until the learning rate is at its highest
    max_iter: int = 1200  # where the learning rate arrives at its lowest; say the same to `trainerd run --max-iter`
    eval_every: int = 100
    num_workers: int = 0


def read_config(table):
    """Return the Config that a table says; an error for a key that it does not have or a value of another type."""
    defaults = dataclasses.asdict(Config())
    for key, value in table.items():
        if key not in defaults:
            raise ValueError(f"unknown config key {key!r}; there are {', '.join(defaults)}")
        wanted = (int, float) if isinstance(defaults[key], float) else int
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise TypeError(f"config key {key!r} is {value!r}, but should be a number such as {defaults[key]}")
    config = Config(**table)
    if config.max_iter <= config.warmup:
        raise ValueError(f"max_iter ({config.max_iter}) must be more than warmup ({config.warmup})")
    return config


def build_trainer(config):
    """Return a trainer at its very beginning; two with the same config are identical."""
    config = read_config(config)
    seed_all_rng(config.seed)
    torch.set_num_threads(1)  # a model this small hardly gains from more, and loses much on a busy machine
    tokens = encode(read_standard_library())
    loader = ResumableLoader(
        TextWindows(tokens[:-HELD_OUT_BYTES], config.block_size),
        config.batch_size,
        shuffle=True,
        seed=config.seed,
        num_workers=config.num_workers,
        drop_last=True,
    )
    model = CharGPT(config.block_size, config.width, config.depth, config.heads, config.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.01)
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=config.warmup)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=config.max_iter - config.warmup, eta_min=config.lr / 20)
    schedule = lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[config.warmup])
    trainer = SimpleTrainer(model, loader, optimizer)
    ema = hooks.EMA(decay=0.99, warmup=True)
    trainer.register_hooks(
        [
            hooks.GradientClip(max_norm=1.0),
            hooks.LRScheduler(schedule),
            ema,
            hooks.EvalHook(config.eval_every, HeldOutLoss(ema, model, tokens[-HELD_OUT_BYTES:])),
            hooks.BestCheckpointer(config.eval_every, None, "held_out_loss", mode="min"),
        ]
    )
    return trainer


# Without the daemon ---------------------------------------------------------------------------------------------


class PrintLosses(HookBase):
    """Prints the losses now and then."""

    def after_step(self):
        if (self.trainer.iter + 1) % 100 == 0:
            latest = {name: value for name, (value, _) in self.trainer.storage.latest().items()}
            held_out = f"  held out {latest['held_out_loss']:.3f}" if "held_out_loss" in latest else ""
            print(f"iteration {self.trainer.iter + 1:5d}  loss {latest['total_loss']:.3f}{held_out}", flush=True)


def sample(folder):
    """Print what the newest checkpoint of a run writes; a run with another config than the default does not fit."""
    from trainerd.checkpoint import CheckpointStore, open_storage

    loaded = CheckpointStore(open_storage(folder)).load()
    if loaded is None:
        raise SystemExit(f"{folder} has no checkpoint yet.")
    trainer = build_trainer({})
    trainer.model.load_state_dict(loaded.state["model"])
    print(f"step {loaded.step}:\n{generate(trainer, 'def ', 400)}")


def main():
    """Train in this process, or sample from a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", metavar="DIR", help="print what the newest checkpoint of a run writes")
    parser.add_argument("--max-iter", type=int, default=600, help="iterations to train (default: 600)")
    arguments = parser.parse_args()
    if arguments.sample:
        sample(arguments.sample)
        return
    trainer = build_trainer({"max_iter": arguments.max_iter})
    trainer.register_hooks([PrintLosses()])
    print(f"before:\n{generate(trainer, 'def ', 200)}\n")
    trainer.train(0, arguments.max_iter)
    print(f"\nafter:\n{generate(trainer, 'def ', 400)}")


if __name__ == "__main__":
    main()
