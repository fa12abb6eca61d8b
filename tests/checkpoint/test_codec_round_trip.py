"""Whatever can be generated of every kind of value comes back with its type, its order and every bit.

TRAINERD_EXAMPLES multiplies the number of examples for a longer campaign, which then is not the same each time.
"""

import collections
import datetime
import math
import os
import pathlib
import struct
import zoneinfo

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st
from support.same_bits import difference
from support.states import assert_same
from support.user_values import Access, Bits, Child, Color, Frozen, Level, Mode, Outer, Pair, Plain, Point, WithInitVar

from trainerd.checkpoint import codec, dtypes, envelope, manifest, nodes
from trainerd.checkpoint.layout import CheckpointName
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore
from trainerd.checkpoint.tensor_values import empty, memory_view

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per"),
    pytest.mark.filterwarnings("ignore:.*sparse csr tensors.*"),
]

TIMES = int(os.environ.get("TRAINERD_EXAMPLES", "1"))


def thorough(examples):
    return settings(
        max_examples=examples * TIMES,
        deadline=None,
        derandomize=TIMES == 1,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


def through_file(state):
    """Encode, seal and parse the tree as a manifest is, and decode from copies of the tensors' bytes."""
    tree, leaves = codec.encode(state)
    stored = {name: (leaf.dtype, leaf.shape, bytes(leaf.memory())) for name, leaf in leaves.items()}
    sealed = envelope.seal({"tree": tree})
    tree = envelope.unseal(sealed, dict, "here")["tree"]
    assert nodes.first_fault(tree, stored) is None

    def read(name):
        dtype, shape, data = stored[name]
        tensor = empty(dtype, shape)
        memory_view(tensor)[:] = data
        return tensor

    return codec.decode(tree, read)


# Tensors: random bytes as content, seen through random strides.

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
dense_types = st.sampled_from(sorted(dtypes.DTYPES)).map(lambda name: getattr(torch, name))


@st.composite
def dense(draw, types=dense_types, shapes=shapes):
    dtype, shape = draw(types), draw(shapes)
    width = dtypes.item_bytes(str(dtype).removeprefix("torch."))
    # Every second element and row of a larger block may be taken, its dimensions in any order, some of them expanded.
    steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    block = [extent * step for extent, step in zip(shape, steps, strict=True)]
    count = math.prod(block)
    data = torch.frombuffer(
        bytearray(draw(st.binary(min_size=count * width, max_size=count * width)) + bytes(16)), dtype=torch.uint8
    )
    flat = data[: count * width].view(_WIDTHS[width])
    tensor = flat.view(dtype) if width < 16 else flat
    tensor = tensor.reshape([block[at] for at in order]).permute([order.index(at) for at in range(len(shape))])
    tensor = tensor[tuple(slice(None, None, step) for step in steps)]
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor[:1].expand(draw(st.integers(0, 3)), *tensor.shape[1:]) if tensor.shape[0] else tensor
    if dtype.is_complex and dtype is not torch.complex32 and draw(st.booleans()):
        tensor = tensor.conj()
        tensor = tensor.imag if draw(st.booleans()) else tensor
    return tensor


differentiable = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


@st.composite
def with_grad(draw):
    tensor = draw(dense(types=st.sampled_from(differentiable)))
    if draw(st.booleans()):
        return torch.nn.Parameter(tensor, requires_grad=draw(st.booleans()))
    return tensor.detach().requires_grad_()


@st.composite
def sparse(draw):
    """COO, hybrid, coalesced or not; CSR, CSC, BSR and BSC, batched, with indices of both widths."""
    batch = draw(st.integers(0, 2))
    blocks = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    layout = draw(st.sampled_from(["coo", "csr", "csc", "bsr", "bsc"]))
    rows, columns = blocks[0] * draw(st.integers(1, 3)), blocks[1] * draw(st.integers(1, 3))
    kind = draw(st.sampled_from([torch.float32, torch.float64, torch.int64, torch.complex64, torch.bool]))
    if layout == "coo":
        count, tail = draw(st.integers(0, 4)), draw(st.lists(st.integers(0, 3), max_size=2))
        places = draw(
            st.lists(st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1)), min_size=count, max_size=count)
        )
        indices = torch.tensor(places, dtype=torch.int64).reshape(count, 2).t()
        values = draw(dense(types=st.just(kind), shapes=st.just((count, *tail))))
        values = values if values.shape[0] == count else torch.zeros(count, *values.shape[1:], dtype=kind)
        tensor = torch.sparse_coo_tensor(
            indices, values, (rows, columns, *values.shape[1:]), is_coalesced=False, check_invariants=True
        )
        tensor = tensor.coalesce() if draw(st.booleans()) and kind is not torch.bool else tensor
    else:
        shape = (batch, rows, columns) if batch else (rows, columns)
        mask = torch.eye(rows, columns).expand(shape)
        numbers = torch.arange(1, math.prod(shape) + 1).reshape(shape) * mask
        convert = getattr(numbers.to(kind), f"to_sparse_{layout}")
        tensor = convert(blocks) if layout.startswith("b") else convert()
        if draw(st.booleans()) and layout == "csr":
            parts = (tensor.crow_indices().int(), tensor.col_indices().int(), tensor.values())
            tensor = torch.sparse_csr_tensor(*parts, tensor.shape, check_invariants=True)
    if kind in differentiable and draw(st.booleans()):
        return torch.nn.Parameter(tensor) if draw(st.booleans()) else tensor.requires_grad_()
    return tensor


