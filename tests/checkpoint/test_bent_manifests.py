"""A manifest bent at random, sealed again or not, is a state or an error of ours: never a crash, never a wrong state.

TRAINERD_EXAMPLES multiplies the number of cases for a longer campaign, which then begins with another seed.
"""

import copy
import json
import os
import pathlib
import random
import shutil

import pytest
from support.forged_runs import NAME, make_run, seal
from support.same_bits import difference

from trainerd.checkpoint import manifest
from trainerd.checkpoint.errors import CheckpointError, Damaged
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per"),
]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("bent") / "run")


HOSTILE = [
    *(None, True, False, 0, 1, -1, 1.5, -0.0, 2**53 + 1, 2**63, -(2**63), 10**30, 1e308),
    *("", "a", "\0", "../x", "r00000-0000.safetensors", "float64", "qint8", "|O", "<f8", "model.w", "numpy.0"),
    *("os:system", "support.user_values:Color", "9" * 400, "0x" + "f" * 400, "2026-01-01"),
    *([], {}, [0], [[]], {"!": "tensor", "tensor": "model.w"}, {"!": "tuple", "items": []}, {"!": "x"}),
    {"!": "int", "hex": "-0x1"},
]


def places(node, found):
    """Every (container, key) of a JSON tree."""
    keys = range(len(node)) if isinstance(node, list) else list(node) if isinstance(node, dict) else ()
    for key in keys:
        found.append((node, key))
        places(node[key], found)
    return found


def mutate(body, chance):
    """Replace, delete, duplicate, swap or rename a node."""
    found = places(body, [])
    container, key = chance.choice(found)
    other, other_key = chance.choice(found)
    how = chance.randrange(6)
    if how <= 1:
        container[key] = copy.deepcopy(chance.choice(HOSTILE))
    elif how == 2:
        del container[key]
    elif how == 3:
        container[key], other[other_key] = other[other_key], container[key]
        json.dumps(body)  # ValueError if a node now contains itself
    elif how == 4:
        twin = copy.deepcopy(other[other_key])
        container.insert(key, twin) if isinstance(container, list) else container.update({key: twin})
    elif isinstance(container, dict):
        container[str(chance.choice(HOSTILE))] = container.pop(key)


CASES = int(os.environ.get("TRAINERD_EXAMPLES", "1")) * 2000


def test_any_bent_manifest_is_a_state_or_one_of_our_errors(template, tmp_path):
    """A seeded mutator over files, tensors and tree, sealed again with the right hash."""
    chance = random.Random(os.environ.get("TRAINERD_EXAMPLES", 7))
    run = pathlib.Path(shutil.copytree(template, tmp_path / "run"))
    good = (run / NAME.manifest).read_bytes()
    whole = CheckpointStore(open_storage(str(run))).load(2).state
    outcomes = {}
    for case in range(CASES):
        body = json.loads(good)["body"]
        part = chance.choice([body, body["tensors"], body["files"], body["tree"], body["tree"]])
        try:
            for _ in range(chance.choice([1, 1, 2, 3])):
                mutate(part, chance)
        except (ValueError, KeyError, IndexError, RecursionError):
            continue  # it bit its own tail, or emptied what it meant to bend
        outcome = outcome_of(run, body, whole, f"case {case}")
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    print(outcomes)
    assert outcomes["Damaged"] > CASES / 10
    assert outcomes["UndecodableState"] > CASES / 100
    assert outcomes["same"] > 0
    assert "a message too long" not in outcomes


def outcome_of(run, body, whole, case):
    seal(run, body)
    store = CheckpointStore(open_storage(str(run)))
    states = {info.step: info.state for info in store.list()}
    try:
        state = store.load(2).state
    except CheckpointError as error:
        return type(error).__name__ if len(str(error)) < 3000 else "a message too long"
    except BaseException as error:
        raise AssertionError(f"{case}: {error!r}") from error
    assert states == {1: "valid", 2: "valid"}, case
    if difference(whole, state) is None:
        return "same"
    # Another state than was saved, which only another tree can describe.
    return "another tree"


def test_bytes_at_random_without_a_new_hash_are_always_noticed(template, tmp_path):
    """Changed, inserted, deleted, moved: no such manifest is believed."""
    chance = random.Random(3)
    run = pathlib.Path(shutil.copytree(template, tmp_path / "run"))
    good = (run / NAME.manifest).read_bytes()
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(chance.choice([1, 1, 2, 5])):
            at, length = chance.randrange(len(bad)), chance.choice([1, 1, 2, 16])
            how = chance.randrange(4)
            if how == 0:
                bad[at] ^= chance.randrange(1, 256)
            elif how == 1:
                bad[at:at] = chance.randbytes(length)
            elif how == 2:
                del bad[at : at + length]
            else:
                bad[at : at + length] = bad[:length]
        if bytes(bad) != good:
            with pytest.raises(Damaged):
                manifest.parse_manifest(bytes(bad), NAME)
