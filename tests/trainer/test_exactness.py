"""Every combination that users meet, killed with SIGKILL again and again: the same bits as undisturbed.

Losses, learning rates and sample ids of every iteration, the file of metrics, and the whole final state.
"""

import functools
import itertools
import os
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

# Small models leave the rest of a machine idle; `make campaign` tries every combination.
CHOICES: dict[str, list[Any]] = {
    "optimizer": ["sgd", "adam", "adamw_foreach", "adamw_fused", "adafactor", "two"],
    "scheduler": ["cosine", "one_cycle", "restarts", "warmup", "plateau"],
    "workers": [0, 2],
    "precision": ["", "bfloat16", "float16"],
    "accumulate": [1, 3],
    "late": [False, True],
}
COMPILED = [
    {"backend": "aot_eager", "optimizer": "adamw_foreach"},
    {"backend": "aot_eager", "accumulate": 2, "precision": "bfloat16", "scheduler": "warmup"},
    {"backend": "inductor", "optimizer": "sgd"},
]


def covering() -> list[dict[str, Any]]:
    """Combinations in which every two choices meet at least once; greedily, so not the fewest possible."""
    everything = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]
    if os.environ.get("TRAINERD_EXACTNESS") == "all":
        return everything
    pairs = {frozenset(pair) for one in everything for pair in itertools.combinations(one.items(), 2)}
    chosen = []
    while pairs:
        best = max(everything, key=lambda one: len(pairs & _pairs(one)))
        pairs -= _pairs(best)
        chosen.append(best)
    return chosen


@functools.cache
def _pairs_of(items: tuple[tuple[str, Any], ...]) -> frozenset[Any]:
    return frozenset(frozenset(pair) for pair in itertools.combinations(items, 2))


def _pairs(one: dict[str, Any]) -> frozenset[Any]:
    return _pairs_of(tuple(one.items()))


@pytest.fixture(scope="module")
def attempts() -> Iterator[Attempts]:
    server = Attempts()
    yield server
    server.close()


@pytest.mark.parametrize(
    "case", [*covering(), *COMPILED], ids=lambda case: "-".join(f"{value}" for value in case.values() if value)
)
def test_a_killed_training_ends_with_other_bits(
    case: dict[str, Any], attempts: Attempts, tmp_path: pathlib.Path
) -> None:
    """Six SIGKILLs leave no trace in any column or in the final state, and each resume is called bitwise."""
    run = functools.partial(attempts.train, case, max_iter=STEPS, every=EVERY)
    undisturbed = run(folder=tmp_path / "undisturbed", kills=[])
    killed = run(folder=tmp_path / "killed", kills=KILLS)
    assert killed["rows"] == undisturbed["rows"]
    assert sorted(killed["rows"]) == list(range(STEPS))
    assert killed["metrics"] == undisturbed["metrics"]
    assert killed["grade"] == ["bitwise", ""]
    assert fingerprint(comparable(killed["state"])) == fingerprint(comparable(undisturbed["state"]))


def comparable(state: Any) -> Any:
    """The state without what a clock says, wherever it stands."""
    if isinstance(state, dict):
        return {name: comparable(value) for name, value in state.items() if name not in ("time", "data_time")}
    return [comparable(item) for item in state] if isinstance(state, list) else state
