"""Looking into a checkpoint of a gigabyte, side by side with torch.load.

Times are medians of runs in turn, so that a drift of the machine touches both sides; quote the ratios.
"""

import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

TRAINERD = os.path.join(os.path.dirname(sys.executable), "trainerd")
STATE_BYTES = 1_000_000_000
ROUNDS = 5

MAKE_STATE = """
import sys, torch
from trainerd.checkpoint import CheckpointStore, RunOwner, open_storage
run, file, total = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
rows = total // (40 * 4 * 1024 * 3)
model = {f"blocks.{i}.weight": torch.randn(rows, 1024) for i in range(40)}
moments = {}
for i, p in enumerate(model.values()):
    moments[i] = {"step": torch.tensor(1.0), "exp_avg": p * 0.1, "exp_avg_sq": p * p}
state = {"model": model, "optimizer": {"state": moments, "param_groups": [{"lr": 1e-3, "params": list(range(40))}]}}
state["hooks"] = {"LRScheduler": {"last_epoch": 7}}
owner = RunOwner.acquire(open_storage(run))
CheckpointStore(open_storage(run), term=owner.ensure_term(0)).save(1, state)
owner.release()
torch.save(state, file)
"""

# The question that people have: what is in the hook's state?
TORCH_LOAD = "import sys, torch; print(torch.load(sys.argv[1], weights_only=True, mmap={mmap})['hooks'])"


def main():
    work = pathlib.Path(tempfile.mkdtemp(prefix="trainerd-bench.", dir=os.environ.get("TMPDIR", "/var/tmp")))
    try:
        run, file = work / "run", work / "state.pt"
        print(f"a state of {STATE_BYTES / 1e9:.1f} GB: 120 tensors and AdamW's steps", flush=True)
        subprocess.run([sys.executable, "-c", MAKE_STATE, run, file, str(STATE_BYTES)], check=True)
        commands = {
            "trainerd --help": [TRAINERD, "--help"],
            "python -c pass (the floor)": [sys.executable, "-c", "pass"],
            "trainerd list": [TRAINERD, "list", run],
            "trainerd inspect": [TRAINERD, "inspect", run],
            "trainerd inspect ... hooks": [TRAINERD, "inspect", run, "hooks"],
            "torch.load": [sys.executable, "-c", TORCH_LOAD.format(mmap=False), file],
            "torch.load, mmap": [sys.executable, "-c", TORCH_LOAD.format(mmap=True), file],
        }
        seconds = timed(commands)
        print(f"\n{'command, as a whole process':<32}{'seconds':>10}{'bytes read of the state':>26}")
        for name, command in commands.items():
            print(f"{name:<32}{seconds[name]:>10.3f}{bytes_read(command, work):>26}", flush=True)
        ratio = seconds["torch.load"] / seconds["trainerd inspect"]
        print(f"\ntorch.load takes {ratio:.1f} times the time of trainerd inspect")
    finally:
        shutil.rmtree(work)


def timed(commands):
    """Median wall seconds of each command, run in turn after a warm-up."""
    taken = {name: [] for name in commands}
    for _ in range(1 + ROUNDS):
        for name, command in commands.items():
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def bytes_read(command, folder):
    """What the command read of files below a folder, as strace saw it; memory-mapped pages are not reads."""
    if not shutil.which("strace"):
        return "(needs strace)"
    log = folder / "strace.log"
    calls = "trace=read,pread64,readv,preadv,preadv2,mmap"
    subprocess.run(["strace", "-f", "-y", "-e", calls, "-o", log, *command], check=True, stdout=subprocess.DEVNULL)
    total, mapped = 0, False
    for line in log.read_text(errors="replace").splitlines():
        if f"<{folder}" in line and (result := re.search(r"= (\d+|0x[0-9a-f]+)$", line)):
            if " mmap(" in line:
                mapped = True
            else:
                total += int(result[1], 0)
    return f"{total:,}" + (" + a memory map" if mapped else "")


if __name__ == "__main__":
    main()
