"""Manifests, tickets and run records with a right hash that lie: a clear error, nothing executed, nothing harmed."""

import json
import os
import pathlib
import shutil
import sys

import numpy as np
import pytest
import xxhash
from support.command_line import trainerd
from support.forged_runs import NAME, body_of, make_run, seal

from trainerd.checkpoint import codec, envelope, listing, manifest, nodes, reader, terms
from trainerd.checkpoint.errors import CheckpointError, Damaged, MissingClass, RunDamaged, UndecodableState
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.retention import Keep
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore

HUGE = [2**53, 2**63 - 1, 2**63, 10**30, 10**300]


pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per"),
]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("hostile") / "run")


@pytest.fixture
def run(template, tmp_path):
    return pathlib.Path(shutil.copytree(template, tmp_path / "run"))


def chunk(body, tensor="model.w"):
    return body["tensors"][tensor]["chunks"][0]


def file_of(body):
    return next(iter(body["files"]))


def rename_file(body, name):
    """The one data file under another name, everywhere."""
    old = file_of(body)
    body["files"][name] = body["files"].pop(old)
    for entry in body["tensors"].values():
        for piece in entry["chunks"]:
            piece["file"] = name


CLIMBING = [
    "../../../../../../etc/passwd",
    "/etc/passwd",
    "../step-000000001.t1/r00000-0000.safetensors",
    "step-000000001.t1/../step-000000001.t1/r00000-0000.safetensors",
    "step-000000001.t1//r00000-0000.safetensors",
    "./r00000-0000.safetensors",
    "step-..t1/r00000-0000.safetensors",
    "..\\r00000-0000.safetensors",
    "r00000-0000.safetensors\0",
    "r00000-0000.safetensors\n",
    "step-" + "1" * 5000 + ".t1/r00000-0000.safetensors",
    "r00000-" + "1" * 5000 + ".safetensors",
    "r\u0660\u0660\u0660\u0660\u0660-0000.safetensors",
    "x" * 100_000,
    "",
]

BODIES = {
    **{f"file {name[:30]!r}": lambda body, name=name: rename_file(body, name) for name in CLIMBING},
    **{f"length {n:.1e}": lambda body, n=n: chunk(body).update(length=n) for n in [*HUGE, -1]},
    **{f"offset {n:.1e}": lambda body, n=n: chunk(body).update(offset=n) for n in [*HUGE, -1, 0, 8]},
    **{f"extent {n:.1e}": lambda body, n=n: body["tensors"]["model.w"].update(shape=[n, 3]) for n in [*HUGE, -4]},
    **{f"file size {n:.1e}": lambda body, n=n: body["files"][file_of(body)].update(bytes=n) for n in [*HUGE, -1]},
    **{f"step {n!r}": lambda body, n=n: body.update(step=n) for n in [*HUGE, -1, 1, 2.0, "2", None, True]},
    **{f"time {n!r}": lambda body, n=n: body.update(time=n) for n in [-1, 1e300, "now", None, 253402300800]},
    "shape with a product beyond 64 bits": lambda body: body["tensors"]["model.w"].update(shape=[2**32, 2**32]),
    "shape of nothing and too much": lambda body: body["tensors"]["model.w"].update(shape=[0, 2**40, 2**40], chunks=[]),
    "shape of a million extents": lambda body: body["tensors"]["model.w"].update(shape=[2**62] * 1_000_000),
    "shape of a million rows": lambda body: body["tensors"]["model.w"].update(shape=[1] * 1_000_000),
    "unknown type": lambda body: body["tensors"]["model.w"].update(dtype="object"),
    "type that is no string": lambda body: body["tensors"]["model.w"].update(dtype=["float32"]),
    "no chunks": lambda body: body["tensors"]["model.w"].update(chunks=[]),
    "chunk twice": lambda body: body["tensors"]["model.w"]["chunks"].append(chunk(body)),
    "chunk elsewhere": lambda body: chunk(body).update(at=[1, 0]),
    "chunk of another rank": lambda body: chunk(body).update(at=[0]),
    "chunk with a hole": lambda body: chunk(body).update(shape=[4, 2], length=32),
    "chunk in an unlisted file": lambda body: chunk(body).update(file="r00000-0009.safetensors"),
    "header longer than its file": lambda body: body["files"][file_of(body)].update(header_bytes=2**40),
    "header of nothing": lambda body: body["files"][file_of(body)].update(header_bytes=0),
    "hash that is none": lambda body: chunk(body).update(xxh3_128=5),
    "no tensors": lambda body: body.update(tensors={}),
    "no files": lambda body: body.update(files={}),
    "no tree": lambda body: body.pop("tree"),
    "tensors as a list": lambda body: body.update(tensors=[]),
    "another run": lambda body: body.update(run="f" * 16),
    "a run that writes to the terminal": lambda body: body.update(run="\x1b[2J"),
    "pinned as text": lambda body: body.update(pinned="123"),
    "versions as numbers": lambda body: body.update(versions={"torch": 2}),
}


