"""`make demo`: train the example while it is killed again and again, then undisturbed, and compare every bit.

What is compared are the final weights, optimizer state, hook states, data position and random streams, as they lie in
the last checkpoint of each run. Exit status 1 if anything differs.
"""

import argparse
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
RUNS = HERE.parent.parent / "runs" / "demo"
EVERY = 25  # steps from checkpoint to checkpoint
LINE = 9  # bytes that the witness writes for an iteration
PATIENCE_SECONDS = 120.0  # in which something must have happened

sys.path.insert(0, str(HERE))


def build_trainer(config):
    """The example's trainer, with a witness that writes down every iteration it really trains."""
    import train

    from trainerd.trainer import HookBase

    class Witness(HookBase):
        def __init__(self, path):
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

        def after_step(self):
            os.write(self.file, b"%8d\n" % self.trainer.iter)

    witness = config.pop("witness")
    trainer = train.build_trainer(config)
    trainer.register_hooks([Witness(witness)])
    return trainer


class Training:
    """One run folder, trained by one `trainerd run` after another."""

    def __init__(self, name, max_iter):
        self.folder = RUNS / name
        self.witness = RUNS / f"{name}.iterations"
        self.log = RUNS / f"{name}.log"
        self.max_iter = max_iter
        self.committed = set()
        self.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        if self.daemon.poll() is None:
            self.daemon.kill()  # the worker goes with it
            self.daemon.wait()

    def start(self):
        """Start the daemon, as a user would type it."""
        command = [os.path.join(os.path.dirname(sys.executable), "trainerd"), "run", f"{__file__}:build_trainer"]
        command += ["--dir", self.folder, "--max-iter", str(self.max_iter), "--set", f"witness={self.witness}"]
        command += ["--set", f"max_iter={self.max_iter}", "--checkpoint-every", f"{EVERY} steps"]
        with self.log.open("ab") as log:
            self.daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def iterations(self):
        """How many iterations were trained so far, repeated ones included."""
        return self.witness.stat().st_size // LINE if self.witness.exists() else 0

    @property
    def step(self):
        """How many iterations are completed in the history that counts."""
        done = self.iterations
        if not done:
            return 0
        with self.witness.open("rb") as file:
            file.seek((done - 1) * LINE)
            return int(file.read(LINE)) + 1

    @property
    def worker(self):
        """Pid of the newest worker."""
        return int(re.findall(r"worker (\d+) started", self.log.read_text(errors="replace"))[-1])

    def look(self):
        """Note which checkpoints are committed; return the folder of one that is being written, if there is one."""
        being_written = None
        for folder in (self.folder / "checkpoints").glob("step-*"):
            if (folder / "manifest.json").exists():
                self.committed.add(folder.name)
            elif any(folder.glob("*.safetensors")):
                being_written = folder
        return being_written

    def wait_until(self, happened, pause_seconds=0.01):
        """Wait for something; give up with the log's end if the daemon is gone or nothing comes."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := happened()):
            self.look()
            if self.daemon.poll() is not None or time.monotonic() > deadline:
                sys.exit("the training did not go on; its log ends with\n" + self.log.read_text()[-2000:])
            time.sleep(pause_seconds)
        return found

    def finish(self):
        """Wait for the end of the training; it must be the good one."""
        while (status := self.daemon.poll()) is None:
            self.look()
            time.sleep(0.02)
        if status:
            sys.exit(f"trainerd run ended with {status}; its log ends with\n{self.log.read_text()[-2000:]}")
        self.look()


def disturb(training, rng):
    """Kill and stop the training at random moments; return what was done to it."""
    done = []
    plan = [kill_worker, kill_worker_in_save, kill_daemon, terminate, kill_worker, kill_worker]
    for place, strike in enumerate(plan):
        width = training.max_iter / (len(plan) + 1)
        threshold = int((place + 0.3 + 0.7 * rng.random()) * width)
        training.wait_until(lambda threshold=threshold: training.step >= threshold)
        time.sleep(rng.random() * 0.1)  # a moment within the step
        before = training.iterations
        what = strike(training)
        step = training.step
        done.append(what)
        print(f"  step {step:5d}  {what}", flush=True)
        training.wait_until(lambda before=before: training.iterations > before + 1)
    return done


def kill_worker(training):
    os.kill(training.worker, signal.SIGKILL)
    return "SIGKILL to the worker"


def kill_worker_in_save(training):
    """Stop the worker when a checkpoint without a manifest appears, make sure that none came meanwhile, kill it."""
    left_by_earlier_kills = training.look()
    while True:
        folder = training.wait_until(
            lambda: (found := training.look()) != left_by_earlier_kills and found, pause_seconds=0.0002
        )
        worker = training.worker
        os.kill(worker, signal.SIGSTOP)
        if folder.exists() and not (folder / "manifest.json").exists():
            os.kill(worker, signal.SIGKILL)
            return f"SIGKILL to the worker while {folder.name} is being written"
        os.kill(worker, signal.SIGCONT)


def kill_daemon(training):
    training.daemon.kill()
    training.daemon.wait()
    training.start()
    return "SIGKILL to the daemon, which is then started again"


def terminate(training):
    training.daemon.terminate()
    status = training.daemon.wait()
    if status != 75:
        sys.exit(f"SIGTERM ended the daemon with {status} instead of 75\n{training.log.read_text()[-2000:]}")
    training.start()
    return "SIGTERM to the daemon: it saved, exited with 75, and is started again"


def final_state(training):
    """The state in the last checkpoint, every byte of it held against its hash."""
    from trainerd.checkpoint import CheckpointStore, open_storage

    loaded = CheckpointStore(open_storage(str(training.folder))).load()
    if loaded is None or loaded.step != training.max_iter:
        sys.exit(f"{training.folder} has no checkpoint of step {training.max_iter}")
    return loaded.state


def bits(part):
    """Everything a part of the state is: plain values with their types, and each tensor's type, shape and bytes."""
    from trainerd.checkpoint import codec

    tree, leaves = codec.encode(part)
    return repr(tree), {name: (leaf.dtype, leaf.shape, bytes(leaf.memory())) for name, leaf in leaves.items()}


