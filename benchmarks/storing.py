"""Saving and loading a gigabyte, side by side with the raw disk and with what people use otherwise.

Medians of rounds in turn, so that a drift of the machine touches all; quote the ratios.
"""

import mmap
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from trainerd.checkpoint import CheckpointStore, Keep, RunOwner, open_storage
from trainerd.checkpoint.tensor_values import memory_view

ROUNDS = int(os.environ.get("TRAINERD_BENCH_ROUNDS", "7"))
PARAMETERS = 160 // 4  # each with its value, its gradient's two moments, and a step
ROWS = 1_000_000_000 // (PARAMETERS * 3 * 4 * 1024)
WRITE_BLOCK = 8 * 2**20
READ_BLOCK = 2 * 2**20


def main():
    work = pathlib.Path(tempfile.mkdtemp(prefix="trainerd-bench.", dir=os.environ.get("TMPDIR", "/var/tmp")))
    try:
        state = adamw_state()
        total = sum(t.numel() * t.element_size() for t in tensors_of(state))
        print(f"a state of {total / 1e9:.2f} GB: {len(tensors_of(state))} tensors, {ROUNDS} rounds", flush=True)
        saving(work, state, total)
        loading(work, state)
    finally:
        shutil.rmtree(work)


def adamw_state():
    torch.manual_seed(0)
    model = {f"blocks.{i}.weight": torch.randn(ROWS, 1024) for i in range(PARAMETERS)}
    moments = {name: {"step": torch.tensor(1.0), "exp_avg": p * 0.1, "exp_avg_sq": p * p} for name, p in model.items()}
    return {"model": model, "optimizer": {"state": moments, "param_groups": [{"lr": 1e-3}]}}


def tensors_of(node):
    if isinstance(node, torch.Tensor):
        return [node]
    items = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


def flat(state):
    """Safetensors and torch.distributed.checkpoint take names and tensors."""
    moments = state["optimizer"]["state"]
    return {f"model.{name}": tensor for name, tensor in state["model"].items()} | {
        f"optimizer.{name}.{part}": tensor for name, parts in moments.items() for part, tensor in parts.items()
    }


def saving(work, state, total):
    run = work / "run"
    owner = RunOwner.acquire(open_storage(str(run)))
    store = CheckpointStore(open_storage(str(run)), term=owner.ensure_term(0), keep=Keep(last=1))
    steps = iter(range(1, 1000))
    named = flat(state)

    def ours():
        return store.save(next(steps), state).seconds  # until it is durable; deleting the one before comes after

    def safetensors_fsync():
        safetensors.torch.save_file(named, work / "st")
        fsync(work / "st")

    def torch_fsync():
        torch.save(state, work / "pt")
        fsync(work / "pt")

    ways = {
        "write + fsync, preallocated": lambda: raw_write(work / "raw", state, total),
        "O_DIRECT from aligned memory": lambda: raw_direct(work / "raw", total),
        "trainerd, hashed and committed": ours,
        "safetensors + fsync": safetensors_fsync,
        "torch.save + fsync": torch_fsync,
        "torch.distributed.checkpoint": lambda: dcp.save(named, checkpoint_id=work / "dcp", no_dist=True),
    }

    def between():
        for tensor in tensors_of(state):
            tensor.add_(1)  # a step: no tensor is as it was
        for name in ("raw", "st", "pt"):
            (work / name).unlink(missing_ok=True)
        shutil.rmtree(work / "dcp", ignore_errors=True)
        os.sync()

    seconds, memory = rounds(ways, between)
    best = min(list(seconds.values())[:2])
    report("durable save", seconds, memory, best, "of the better raw write")
    ours()
    frozen = timed(ours)
    print(f"{'trainerd, nothing changed':<36}{frozen:>9.3f} s", flush=True)
    owner.release()