@pytest.mark.parametrize("what", BODIES)
def test_a_lie_about_files_and_tensors_is_damage_and_the_older_checkpoint_is_taken(run, what):
    """Found before any data file is opened, and never with more memory than the file takes."""
    body = body_of(run)
    BODIES[what](body)
    seal(run, body)
    storage = open_storage(str(run))
    with pytest.raises(Damaged) as damage:
        reader.read_manifest(storage, NAME)
    assert len(str(damage.value)) < 1000
    assert_passed_over(run)


def assert_passed_over(run):
    """Resume and the reading side report the newer checkpoint and go on to the older one."""
    store = CheckpointStore(open_storage(str(run)))
    assert [info.state for info in store.list()] == ["valid", "damaged"]
    assert [info.state for info in store.verify()] == ["valid", "damaged"]
    loaded = store.load()
    assert (loaded.step, len(loaded.skipped)) == (1, 1)
    assert reader.read_tree(open_storage(str(run))).step == 1


NODES = [
    {"!": 5},
    {"!": None},
    {"!": ["tensor"]},
    {"!": "tensor"},
    {"!": "tensor", "tensor": "nowhere"},
    {"!": "tensor", "tensor": 3},
    {"!": "tensor", "tensor": "model.w", "stride": "1"},
    {"!": "tensor", "tensor": "model.w", "stride": [-1, 4]},
    {"!": "tensor", "tensor": "model.w", "requires_grad": "yes"},
    {"!": "int", "hex": 5},
    {"!": "int", "hex": "__import__('os')"},
    {"!": "float", "bits": "7ff8"},
    {"!": "float", "bits": 1.5},
    {"!": "str", "utf8": "\x00"},
    {"!": "bytes", "base64": "not base64!"},
    {"!": "complex", "items": [1.0]},
    {"!": "tuple", "items": "abc"},
    {"!": "tuple", "items": {"0": 1}},
    {"!": "dict", "items": [["a"]]},
    {"!": "dict", "items": ["ab"]},
    {"!": "deque", "items": [1], "maxlen": -1},
    {"!": "range", "items": [1]},
    {"!": "timedelta", "items": [1.5, 0, 0]},
    {"!": "enum", "class": "os:system"},
    {"!": "enum", "class": ["os"], "name": "A", "value": 1},
    {"!": "dataclass", "class": "os:system", "fields": [1]},
    {"!": "datetime", "iso": 5, "fold": 0, "tz": None},
    {"!": "datetime", "iso": "2026-01-01", "fold": 2, "tz": None},
    {"!": "datetime", "iso": "2026-01-01", "fold": 0, "tz": {"offset": ["a", 0, 0]}},
    {"!": "ndarray", "dtype": "<f8", "shape": [2], "order": "K", "tensor": "model.w"},
    {"!": "ndarray", "dtype": "<f8", "shape": [-2], "order": "C", "tensor": "model.w"},
    {"!": "ndarray", "dtype": "<f8", "shape": [2], "order": "C", "tensor": "nowhere"},
    {"!": "numpy", "dtype": "<f8", "hex": "0"},
    {"!": "sparse_coo", "shape": [1], "coalesced": 1, "indices": {}, "values": {}},
    {"!": "quantized", "dtype": 5, "values": {}},
    {"!": "torch.Size", "items": ["a"]},
    {"!": "torch.dtype", "name": 5},
]