@st.composite
def quantized(draw):
    numbers = torch.tensor(draw(st.lists(st.floats(-9, 9), min_size=24, max_size=24)))
    shape = draw(st.sampled_from([(24,), (4, 6), (2, 3, 2, 2), (2, 3, 2, 2, 1), (0, 4)]))
    numbers = numbers.reshape(shape) if 0 not in shape else torch.zeros(shape)
    dtype = draw(st.sampled_from([torch.qint8, torch.quint8, torch.qint32]))
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if len(shape) in formats and draw(st.booleans()):
        numbers = numbers.contiguous(memory_format=formats[len(shape)])
    if draw(st.booleans()):
        tensor = torch.quantize_per_tensor(numbers, draw(st.floats(0.01, 9)), draw(st.integers(0, 5)), dtype)
        cut = tensor[..., ::2] if draw(st.booleans()) else tensor
        return cut.transpose(0, -1) if draw(st.booleans()) else cut
    axis = draw(st.integers(0, len(shape) - 1 if numbers.is_contiguous() else 1))
    scales = torch.linspace(0.1, 0.9, shape[axis], dtype=torch.float64)
    zeros = torch.arange(shape[axis])
    if dtype is torch.quint8 and draw(st.booleans()):
        scales, zeros = scales.float(), zeros.float() / 3
    return torch.quantize_per_channel(numbers, scales, zeros, axis, dtype)


torch_values = (
    dense()
    | with_grad()
    | sparse()
    | quantized()
    | shapes.map(torch.Size)
    | dense_types
    | st.sampled_from([torch.device("cpu"), torch.device("cuda:3"), torch.device("meta")])
    | st.integers(0, 2**63).map(lambda seed: torch.Generator().manual_seed(seed))
)

# NumPy: every type without objects, any order of bytes and of memory.

