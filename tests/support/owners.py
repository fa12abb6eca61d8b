"""An owner of a run in a process of its own, which does what a test tells it, line by line."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

BEAT_SECONDS = 0.3


class Unlocked:
    """A local disk on which the kernel locks nothing, as on a server."""

    def __init__(self, storage):
        self._storage = storage

    def __getattr__(self, name):
        return getattr(self._storage, name)

    @property
    def guarantees(self):
        return replace(self._storage.guarantees, life_lock=False)


class StoppedBeforeCommit:
    """The real storage; the process is stopped right before it commits a checkpoint, as by a machine that freezes."""

    def __init__(self, storage):
        self._storage = storage

    def __getattr__(self, name):
        return getattr(self._storage, name)

    def create(self, path, data):
        if path.endswith("manifest.json"):
            os.kill(os.getpid(), signal.SIGSTOP)
        self._storage.create(path, data)


def open_place(url, options, unlocked):
    """The storage that a test means."""
    from trainerd.checkpoint.storage import open_storage

    storage = open_storage(url, options)
    return Unlocked(storage) if unlocked else storage


class Owner:
    """The process, seen from the test; everything it says is in `text`."""

    def __init__(self, place, log, *wrappers):
        self._log = Path(log)
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__, json.dumps(place), *wrappers],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
            )

    @property
    def pid(self):
        return self.process.pid

    @property
    def text(self):
        return self._log.read_text()

    def tell(self, command):
        """Tell it what to do, without waiting."""
        self.process.stdin.write(f"{command}\n".encode())
        self.process.stdin.flush()

    def says(self, beginning, seconds=60.0):
        """Wait for a line that begins so, and return it."""
        from support.runs import eventually

        def found():
            return next((line for line in self.text.splitlines() if line.startswith(beginning)), None)

        return eventually(f"line {beginning!r}", found, seconds, lambda: self.text)

    def do(self, command, beginning):
        """Tell it and wait for its answer."""
        self.tell(command)
        return self.says(beginning)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()


def main():
    """Obey: one answer for each line that comes."""
    import logging

    from trainerd.checkpoint.errors import CheckpointError
    from trainerd.checkpoint.ownership import RunOwner
    from trainerd.checkpoint.retention import Keep

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    place = json.loads(sys.argv[1])
    storage = open_place(**place)
    owner = store = None

    def obey(command, *words):
        nonlocal owner, store
        if command == "acquire":
            owner = RunOwner.acquire(storage, take_over="take-over" in words, beat_seconds=BEAT_SECONDS)
            owner.on_lost = lambda: print(f"lost: {owner.lost}", flush=True)
        elif command == "term":
            return f"term {owner.ensure_term(int(words[0]))}"
        elif command == "save":
            import torch

            from trainerd.checkpoint.store import CheckpointStore

            step = int(words[0])
            held = StoppedBeforeCommit(storage) if "stopped-before-commit" in words else storage
            store = CheckpointStore(held, term=owner.term, keep=Keep(last=1))
            store.save(step, {"w": torch.full((4,), float(step)), "pid": os.getpid()})
        elif command == "race":
            url = f"{place['url']}-{words[0]}"
            owner = RunOwner.acquire(open_place(url, place["options"], place["unlocked"]), beat_seconds=BEAT_SECONDS)
            return f"term {owner.ensure_term(0)}"
        elif command == "release":
            owner.release()
        return "done"

    print("ready", flush=True)
    for line in sys.stdin:
        try:
            answer = obey(*line.split())
        except CheckpointError as error:
            answer = f"{type(error).__name__}: {error}"
        print(f"{line.strip()}: {answer}", flush=True)


if __name__ == "__main__":
    main()