@pytest.mark.parametrize("node", NODES, ids=lambda node: json.dumps(node)[:60])
def test_a_node_without_its_fields_is_damage(run, node):
    """So whoever has a manifest may walk its tree: inspect and the decoder never stumble."""
    body = body_of(run)
    body["tree"]["values"].append(node)
    seal(run, body)
    with pytest.raises(Damaged, match=r"values\.10"):
        reader.read_manifest(open_storage(str(run)), NAME)
    assert_passed_over(run)


def tensor(name):
    return {"!": "tensor", "tensor": name}


UNBUILDABLE = {
    "unknown kind": {"!": "lambda", "code": "..."},
    "function": {"!": "enum", "class": "os:system", "name": "x", "value": "echo"},
    "builtin": {"!": "dataclass", "class": "builtins:eval", "fields": {}},
    "type": {"!": "namedtuple", "class": "builtins:tuple", "fields": {}},
    "dunder": {"!": "dataclass", "class": "os:path.__class__", "fields": {}},
    "dunder of a class": {"!": "enum", "class": "support.user_values:Color.__class__", "name": "RED", "value": 1},
    "dict of a module": {"!": "enum", "class": "support.user_values:__dict__.Color", "name": "RED", "value": 1},
    "no class": {"!": "enum", "class": "", "name": "x", "value": 1},
    "dataclass as an enum": {"!": "enum", "class": "support.user_values:Plain", "name": "x", "value": 1},
    "enum as a dataclass": {"!": "dataclass", "class": "support.user_values:Color", "fields": {}},
    "enum as a tuple": {"!": "namedtuple", "class": "support.user_values:Color", "fields": {}},
    "base of enums": {"!": "enum", "class": "enum:Enum", "name": "New", "value": "New"},
    "absent member": {"!": "enum", "class": "support.user_values:Color", "name": "GREEN", "value": "green"},
    "unknown field": {"!": "dataclass", "class": "support.user_values:Frozen", "fields": {"value": 1, "more": 2}},
    "missing field": {"!": "dataclass", "class": "support.user_values:Plain", "fields": {"value": 1}},
    "missing item": {"!": "namedtuple", "class": "support.user_values:Point", "fields": {"x": 1}},
    "dunder field": {"!": "dataclass", "class": "support.user_values:Frozen", "fields": {"__class__": 1}},
    "list as a key": {"!": "dict", "items": [[[1], 2]]},
    "key twice": {"!": "dict", "items": [[1, 2], [True, 3]]},
    "member twice": {"!": "set", "items": [1, 1]},
    "deque that lost items": {"!": "deque", "items": [1, 2], "maxlen": 1},
    "factory": {"!": "defaultdict", "items": [], "factory": "eval"},
    "day": {"!": "datetime", "iso": "2026-99-01", "fold": 0, "tz": None},
    "zone that climbs": {"!": "datetime", "iso": "2026-01-01", "fold": 0, "tz": {"zone": "../../etc/passwd"}},
    "absolute zone": {"!": "datetime", "iso": "2026-01-01", "fold": 0, "tz": {"zone": "/etc/passwd"}},
    "folder as a zone": {"!": "datetime", "iso": "2026-01-01", "fold": 0, "tz": {"zone": "Europe"}},
    "long zone": {"!": "datetime", "iso": "2026-01-01", "fold": 0, "tz": {"zone": "x" * 100_000}},
    "neither zone nor offset": {"!": "datetime", "iso": "2026-01-01", "fold": 0, "tz": {}},
    "offset of years": {"!": "datetime", "iso": "2026-01-01", "fold": 0, "tz": {"offset": [9999, 0, 0]}},
    "duration": {"!": "timedelta", "items": [10**30, 0, 0]},
    "path": {"!": "path", "text": "a", "pure": "PosixPath"},
    "step of nothing": {"!": "range", "items": [1, 2, 0]},
    "complex of text": {"!": "complex", "items": ["1", "2"]},
    "stride with overlap": {**tensor("model.w"), "stride": [0, 0]},
    "huge stride": {**tensor("model.w"), "stride": [2**40, 2**60]},
    "stride of another rank": {**tensor("model.w"), "stride": [1]},
    "grad of integers": {**tensor("numpy.0"), "requires_grad": True},
    "objects": {"!": "numpy", "dtype": "|O", "hex": "00" * 8},
    "objects in a record": {"!": "numpy", "dtype": [["a", "|O"]], "hex": "00" * 8},
    "array of objects": {"!": "ndarray", "dtype": "|O", "shape": [6], "order": "C", "tensor": "numpy.0"},
    "type from text": {"!": "numpy", "dtype": "i4,f8", "hex": "00" * 12},
    "huge element": {"!": "numpy", "dtype": "|V2000000000", "hex": ""},
    "huge text": {"!": "numpy", "dtype": "<U999999999", "hex": ""},
    "huge part": {"!": "numpy", "dtype": [["a", "|V8", [2**31, 2**31]]], "hex": ""},
    "huge array of nothing": {
        "!": "ndarray",
        "dtype": "<f8",
        "shape": [0, 2**62, 2**62],
        "order": "C",
        "tensor": "numpy.0",
    },
    "array beyond its bytes": {"!": "ndarray", "dtype": "<f8", "shape": [2**40], "order": "C", "tensor": "numpy.0"},
    "array of a float tensor": {"!": "ndarray", "dtype": "<f4", "shape": [4, 3], "order": "C", "tensor": "model.w"},
    "type of a function": {"!": "torch.dtype", "name": "load"},
    "type that would import": {"!": "torch.dtype", "name": "onnx"},
    "device": {"!": "torch.device", "name": "floppy:0"},
    "generator elsewhere": {"!": "torch.Generator", "device": "cuda:77", "state": tensor("model.w")},
    "generator of floats": {"!": "torch.Generator", "device": "cpu", "state": tensor("model.w")},
    "quantized by floats": {
        "!": "quantized",
        "dtype": "qint8",
        "values": tensor("model.w"),
        "scale": 1.0,
        "zero_point": 0,
    },
    "quantized to floats": {
        "!": "quantized",
        "dtype": "float32",
        "values": tensor("model.w"),
        "scale": 1.0,
        "zero_point": 0,
    },
    "quantized in halves": {
        "!": "quantized",
        "dtype": "quint4x2",
        "values": tensor("numpy.0"),
        "scale": 1.0,
        "zero_point": 0,
    },
    "quantized by nothing": {"!": "quantized", "dtype": "quint8", "values": tensor("numpy.0")},
    "quantized by text": {
        "!": "quantized",
        "dtype": "quint8",
        "values": tensor("numpy.0"),
        "scale": "1",
        "zero_point": 0,
    },
    "axis": {
        "!": "quantized",
        "dtype": "quint8",
        "values": tensor("numpy.0"),
        "axis": 7,
        "scales": tensor("quantized.1.scales"),
        "zero_points": tensor("quantized.1.zero_points"),
    },
    "scales of another number": {
        "!": "quantized",
        "dtype": "quint8",
        "values": tensor("numpy.0"),
        "axis": 0,
        "scales": tensor("quantized.1.scales"),
        "zero_points": tensor("quantized.1.zero_points"),
    },
    "indices that are none": {
        "!": "sparse_coo",
        "shape": [3, 3],
        "coalesced": True,
        "indices": tensor("model.w"),
        "values": tensor("model.w"),
    },
    "indices out of range": {
        "!": "sparse_coo",
        "shape": [1, 1],
        "coalesced": False,
        "indices": tensor("sparse.0.indices"),
        "values": tensor("sparse.0.values"),
    },
    "sparse of another shape": {
        "!": "sparse_csr",
        "shape": [9, 1],
        "compressed": tensor("sparse.1.compressed"),
        "plain": tensor("sparse.1.plain"),
        "values": tensor("sparse.1.values"),
    },
    "sparse of plain values": {
        "!": "sparse_coo",
        "shape": [1],
        "coalesced": True,
        "indices": {"a": 1},
        "values": {"b": 2},
    },
}


