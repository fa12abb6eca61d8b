"""The daemon reads what is stored beside the training, tells of damage, and the next checkpoint is whole by itself."""

from support.runs import TINY, Run, write_target

from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.verifying import verify_checkpoints

FROZEN = TINY.replace(
    "        self.layer = torch.nn.Linear(4, 4)\n",
    "        self.layer = torch.nn.Linear(4, 4)\n        self.register_buffer('table', torch.arange(5000.0))\n",
)


def test_damage_that_comes_while_a_training_runs_spoils_no_later_checkpoint(tmp_path):
    """A byte of the frozen table flips after step 5; the checkpoint of step 10 has the table for itself."""
    folder = tmp_path / "run"
    flags = ["--checkpoint-scrub", "1 TB/h", "--checkpoint-keep", "last=9"]
    with Run(write_target(tmp_path, FROZEN), folder, *flags, max_iter=10, hold_at=7) as run:
        run.wait_for("holding step")
        [file] = (folder / "checkpoints/step-000000005.t1").glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        run.wait_for(r"DAMAGE: checkpoints/step-000000005\.t1/r00000-0000\.safetensors is damaged: model\.table", 150)
        (tmp_path / "step.go").touch()
        assert run.wait() == 0, run.text
    states = {info.step: info.state for info in verify_checkpoints(open_storage(str(folder)))}
    assert states == {5: "damaged", 10: "valid"}


def test_scrubbing_can_be_switched_off(tmp_path):
    """Nobody reads anything then."""
    with Run(write_target(tmp_path), tmp_path / "run", "--checkpoint-scrub", "off", max_iter=3) as run:
        assert run.wait() == 0, run.text
