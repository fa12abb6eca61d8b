"""Saving to and loading from an S3 server on this machine (moto), side by side with bare requests of the same bytes.

The server runs on the same cores, so these are lower bounds of both; quote the ratios.
"""

import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import s3fs
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from support.servers import Servers

from trainerd.checkpoint import CheckpointStore, Keep, RunOwner, open_storage

TENSORS = 16
BYTES = 256 * 2**20
OBJECT = 16 * 2**20
ROUNDS = 5


def main():
    work = pathlib.Path(tempfile.mkdtemp(prefix="trainerd-bench.", dir="/var/tmp"))
    servers = Servers(work)
    try:
        place = servers.place("s3")
        filesystem = s3fs.S3FileSystem(**place.options, skip_instance_cache=True, use_listings_cache=False)
        storage = open_storage(place.url, place.options)
        owner = RunOwner.acquire(storage)
        store = CheckpointStore(storage, term=owner.ensure_term(0), keep=Keep(last=1))
        state = {f"w{i}": torch.randn(BYTES // TENSORS // 4) for i in range(TENSORS)}
        body = b"\1" * OBJECT
        names = [f"{place.url}-bare/{i}" for i in range(BYTES // OBJECT)]
        steps = iter(range(1, 1000))
        with ThreadPoolExecutor(4) as pool:
            ways = {
                "pipe_file, one after the other": lambda: [filesystem.pipe_file(name, body) for name in names],
                "pipe_file, four at once": lambda: list(pool.map(lambda name: filesystem.pipe_file(name, body), names)),
                "trainerd save, until committed": lambda: store.save(next(steps), state).seconds,
                "cat_file, one after the other": lambda: [filesystem.cat_file(name) for name in names],
                "cat_file, four at once": lambda: list(pool.map(filesystem.cat_file, names)),
                "trainerd load, verified": store.load,
            }
            seconds = {name: [] for name in ways}
            for number in range(1 + ROUNDS):
                for tensor in state.values():
                    tensor.add_(1)
                for name, way in ways.items():
                    began = time.perf_counter()
                    told = way()
                    taken = told if isinstance(told, float) else time.perf_counter() - began
                    if number:
                        seconds[name].append(taken)
        print(f"{BYTES >> 20} MiB in objects of {OBJECT >> 20} MiB, medians of {ROUNDS} rounds")
        for name, times in seconds.items():
            print(f"{name:<36}{BYTES / 1e6 / statistics.median(times):>8.0f} MB/s", flush=True)
        owner.release()
    finally:
        servers.close()
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