@pytest.mark.parametrize("what", UNBUILDABLE)
def test_a_tree_that_describes_no_value_names_the_place(run, what):
    """With the class that would be needed, or with what is wrong; nothing is imported or called by name."""
    body = body_of(run)
    body["tree"]["values"].append(UNBUILDABLE[what])
    seal(run, body)
    before, modules = snapshot(run), set(sys.modules)
    store = CheckpointStore(open_storage(str(run)))
    with pytest.raises((UndecodableState, MissingClass)) as error:
        store.load()
    assert error.value.path.startswith("values.10")
    assert len(str(error.value)) < 2500
    assert set(sys.modules) == modules
    assert snapshot(run) == before
    assert [info.state for info in store.verify()] == ["valid", "valid"], "every byte is as it was written"


def snapshot(folder):
    return sorted((path, path.read_bytes()) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(("name", "position"), [("MT19937", 10**6), ("MT19937", -5), ("Philox", -8), ("Philox", 99)])
def test_a_generator_beyond_the_end_of_its_buffer_is_refused(name, position):
    """NumPy would read memory that is not the generator's."""
    generator = np.random.Generator(getattr(np.random, name)(1))
    tree, leaves = codec.encode(generator)
    where = tree["state"] if name == "Philox" else tree["state"]["state"]
    where["buffer_pos" if name == "Philox" else "pos"] = position
    with pytest.raises(UndecodableState, match="position"):
        codec.decode(tree, lambda leaf: leaves[leaf].tensor)


def test_a_seed_that_would_take_hours_to_mix_is_refused():
    tree, leaves = codec.encode(np.random.default_rng(1))
    tree["seed"]["pool_size"] = 10**9
    with pytest.raises(UndecodableState, match="pool"):
        codec.decode(tree, lambda leaf: leaves[leaf].tensor)


@pytest.mark.parametrize("depth", [nodes.MAX_NESTING + 1, 900, 100_000, 10_000_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_tree_of_brackets_is_damage_not_a_crash(run, depth, opening):
    """The parser's own limit, or the format's: no level of it is walked by recursion."""
    closing = "]" if opening == "[" else "}"
    whole = (run / NAME.manifest).read_bytes()
    start = whole.index(b'"tree":') + len(b'"tree":')
    rest = whole[envelope._HASHED_FROM : start] + (opening * depth + "1" + closing * depth).encode() + b"}}\n"
    (run / NAME.manifest).write_bytes(b'{"xxh3_128":"%s",%s' % (xxhash.xxh3_128_hexdigest(rest).encode(), rest))
    assert_passed_over(run)


def test_a_manifest_beyond_the_limit_is_not_even_read(run):
    """A sparse file of many gigabytes costs nothing; neither does a ticket like that."""
    with open(run / NAME.manifest, "r+b") as file:
        file.truncate(2**40)
    assert_passed_over(run)
    with open(run / "terms/000001.json", "r+b") as file:
        file.truncate(2**40)
    with pytest.raises(RunDamaged, match=str(2**40)):
        CheckpointStore(open_storage(str(run))).load()


def test_a_state_whose_manifest_could_not_be_read_is_not_saved(run, monkeypatch):
    """The limit binds the writer too; the earlier checkpoints are as they were."""
    monkeypatch.setattr(manifest, "MANIFEST_BYTES", 10_000)
    storage = open_storage(str(run))
    owner = RunOwner.acquire(storage)
    store = CheckpointStore(storage, term=owner.ensure_term(2), keep=Keep(last=9))
    with pytest.raises(CheckpointError, match="tensors"):
        store.save(3, {"many": list(range(10_000))})
    owner.release()
    assert [info.state for info in store.list()] == ["valid", "valid", "incomplete"]


TICKETS = [
    {"term": 2},
    {"term": -1},
    {"term": 1.0},
    {"term": 10**30},
    {"resumed_from": -1},
    {"resumed_from": 2**63},
    {"resumed_from": "0"},
    {"resumed_from": None},
    {"pid": "1"},
    {"pid": -1},
    {"host": 5},
    {"host": "\x1b[2J"},
    {"host": "x" * 10_000},
    {"nonce": None},
    {"time": 1e300},
    {"time": -5},
    {"written_by": []},
]


@pytest.mark.parametrize("change", TICKETS, ids=repr)
def test_a_ticket_that_lies_stops_instead_of_guessing_the_lineage(run, change):
    path = "terms/000001.json"
    seal(run, json.loads((run / path).read_bytes())["body"] | change, path)
    storage = open_storage(str(run))
    for look in (CheckpointStore(storage).load, lambda: listing.list_checkpoints(storage)):
        with pytest.raises(RunDamaged, match=r"000001\.json"):
            look()


@pytest.mark.parametrize("change", [{"run": 5}, {"run": "\x1b[2J"}, {"time": 1e300}, {"written_by": None}], ids=repr)
def test_a_run_record_that_lies_stops(run, change):
    seal(run, json.loads((run / "run.json").read_bytes())["body"] | change, "run.json")
    with pytest.raises(RunDamaged, match=r"run\.json"):
        CheckpointStore(open_storage(str(run))).load()


@pytest.mark.parametrize("path", ["run.json", "terms/000001.json", NAME.manifest])
@pytest.mark.parametrize("content", [b"", b"{}", b"null", b"[" * 100_000, b"\xff\xfe", b'{"xxh3_128":"'])
def test_a_file_without_an_envelope_is_damage(run, path, content):
    (run / path).write_bytes(content)
    readers = {"run.json": terms.read_run, "terms/000001.json": terms.read_tickets}
    read = readers.get(path, lambda storage: reader.read_manifest(storage, NAME))
    with pytest.raises((RunDamaged, Damaged), match="does not begin like"):
        read(open_storage(str(run)))


@pytest.mark.parametrize("path", ["terms/000001.json", "run.json", NAME.manifest])
def test_a_pipe_in_place_of_a_file_hangs_nobody(run, path):
    """Opening it would wait for a writer for ever."""
    (run / path).unlink()
    os.mkfifo(run / path)
    storage = open_storage(str(run))
    store = CheckpointStore(storage)
    if path == "terms/000001.json":
        with pytest.raises(RunDamaged):
            store.load()
    elif path == NAME.manifest:
        assert store.load().step == 1
    else:
        owner = RunOwner.acquire(storage)
        with pytest.raises(RunDamaged, match="no file"):
            owner.ensure_term(1)
        owner.release()


@pytest.mark.parametrize("what", ["brackets", "climbing", "node", "unknown kind", "zone"])
def test_the_reading_commands_report_it_in_one_paragraph_and_go_on(run, what):
    """Real processes: no traceback, and the whole checkpoint beside it is still shown."""
    body = body_of(run)
    if what == "brackets":
        for _ in range(600):
            body["tree"] = [body["tree"]]
    elif what == "climbing":
        rename_file(body, "../../../etc/passwd")
    else:
        odd = {"node": {"!": "tensor", "tensor": "nowhere"}, "unknown kind": {"!": "later", "tensor": "x", "class": 5}}
        odd["zone"] = {"!": "timedelta", "items": [10**30, 0, 0]}
        body["tree"]["values"].append(odd[what])
    seal(run, body)
    damaged = what in ("brackets", "climbing", "node")
    listed = trainerd("list", run)
    verified = trainerd("verify", run)
    assert (listed.returncode, verified.returncode) == (0, 65 if damaged else 0)
    for done in (listed, verified):
        rows = done.stdout.splitlines()
        assert [row.split()[2] for row in rows[1:3]] == ["valid", "damaged" if damaged else "valid"]
        assert done.stderr == ""
    for words in ([run], [run, "values"], [run, "values", "--json"]):
        inspected = trainerd("inspect", *words)
        assert (inspected.returncode, inspected.stderr) == (0, ""), inspected.stderr
    asked = trainerd("inspect", f"{run}@2")
    assert "Traceback" not in asked.stderr
    assert bool(asked.returncode) == damaged