simple_types = (
    np_st.scalar_dtypes()
    | np_st.byte_string_dtypes(max_len=4)
    | np_st.unicode_string_dtypes(max_len=4)
    | st.sampled_from(
        [np.dtype("g"), np.dtype("G"), np.dtype(">M8[25s]"), np.dtype("V5"), np.dtype("S0"), np.dtype("m8")]
    )
    | st.integers(0, 4).map(lambda size: np.dtype(f"V{size}"))
)
record_types = np_st.nested_dtypes(
    subtype_strategy=np_st.scalar_dtypes() | np_st.byte_string_dtypes(min_len=1, max_len=4),
    max_leaves=4,
    max_itemsize=200,
) | st.sampled_from(
    [
        np.dtype({"names": ["a"], "formats": ["<i4"], "offsets": [4], "titles": ["T"], "itemsize": 16}),
        np.dtype([("a", "i1"), ("b", "f8", (2, 0)), ("c", "S0")]),
        np.dtype([("", "i1"), ("b", [("c", "g")])]),
        np.dtype([]),
    ]
)
numpy_types = (simple_types | record_types).filter(lambda dtype: not dtype.hasobject and dtype.subdtype is None)


@st.composite
def arrays(draw):
    dtype, shape = draw(numpy_types), draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    array = np.ndarray(shape, dtype, bytearray(draw(st.binary(min_size=size, max_size=size)) + b"\0"))
    look = draw(st.sampled_from(["as it is", "transposed", "fortran", "reversed", "read-only", "broadcast"]))
    if look == "transposed":
        return array.T
    if look == "fortran":
        return np.asfortranarray(array) if dtype.names is None else array.T
    if look == "reversed" and array.ndim:
        return array[::-1]
    if look == "broadcast":
        return np.broadcast_to(array, (2, *shape))
    array.flags.writeable = look != "read-only"
    return array


@st.composite
def numpy_scalars(draw):
    # Bytes at random are seldom text: those scalars are made below.
    dtype = draw(numpy_types.filter(lambda dtype: "U" not in str(np.lib.format.dtype_to_descr(dtype))))
    size = dtype.itemsize
    scalar = np.ndarray((), dtype, bytearray(draw(st.binary(min_size=size, max_size=size)) + b"\0"))[()]
    # A string forgets zeros at its end, and a number what fills its room: so read once, as whoever made it did.
    return np.array(scalar)[()]


@st.composite
def numpy_generators(draw):
    seed = draw(st.integers(0, 2**200))
    kind = draw(
        st.sampled_from([np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64])
    )
    if draw(st.booleans()):
        legacy = np.random.RandomState(seed % 2**32)
        legacy.normal(size=draw(st.integers(0, 3)))
        return legacy
    generator = np.random.Generator(kind(np.random.SeedSequence(seed, spawn_key=(1, 2), pool_size=8)))
    generator.integers(100, size=draw(st.integers(0, 700)), dtype=np.uint32)
    generator.spawn(draw(st.integers(0, 3)))
    return generator


# Python.

any_float = st.floats() | st.binary(min_size=8, max_size=8).map(lambda data: struct.unpack("<d", data)[0])
texts = st.text(max_size=8) | st.text(st.characters(categories=["Cs", "Cc", "Lu"]), max_size=3)
zones = (
    st.none()
    | st.just(datetime.UTC)
    | st.builds(datetime.timezone, st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)))
    | st.builds(
        datetime.timezone, st.timedeltas(datetime.timedelta(0), datetime.timedelta(hours=1)), st.text(max_size=3)
    )
    | st.sampled_from(["Europe/Berlin", "America/Caracas", "UTC"]).map(zoneinfo.ZoneInfo)
)
moments = st.builds(
    lambda moment, fold, zone: moment.replace(fold=fold, tzinfo=zone), st.datetimes(), st.integers(0, 1), zones
)
path_texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
paths = st.builds(
    lambda kind, text: kind(text),
    st.sampled_from([pathlib.Path, pathlib.PurePosixPath, pathlib.PureWindowsPath]),
    path_texts,
)
members = st.sampled_from([*Color, *Level, *Mode, *Access, Access(0), Access(3), *Bits, Bits(13), *Outer.Inner])
bounds = st.none() | st.integers()
hashable = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | any_float.filter(lambda number: number == number)  # a NaN is found again only by its identity
    | texts
    | st.binary(max_size=4)
    | members
)
scalars = (
    hashable
    | any_float
    | st.builds(complex, any_float, any_float)
    | st.integers(-(2**3000), 2**3000)
    | st.binary().map(bytearray)
    | moments
    | st.dates()
    | st.timedeltas()
    | paths
    | st.builds(slice, bounds, bounds, bounds)
    | st.builds(range, st.integers(), st.integers(), st.integers(1, 5))
)
keys = st.recursive(hashable, lambda inner: st.tuples(inner, inner) | st.builds(Point, inner, inner), max_leaves=4)


