"""Every combination that users meet, killed with SIGKILL again and again: the same bits as undisturbed.

Losses, learning rates and sample ids of every iteration, and the whole final state.
"""

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from support.attempts import Attempts
from support.exactness import EPOCH, STEPS
from support.states import fingerprint

EVERY = 3
# Before the first checkpoint; twice within one epoch, and right after a save; at the very end of an epoch, with and
# without its last step saved; in the last epoch.
KILLS = [2, 4, 6, EPOCH, 2 * EPOCH, 19]

CASES = {
    "plain": {},
    "workers": {"workers": 2, "scheduler": "warmup"},
    "adam": {"optimizer": "adam", "scheduler": "restarts"},
    "foreach": {"optimizer": "adamw_foreach", "scheduler": "plateau", "late": True, "period": 4},
    "fused": {"optimizer": "adamw_fused", "scheduler": "one_cycle", "workers": 2},
    "adafactor": {"optimizer": "adafactor", "scheduler": "warmup"},
    "two": {"optimizer": "two", "scheduler": "cosine", "accumulate": 2},
    "two-plateau": {"optimizer": "two", "scheduler": "plateau", "precision": "bfloat16", "workers": 2},
    "bfloat16": {"precision": "bfloat16", "optimizer": "adamw_foreach", "scheduler": "restarts"},
    "float16": {"precision": "float16", "scheduler": "plateau", "accumulate": 3},
    "float16-workers": {"precision": "float16", "optimizer": "adamw_fused", "workers": 2, "accumulate": 2},
    "accumulate": {"accumulate": 3, "optimizer": "adam", "scheduler": "one_cycle", "workers": 2},
    "compiled": {"backend": "aot_eager", "optimizer": "adamw_foreach"},
    "compiled-accumulate": {"backend": "aot_eager", "accumulate": 2, "precision": "bfloat16", "scheduler": "warmup"},
    "inductor": {"backend": "inductor", "optimizer": "sgd"},
}


@pytest.fixture(scope="module")
def attempts() -> Iterator[Attempts]:
    server = Attempts()
    yield server
    server.close()


@pytest.mark.parametrize("case", CASES)
def test_a_killed_training_ends_with_other_bits(case: str, attempts: Attempts, tmp_path: pathlib.Path) -> None:
    """Six SIGKILLs leave no trace in any column or in the final state, and each resume is called bitwise."""
    run = functools.partial(attempts.train, CASES[case], max_iter=STEPS, every=EVERY)
    undisturbed = run(folder=tmp_path / "undisturbed", kills=[])
    killed = run(folder=tmp_path / "killed", kills=KILLS)
    assert killed["rows"] == undisturbed["rows"]
    assert sorted(killed["rows"]) == list(range(STEPS))
    assert killed["grade"] == ["bitwise", ""]
    assert fingerprint(comparable(killed["state"])) == fingerprint(comparable(undisturbed["state"]))


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """The state without what a clock says."""
    events = {part: {**state["events"][part]} for part in state["events"]}
    for part in events.values():
        for clock in ("data_time", "time"):
            part.pop(clock, None)
    return {**state, "events": events}
