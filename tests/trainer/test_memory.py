"""A long training grows nothing, and a dropped trainer is gone at once."""

import gc
import json
import os
import pathlib
import subprocess
import sys
import weakref

import pytest
import torch._dynamo  # noqa: F401 - imported by the first optimizer, it would keep the frame that made it
from support.exactness import build

SCRIPT = """
import gc, json, pathlib, psutil, sys, torch
from support.exactness import build

torch.set_num_threads(1)
trainer = build(pathlib.Path(sys.argv[1]), optimizer="adamw_foreach", late=True)
readings = []
for end in (4_000, 14_000):
    trainer.train(trainer.step, end)
    assert trainer.step == end
    gc.collect()
    readings.append((len(gc.get_objects()), psutil.Process().memory_info().rss))
print(json.dumps(readings))
"""


@pytest.mark.timeout(600)
def test_a_long_training_grows(tmp_path: pathlib.Path) -> None:
    """Ten thousand iterations with all hooks leave no more objects, and no memory beyond an allocator's breathing."""
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (objects_before, bytes_before), (objects, used_bytes) = json.loads(done.stdout)
    assert objects - objects_before < 200
    # The allocator breathes by some 2 MB; a leak of 400 bytes an iteration would be 4.
    assert used_bytes - bytes_before < 4_000_000


@pytest.mark.parametrize("precision", ["", "bfloat16"])
def test_a_dropped_trainer_stays(precision: str, tmp_path: pathlib.Path) -> None:
    """Without the garbage collector `del trainer` frees it and its hooks: there is no cycle between them."""
    gc.collect()
    gc.disable()
    try:
        trainer = build(tmp_path, precision=precision, workers=1)
        trainer.train(0, 9)
        trainer.state_dict()
        gone = [weakref.ref(trainer), *map(weakref.ref, trainer._hooks)]
        del trainer
        assert [ref for ref in gone if ref() is not None] == []
    finally:
        gc.enable()
