"""A run of ten thousand checkpoints: what a resume, a save and a listing cost."""

import pathlib
import shutil
import tempfile
import time

import msgspec
import torch

from trainerd.checkpoint import CheckpointStore, Keep, RunOwner, list_checkpoints, open_storage
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.manifest import parse_manifest, seal_manifest

CHECKPOINTS = 10_000


class CountingStorage:
    """The real storage, which counts the manifests that are read."""

    def __init__(self, storage):
        self._storage = storage
        self.manifests = 0

    def __getattr__(self, name):
        return getattr(self._storage, name)

    def read(self, path, *rest):
        self.manifests += path.endswith("manifest.json")
        return self._storage.read(path, *rest)


def main():
    work = pathlib.Path(tempfile.mkdtemp(prefix="trainerd-bench.", dir="/var/tmp"))
    try:
        state = {f"w{i}": torch.full((16,), float(i)) for i in range(20)}
        owner = RunOwner.acquire(open_storage(str(work / "run")))
        store = CheckpointStore(open_storage(str(work / "run")), term=owner.ensure_term(0), keep=Keep(last=CHECKPOINTS))
        store.save(1, state)
        multiply(work / "run/checkpoints")
        print(f"{CHECKPOINTS} checkpoints of {len(state)} tensors")
        storage = CountingStorage(open_storage(str(work / "run")))
        again = CheckpointStore(storage, term=store.term, keep=Keep(last=CHECKPOINTS))
        measure("resume: find the newest and load it", storage, again.load)
        measure("the question whether a new term begins", storage, lambda: owner.ensure_term(CHECKPOINTS))
        measure("first save, which surveys what is there", storage, lambda: again.save(CHECKPOINTS + 1, state))
        measure("each later save", storage, lambda: again.save(CHECKPOINTS + 2, state))
        measure("list, every manifest in full", storage, lambda: list_checkpoints(storage))
        owner.release()
    finally:
        shutil.rmtree(work)


def multiply(folder):
    """Further checkpoints like the first one; made without syncing, or it would take minutes."""
    first = CheckpointName(1, 1)
    manifest = parse_manifest((folder / str(first) / "manifest.json").read_bytes(), first)
    [data] = (folder / str(first)).glob("*.safetensors")
    for step in range(2, CHECKPOINTS + 1):
        target = folder / str(CheckpointName(step, 1))
        target.mkdir()
        shutil.copy(data, target)
        (target / "manifest.json").write_bytes(seal_manifest(msgspec.structs.replace(manifest, step=step)))


def measure(title, storage, work):
    before, began = storage.manifests, time.perf_counter()
    work()
    seconds, manifests = time.perf_counter() - began, storage.manifests - before
    print(f"{title:<44}{seconds:>9.3f} s{manifests:>9} manifests read", flush=True)


if __name__ == "__main__":
    main()