def losses(state):
    return state["events"]["histories"]["total_loss"]


def compare(killed, undisturbed):
    """Print what is identical; return whether everything is."""
    parts = {
        "weights": "model",
        "optimizer state": "optimizer",
        "hook states": "hooks",
        "data position": "data",
        "random streams": "rng",
    }
    same = {name: bits(killed[key]) == bits(undisturbed[key]) for name, key in parts.items()}
    same["losses"] = bits(losses(killed)) == bits(losses(undisturbed))
    for name, equal in same.items():
        print(f"  {name:<18}{'identical bit for bit' if equal else 'DIFFERENT'}")
    return all(same.values())


def sample(state):
    """What the model writes after the same prompt."""
    import train

    trainer = train.build_trainer({})
    if state is not None:
        trainer.model.load_state_dict(state["model"])
    return train.generate(trainer, prompt="def ", length=160, seed=1)


def indented(text):
    return "\n".join(f"  | {line}" for line in text.splitlines())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="of the moments to kill at; it is printed, to repeat a demo")
    parser.add_argument("--max-iter", type=int, default=1200)
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir(parents=True)

    print(f"1. A character-level GPT learns Python from the standard library in {args.max_iter} steps,")
    print(f"   and is killed at random moments (seed {seed}).", flush=True)
    with Training("killed", args.max_iter) as killed:
        kills = disturb(killed, random.Random(seed))
        killed.finish()
    print("2. The same training, undisturbed.", flush=True)
    with Training("undisturbed", args.max_iter) as undisturbed:
        undisturbed.finish()

    print("3. What came out.\n")
    states = {training: final_state(training) for training in (killed, undisturbed)}
    print(f"  {'':<18}{'killed':>12}{'undisturbed':>14}")
    rows = {
        "kills and stops": (len(kills), 0),
        "steps trained": (killed.iterations, undisturbed.iterations),
        "steps repeated": (killed.iterations - args.max_iter, undisturbed.iterations - args.max_iter),
        "checkpoints": (len(killed.committed), len(undisturbed.committed)),
        "final loss": tuple(f"{float(losses(state)['values'][-1]):.6f}" for state in states.values()),
    }
    for name, (left, right) in rows.items():
        print(f"  {name:<18}{left:>12}{right:>14}")
    print()
    same = compare(states[killed], states[undisturbed])
    print(f"\n  What the model writes before training:\n{indented(sample(None))}")
    print(f"\n  and after:\n{indented(sample(states[killed]))}\n")
    print(f"  Look around: trainerd list {os.path.relpath(killed.folder)}")
    if not same:
        sys.exit("\nThe two trainings differ.")
    print("\nThe killed training ended with exactly the state of the undisturbed one.")


if __name__ == "__main__":
    main()
