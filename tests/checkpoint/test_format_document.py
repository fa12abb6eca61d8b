"""docs/checkpoint-format.md is held against the code: its tables, and the reader printed in it."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from trainerd.checkpoint import alive, codec, dtypes, envelope, manifest, nodes, pins, retention, terms
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore

DOCUMENT = (pathlib.Path(__file__).parents[2] / "docs/checkpoint-format.md").read_text()


def section(title):
    return DOCUMENT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_table_of_kinds_is_the_codecs():
    """A kind that is missing in the document could not be read by others."""
    rows = re.findall(r"^\| ((?:`[^`|]+` ?)+) \|", section("The tree"), flags=re.MULTILINE)
    documented = {kind for row in rows for kind in re.findall(r"`([^`]+)`", row)}
    assert documented == set(codec._DECODERS) == set(nodes.SHAPES)


def test_the_list_of_element_types_is_the_codes():
    """Every name of a dtype that a manifest can hold."""
    text = section("Data files").split("`dtype` is torch's name: ")[1]
    assert set(re.findall(r"\w+", text)) == dtypes.DTYPES


@pytest.mark.parametrize(
    ("file", "struct"),
    [
        ("run.json", manifest.RunRecord),
        ("terms/*.json", terms.Ticket),
        ("terms/committed-*.json", terms.CommitMark),
        ("terms/alive.json", alive.SignOfLife),
        ("pins/*.json", pins.Pin),
        ("manifest.json", manifest.Manifest),
    ],
)
def test_the_documented_keys_are_those_written(file, struct):
    """No key is hidden, none is promised."""
    row = re.search(rf"^\| `{re.escape(file)}` \| (.*) \|$", section("Sealed JSON"), flags=re.MULTILINE)
    assert tuple(re.findall(r"`(\w+)`", row[1])) == struct.__struct_fields__


def test_the_documented_rules_are_those_recorded():
    """What a manifest remembers of the rules."""
    text = section("Sealed JSON").split("`keep` are the retention rules")[1].split("They explain")[0]
    assert tuple(re.findall(r"`(\w+)`", text)) == retention.Keep.__struct_fields__


def test_the_documented_offset_of_the_hash_is_the_real_one():
    """The document says from which byte on the hash counts."""
    assert int(re.search(r"from offset (\d+)", DOCUMENT)[1]) == envelope._HASHED_FROM


def test_the_printed_reader_reads_a_real_run(tmp_path):
    """Executed as printed, knowing nothing of trainerd, it finds newest step and tensors of a run with two terms."""
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    store = CheckpointStore(storage, term=owner.ensure_term(0))
    store.save(5, {"w": torch.ones(3, 2), "n": 1})
    store.save(9, {"w": torch.zeros(3, 2), "n": 1})
    store.term = owner.ensure_term(5)
    store.save(7, {"w": torch.full((3, 2), 0.5), "b": torch.arange(4)})
    owner.release()
    (source,) = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    imported = {
        alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for alias in node.names
    }
    assert imported <= {"json", "math", "pathlib", "sys", "numpy", "xxhash"}
    assert len(source.strip().splitlines()) <= 46
    done = subprocess.run(
        [sys.executable, "-P", "-c", source, storage.root], capture_output=True, text=True, check=False
    )
    assert done.stdout == "7 {'w': 3.0, 'b': 6.0}\n", done.stderr