def containers(inner):
    mappings = st.dictionaries(keys, inner, max_size=4)
    lists = st.lists(inner, max_size=4)
    attributed = st.dictionaries(st.sampled_from(["_metadata", "x"]), inner)
    return (
        lists
        | lists.map(tuple)
        | st.builds(collections.deque, lists, st.none() | st.integers(4, 6))
        | mappings
        | st.builds(_ordered, mappings, attributed)
        | mappings.map(collections.Counter)
        | st.builds(collections.defaultdict, st.sampled_from([None, list, int, dict]), mappings)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
        | st.builds(Point, inner, inner)
        | st.builds(Pair, inner, inner)
        | st.builds(Plain, inner)
        | st.builds(Frozen, inner)
        | st.builds(Child, inner, more=inner)
        | st.builds(WithInitVar, inner)
    )


def _ordered(items, attributes):
    value = collections.OrderedDict(items)
    vars(value).update(attributes)
    return value


leaves = scalars | torch_values | arrays() | numpy_scalars() | texts.map(np.str_) | numpy_generators()
states = st.recursive(leaves, containers, max_leaves=12)


@thorough(800)
@given(states)
def test_states_of_every_kind_come_back_to_the_bit(state):
    back = through_file(state)
    assert difference(state, back) is None
    assert_same(state, back)
    codec.check_inverse(state)


@thorough(600)
@given(dense())
def test_strided_tensors_of_every_type_come_back_to_the_bit(tensor):
    back = through_file([tensor])[0]
    assert difference(tensor, back) is None
    codec.check_inverse([tensor])


@thorough(300)
@given(sparse() | quantized())
def test_sparse_and_quantized_tensors_come_back_to_the_bit(tensor):
    assert difference(tensor, through_file([tensor])[0]) is None
    codec.check_inverse([tensor])


@thorough(500)
@given(arrays() | numpy_scalars() | texts.map(np.str_))
def test_numpy_values_of_every_type_come_back_to_the_bit(value):
    assert difference(value, through_file([value])[0]) is None
    codec.check_inverse([value])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    storage = open_storage(str(tmp_path_factory.mktemp("round_trip") / "run"))
    owner = RunOwner.acquire(storage)
    yield CheckpointStore(storage, term=owner.ensure_term(0))
    owner.release()


@thorough(80)
@given(states)
def test_states_of_every_kind_come_back_from_the_disk(store, state):
    step = max((info.step for info in store.list()), default=0) + 1
    store.save(step, state)
    loaded = store.load()
    assert loaded.step == step
    assert difference(state, loaded.state) is None


@thorough(100)
@given(states)
def test_a_manifest_of_any_state_passes_its_own_checks(state):
    """What the writer makes is never called damaged by a reader's checks."""
    tree, stored = codec.encode(state)
    name = CheckpointName(1, 1)
    body = {
        "written_by": "",
        "run": "",
        "step": 1,
        "term": 1,
        "time": 0.0,
        "world_size": 1,
        "versions": {},
        "files": {},
    }
    described = {key: {"dtype": leaf.dtype, "shape": (0, *leaf.shape), "chunks": ()} for key, leaf in stored.items()}
    parsed = manifest.parse_manifest(envelope.seal(body | {"tensors": described, "tree": tree}), name)
    assert parsed.tree == tree