def loading(work, state):
    run = str(work / "run")
    store = CheckpointStore(open_storage(run))
    store.load(into=state)
    named = flat(state)
    safetensors.torch.save_file(named, work / "st")
    torch.save(state, work / "pt")
    files = sorted(pathlib.Path(run).rglob("*.safetensors"))
    everything = [*files, work / "st", work / "pt"]
    newest = store.list()[-1]
    ways = {
        "preadv into the same + xxh3": lambda: raw_read(files, state),
        "trainerd, into live tensors": lambda: store.load(into=state),
        "trainerd, new tensors": store.load,
        "torch.load": lambda: torch.load(work / "pt", weights_only=True),
        "torch.load, mmap, all touched": lambda: touch(torch.load(work / "pt", weights_only=True, mmap=True)),
        "safetensors, all touched": lambda: touch(safetensors.torch.load_file(work / "st")),
    }
    for file in everything:
        fsync(file)

    def cool():
        for file in everything:
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    assert newest.state == "valid"
    for title, between in (("warm", lambda: None), ("cold", cool)):
        seconds, memory = rounds(ways, between)
        report(f"load, {title}", seconds, memory, next(iter(seconds.values())), "of preadv + xxh3")


def rounds(ways, between):
    """Median seconds and greatest extra memory of each way, one after the other, round by round."""
    seconds = {name: [] for name in ways}
    memory = dict.fromkeys(ways, 0)
    for number in range(1 + ROUNDS):
        for name, way in ways.items():
            between()
            before = reset_peak()
            taken = timed(way)
            if number:  # the first round warms up
                seconds[name].append(taken)
                memory[name] = max(memory[name], peak() - before)
    return {name: statistics.median(times) for name, times in seconds.items()}, memory


def report(title, seconds, memory, floor, of):
    print(f"\n{title:<36}{'seconds':>9}{'ratio ' + of:>32}{'extra memory':>16}")
    for name, value in seconds.items():
        print(f"{name:<36}{value:>9.3f}{value / floor:>32.2f}{memory[name] / 1e6:>13.0f} MB", flush=True)


def timed(function):
    """Seconds that a call took, or that it says it took."""
    began = time.perf_counter()
    told = function()
    return told if isinstance(told, float) else time.perf_counter() - began


def reset_peak():
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def fsync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def raw_write(path, state, total):
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.posix_fallocate(descriptor, 0, total)
    for tensor in tensors_of(state):
        memory = memory_view(tensor)
        while memory:
            memory = memory[os.write(descriptor, memory[:WRITE_BLOCK]) :]
    os.fsync(descriptor)
    os.close(descriptor)


def raw_direct(path, total):
    memory = memoryview(mmap.mmap(-1, WRITE_BLOCK))
    memory[:] = os.urandom(WRITE_BLOCK)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    os.posix_fallocate(descriptor, 0, total)
    for offset in range(0, total, WRITE_BLOCK):
        os.pwrite(descriptor, memory, offset)
    os.ftruncate(descriptor, total)
    os.fsync(descriptor)
    os.close(descriptor)


def raw_read(files, state):
    """Read as many bytes as the tensors have from the files straight into them, by two threads, and hash them."""
    memories = [memory_view(tensor) for tensor in tensors_of(state)]
    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
    jobs, which, offset = [], 0, 0
    for memory in memories:
        if offset + len(memory) > sizes[which]:
            which, offset = which + 1, 0
        jobs.append((descriptors[which], offset, memory))
        offset += len(memory)

    def read(job):
        descriptor, offset, memory = job
        digest = xxhash.xxh3_128()
        for start in range(0, len(memory), READ_BLOCK):
            part = memory[start : start + READ_BLOCK]
            os.preadv(descriptor, [part], offset + start)
            digest.update(part)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, jobs))
    for descriptor in descriptors:
        os.close(descriptor)


def touch(node):
    for tensor in tensors_of(node):
        tensor.sum()


if __name__ == "__main__":
    main()
