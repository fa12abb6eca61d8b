"""Runs whose newer checkpoint a test forges: sealed again, so that its hash is right."""

import collections
import datetime
import json
import pathlib
import zoneinfo

import numpy as np
import torch
from support.user_values import Color, Level, Plain, Point

from trainerd.checkpoint import envelope
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.retention import Keep
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore

NAME = CheckpointName(2, 1)


def state_of(step):
    """A state of every kind of node that the fuzzer may bend."""
    weight = torch.full((4, 3), float(step))
    return {
        "model": {"w": weight, "tied": weight, "p": torch.nn.Parameter(torch.ones(2)), "t": torch.randn(3, 2).t()},
        "sparse": [torch.eye(3).to_sparse(), torch.eye(4).to_sparse_csr(), torch.eye(4).to_sparse_bsc((2, 2))],
        "quantized": [
            torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 3, torch.qint8),
            torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.quint8),
        ],
        "numpy": [
            np.arange(6).reshape(2, 3),
            np.float32(1),
            np.zeros(2, [("a", "i4"), ("b", "f8", (2,))]),
            np.str_("x"),
        ],
        "random": [np.random.default_rng(1), np.random.Generator(np.random.Philox(1)), np.random.RandomState(1)],
        "torch": [torch.Generator().manual_seed(1), torch.Size([1]), torch.float32, torch.device("cpu")],
        "times": [
            datetime.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
            datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
            datetime.date(2026, 1, 1),
            datetime.timedelta(1),
        ],
        "classes": [Color.RED, Level.HIGH, Point(1, 2), Plain(3)],
        "containers": [
            {1: 2, "1": 3, (1, None): 4},
            collections.OrderedDict(a=1),
            collections.Counter("ab"),
            collections.defaultdict(list, a=[1]),
            collections.deque([1], maxlen=2),
            {1, 2},
            frozenset("ab"),
            (1, (2,)),
        ],
        "values": [
            2**80,
            float("nan"),
            "\ud800",
            b"x",
            bytearray(b"y"),
            1j,
            range(3),
            slice(1),
            pathlib.Path("a"),
            None,
        ],
    }


def make_run(root):
    """A run with the checkpoints 1 and 2; `NAME` is the newer one."""
    storage = open_storage(str(root))
    owner = RunOwner.acquire(storage)
    store = CheckpointStore(storage, term=owner.ensure_term(0), keep=Keep(last=9))
    for step in (1, 2):
        store.save(step, state_of(step))
    owner.release()
    return root


def body_of(run):
    return json.loads((run / NAME.manifest).read_bytes())["body"]


def seal(run, body, path=NAME.manifest):
    (run / path).write_bytes(envelope.seal(body))
