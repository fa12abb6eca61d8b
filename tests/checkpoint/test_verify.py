"""Verifying reads what several checkpoints share once, and tells how far it is."""

import pytest
import torch

from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.retention import Keep
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore
from trainerd.checkpoint.verifying import verify_checkpoints
from trainerd.daemon.console import ProgressBar


@pytest.fixture
def run(tmp_path):
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    store = CheckpointStore(storage, term=owner.ensure_term(0), keep=Keep(last=9))
    for step in (1, 2, 3):
        store.save(step, {"frozen": torch.arange(200_000.0), "w": torch.full((1000,), float(step))})
    owner.release()
    return tmp_path / "run"


def test_shared_data_are_read_once_and_progress_reaches_its_end(run):
    """Three checkpoints of 800 kB that share all but 4 kB."""
    told = []
    infos = list(verify_checkpoints(open_storage(str(run)), progress=lambda done, total: told.append((done, total))))
    assert [info.state for info in infos] == ["valid"] * 3
    assert told[-1][0] == 800_000 + 3 * 4_000
    assert told[-1][0] <= told[-1][1] < 820_000


def test_damage_in_a_shared_file_is_told_of_every_checkpoint_that_needs_it(run):
    """None of them can be resumed from."""
    file = run / "checkpoints/step-000000001.t1/r00000-0000.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    infos = list(verify_checkpoints(open_storage(str(run))))
    assert [info.state for info in infos] == ["damaged"] * 3
    assert all("frozen" in info.reason for info in infos)


def test_the_bar_shows_share_rate_and_time_left(monkeypatch, capsys):
    """On a terminal; elsewhere nothing."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    times = iter([0.0, 10.0])
    ProgressBar("verifying runs/a", lambda: next(times)).show(250_000_000, 1_000_000_000)
    shown = capsys.readouterr().err
    assert "25% of 1.0 GB, 25.0 MB/s, 30 s left" in shown
