"""Every byte of a checkpoint that is not what was written is noticed, and resume goes to the one before."""

import os
import pathlib
import random
import shutil

import pytest
import torch

from trainerd.checkpoint import reader, terms, verifying
from trainerd.checkpoint.chunk_reader import read_chunks, reads_of
from trainerd.checkpoint.errors import Damaged, RunDamaged
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with two whole checkpoints; tests damage the newer one and mend it again."""
    storage = open_storage(str(tmp_path_factory.mktemp("damage") / "run"))
    owner = RunOwner.acquire(storage)
    store = CheckpointStore(storage, term=owner.ensure_term(0))
    for step in (1, 2):
        store.save(step, {"model": {"w": torch.full((4, 4), float(step))}, "hooks": {"N": {"n": step, "f": 0.5}}})
    owner.release()
    return store, storage.root


def newest_files(root):
    return sorted(pathlib.Path(root, "checkpoints/step-000000002.t1").iterdir())


def assert_noticed(store, what):
    infos = list(store.verify())
    assert [info.state for info in infos] == ["valid", "damaged"], f"verify overlooked {what}"
    assert infos[-1].reason
    loaded = store.load()
    assert loaded.step == 1, f"resume took a checkpoint with {what}"
    assert len(loaded.skipped) == 1


def test_every_single_flipped_byte_is_noticed_by_verify_and_resume(run):
    """Manifest, header, padding and data, one byte at a time, each flipped in one bit and in all of them."""
    store, root = run
    flips = 0
    for file in newest_files(root):
        whole = file.read_bytes()
        for position in range(len(whole)):
            mask = 0xFF if position % 2 else 1 << position % 8
            file.write_bytes(whole[:position] + bytes([whole[position] ^ mask]) + whole[position + 1 :])
            assert_noticed(store, f"byte {position} of {file.name} flipped by {mask:#x}")
            flips += 1
        file.write_bytes(whole)
    assert store.load().step == 2
    print(f"bytes flipped: {flips}")


def test_a_file_cut_short_or_grown_is_noticed(run):
    """At every length of the manifest, and every tenth of the data; also one byte too many, and gone altogether."""
    store, root = run
    for file in newest_files(root):
        whole = file.read_bytes()
        stride = 1 if file.suffix == ".json" else 10
        for length in range(0, len(whole), stride):
            file.write_bytes(whole[:length])
            assert_noticed(store, f"{file.name} cut to {length} bytes")
        file.write_bytes(whole + b"\0")
        assert_noticed(store, f"{file.name} with a byte too many")
        if file.suffix == ".safetensors":
            file.unlink()
            assert_noticed(store, f"{file.name} gone")
        file.write_bytes(whole)
    assert store.load().step == 2


def test_two_swapped_manifests_are_noticed(run):
    """A manifest says which checkpoint it belongs to; a copy of another one is not believed."""
    store, root = run
    *_, manifest = [file for file in newest_files(root) if file.name == "manifest.json"]
    whole = manifest.read_bytes()
    shutil.copy(manifest.parent.parent / "step-000000001.t1/manifest.json", manifest)
    assert_noticed(store, "the manifest of another checkpoint")
    manifest.write_bytes(whole)


def test_ten_thousand_flipped_bytes_of_data_are_all_noticed(tmp_path):
    """In a file of several chunks, at random places, in one bit or more."""
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    CheckpointStore(storage, term=owner.ensure_term(0)).save(1, {f"w{i}": torch.randn(2000) for i in range(16)})
    owner.release()
    manifest = reader.read_step(storage, 1)
    room = memoryview(bytearray(8000))
    tensor_at = {
        position: name
        for name, entry in manifest.tensors.items()
        for chunk in entry.chunks
        for position in range(chunk.offset, chunk.offset + chunk.length)
    }
    chance = random.Random(1)
    [path] = (tmp_path / "run").rglob("*.safetensors")
    with open(path, "r+b", buffering=0) as file:
        for position in chance.choices(list(tensor_at), k=10_000):
            [whole] = os.pread(file.fileno(), 1, position)
            os.pwrite(file.fileno(), bytes([whole ^ chance.randrange(1, 256)]), position)
            with pytest.raises(Damaged, match="does not match its hash"):
                read_chunks(storage, manifest.name, reads_of(manifest, {tensor_at[position]: room}))
            os.pwrite(file.fileno(), bytes([whole]), position)
    assert [info.state for info in verifying.verify_checkpoints(storage)] == ["valid"]


@pytest.mark.parametrize(
    ("path", "read"),
    [("run.json", terms.read_run), ("terms/committed-000001.json", terms.committed_once)],
    ids=["run", "commit mark"],
)
def test_a_damaged_record_of_the_run_stops_instead_of_guessing(run, path, read):
    """The run's own record and the mark of its first commit: every byte of them."""
    _, root = run
    storage = open_storage(root)
    record = pathlib.Path(root, path)
    whole = record.read_bytes()
    for position in range(len(whole)):
        record.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(RunDamaged, match=record.stem):
            read(storage)
    record.write_bytes(whole)
    assert terms.committed_once(storage) == "Term 1 committed step 1"


def test_a_damaged_ticket_stops_instead_of_guessing_the_lineage(run):
    """Without every ticket nobody knows which checkpoints count: an error that names the file, never a wrong state."""
    _, root = run
    storage = open_storage(root)
    ticket = pathlib.Path(root, "terms/000001.json")
    whole = ticket.read_bytes()
    for position in range(len(whole)):
        ticket.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        for look in (reader.newest_step, lambda storage: list(verifying.verify_checkpoints(storage))):
            with pytest.raises(RunDamaged, match=r"terms/000001\.json"):
                look(storage)
    ticket.write_bytes(whole)
    assert reader.newest_step(storage) == 2
