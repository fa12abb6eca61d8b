"""Whatever the codec takes comes back to the bit, and what it cannot take is named."""

import collections
import dataclasses
import datetime
import enum
import pathlib
import random
import sys
import typing
import zoneinfo

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.states import assert_same

from trainerd.checkpoint import codec, dtypes
from trainerd.checkpoint.errors import MissingClass, UndecodableState, UnsupportedState
from trainerd.checkpoint.tensor_values import memory_view


def through_json(state):
    """Encode, let the tree go through JSON as the manifest does, decode from copies of the tensors."""
    tree, leaves = codec.encode(state)
    stored = {name: bytes(leaf.memory()) for name, leaf in leaves.items()}

    def read(name):
        tensor = torch.empty(leaves[name].shape, dtype=leaves[name].tensor.dtype)
        memory_view(tensor)[:] = stored[name]
        return tensor

    return codec.decode(msgspec.json.decode(msgspec.json.encode(tree)), read)


class Color(enum.Enum):
    RED = "red"
    BLUE = 2


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(typing.NamedTuple):
    x: float
    y: object


@dataclasses.dataclass(frozen=True)
class Settings:
    name: str
    rate: float
    derived: int = dataclasses.field(init=False, default=3)


@dataclasses.dataclass(slots=True)
class Slotted:
    items: list


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**300), 2**300)
    | st.floats()
    | st.text()
    | st.text(st.characters(categories=["Cs", "Cc"]), max_size=3)
    | st.binary()
    | st.complex_numbers()
    | st.datetimes()
    | st.dates()
    | st.timedeltas()
)
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(keys, inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(lambda items: collections.deque(items, maxlen=len(items) + 2))
        | st.dictionaries(st.text(), inner).map(collections.OrderedDict)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.binary())
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(values)
def test_plain_values_come_back_to_the_bit(value):
    """Types, order, -0.0, NaN, huge integers and lone surrogates survive; equality alone would miss half of them."""
    back = through_json(value)
    assert type(back) is type(value)
    assert_same(back, value)


@pytest.mark.parametrize("bits", ["7ff8000000000000", "7ff0000000000001", "fff8000000abcdef", "8000000000000000"])
def test_every_nan_keeps_its_payload(bits):
    """The 64 bits of a float are what is stored."""
    value = np.frombuffer(bytes.fromhex(bits), dtype=">f8").astype("<f8")[0].item()
    assert np.float64(through_json([value])[0]).tobytes() == np.float64(value).tobytes()


USERS_VALUES = [
    Color.RED,
    Color.BLUE,
    Access.READ | Access.WRITE,
    Point(1.5, [Color.RED]),
    Settings("a", 0.1),
    Slotted([1, (2,)]),
    pathlib.Path("/a/b"),
    range(1, 10, 3),
    slice(None, 5),
    slice(1, None, -1),
    bytearray(b"\0\xff"),
    collections.Counter("abracadabra"),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, {1: 2}),
    datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=5), "X")),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda:1"),
    {"!": "tensor"},
    {"a\nb": 1},
]


@pytest.mark.parametrize("value", USERS_VALUES, ids=repr)
def test_users_values_come_back_as_what_they_were(value):
    """Enums, named tuples, dataclasses and the standard library's containers keep type and content."""
    back = through_json({"v": value})["v"]
    assert type(back) is type(value)
    assert back == value
    assert_same(back, value)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", sorted(dtypes.DTYPES))
@pytest.mark.parametrize("shape", [(), (0, 3), (4,), (2, 6)])
def test_tensors_of_every_type_keep_every_bit(name, shape):
    """Random bytes seen as each element type: float8, complex32 and NaN patterns included."""
    dtype = getattr(torch, name)
    tensor = torch.empty(shape, dtype=dtype)
    high = 2 if dtype is torch.bool else 256
    memory_view(tensor)[:] = bytes(random.Random(1).randrange(high) for _ in range(tensor.nbytes))
    back = through_json([tensor])[0]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert bytes(memory_view(back)) == bytes(memory_view(tensor))


def test_tied_tensors_are_stored_once_and_come_back_tied():
    """Two references to one memory give one entry and one object; equal but separate tensors stay separate."""
    weight = torch.randn(3, 2)
    state = {"a": weight, "b": weight.detach(), "c": weight.clone(), "p": torch.nn.Parameter(weight)}
    _, leaves = codec.encode(state)
    assert len(leaves) == 2
    back = through_json(state)
    assert back["a"] is back["b"]
    assert back["a"].data_ptr() == back["p"].data_ptr() != back["c"].data_ptr()
    assert isinstance(back["p"], torch.nn.Parameter)


def test_a_small_view_does_not_drag_its_storage_along():
    """What is stored is the logical size: ten floats of a million are forty bytes."""
    _, leaves = codec.encode({"view": torch.randn(1_000_000)[:10]})
    assert leaves["view"].bytes == 40


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 3).t(),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(6)[::2],
        torch.randn(1).expand(5),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
    ],
    ids=["transposed", "channels-last", "strided", "expanded", "conjugate", "negative"],
)
def test_views_keep_values_and_dense_layouts(tensor):
    """Values are exact whatever the strides; a dense memory format is kept, since it can choose the kernel."""
    back = through_json([tensor])[0]
    assert torch.equal(back, tensor)
    if tensor.is_contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor.t().is_contiguous():
        assert back.stride() == tensor.stride() or tensor.is_conj() or tensor.is_neg()


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.quantize_per")
def test_sparse_and_quantized_tensors_come_back_by_their_parts():
    """Layout, indices, coalescing, scales and zero points survive."""
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    uncoalesced = torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2), is_coalesced=False)
    state = {
        "coo": dense.to_sparse(),
        "uncoalesced": uncoalesced,
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((1, 1)),
        "bsc": dense.to_sparse_bsc((1, 1)),
        "per_tensor": torch.quantize_per_tensor(dense, 0.1, 3, torch.quint8),
        "per_channel": torch.quantize_per_channel(
            dense, torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
        ),
    }
    back = through_json(state)
    assert_same(back, state)
    assert not back["uncoalesced"].is_coalesced()
    assert all(back[name].layout is state[name].layout for name in state)


def test_random_generators_go_on_where_they_were():
    """NumPy's and torch's generators draw the same numbers after the round trip."""
    state = {
        "pcg": np.random.default_rng(1),
        "philox": np.random.Generator(np.random.Philox(2)),
        "sfc": np.random.Generator(np.random.SFC64(2)),
        "legacy": np.random.RandomState(3),
        "torch": torch.Generator().manual_seed(4),
        "python": random.Random(5).getstate(),
    }
    state["legacy"].normal()  # half a Gaussian pair waits inside
    back = through_json(state)
    for name in ("pcg", "philox", "sfc", "legacy"):
        assert back[name].normal(size=5).tolist() == state[name].normal(size=5).tolist()
    assert torch.equal(torch.rand(3, generator=back["torch"]), torch.rand(3, generator=state["torch"]))
    assert back["python"] == state["python"]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(3, dtype="<u2"),
        np.zeros((0, 4), dtype=np.float16),
        np.array(["a", "bcd"]),
        np.array([b"x"]),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
        np.arange(3, dtype=">i4"),
        np.array([(1, 2.5, [1, 2])], dtype=[("a", "i4"), ("b", "f8"), ("c", "i2", (2,))]),
        np.arange(10)[::2],
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_arrays_keep_type_order_and_bytes(array):
    """Any dtype without Python objects, byte order and records included; Fortran order stays."""
    back = through_json([array])[0]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert back.flags.f_contiguous == array.flags.f_contiguous or array.strides == (16,)
    assert back.flags.writeable


@pytest.mark.parametrize(
    "scalar", [np.float32(0.1), np.int8(-3), np.bool_(True), np.datetime64("2026-01-01"), np.float64("nan")], ids=repr
)
def test_numpy_scalars_do_not_turn_into_python_numbers(scalar):
    """np.float64 is a float to Python, yet comes back as what it was."""
    back = through_json([scalar])[0]
    assert type(back) is type(scalar)
    assert back.tobytes() == scalar.tobytes()


def _local_class():
    @dataclasses.dataclass
    class Local:
        x: int = 1

    return Local()


class Dictionary(dict):
    """A subclass that might hold more than its items."""


BAD_STATES = [
    ({"hooks": {"Foo": {"callback": lambda: 1}}}, "hooks.Foo.callback", "function"),
    ({"a": [1, object()]}, "a.1", "object"),
    ({"a": np.array([object()])}, "a", "object"),
    ({"a": Dictionary(x=1)}, "a", "Dictionary"),
    ({"a": _local_class()}, "a", "Local"),
    ({"a": torch.empty(2, device="meta")}, "a", "meta"),
    ({"a": collections.defaultdict(lambda: 1)}, "a", "defaultdict"),
    ({"a": {1.5j: 1}}, "a.1.5j", "complex"),
    ({"a": torch.nn.Linear(1, 1)}, "a", "Linear"),
    ({"a": sys}, "a", "module"),
]


@pytest.mark.parametrize(("state", "path", "kind"), BAD_STATES, ids=[f"{p}-{k}" for _, p, k in BAD_STATES])
def test_what_cannot_be_held_is_named_by_path_and_kind(state, path, kind):
    """The message tells where the value sits and what it is."""
    with pytest.raises(UnsupportedState) as raised:
        codec.encode(state)
    assert raised.value.path == path
    assert kind in str(raised.value)


def test_a_state_that_contains_itself_is_refused_not_followed():
    """Depth has a bound, and the message suspects the cause."""
    loop = {}
    loop["self"] = loop
    with pytest.raises(UnsupportedState, match="contain itself"):
        codec.encode(loop)


def test_a_class_nobody_imported_is_not_imported_by_loading():
    """Loading runs no code by name: the message says what to import."""
    tree, _ = codec.encode([Color.RED])
    tree[0]["class"] = "antigravity:Color"
    with pytest.raises(MissingClass, match="antigravity"):
        codec.decode(tree, None)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("reference", ["os:system", "builtins:eval", "subprocess:Popen", "builtins:int"])
def test_a_node_cannot_call_what_is_no_plain_class(reference):
    """Only enums, named tuples and dataclasses are ever constructed."""
    node = {"!": "enum", "class": reference, "name": "x", "value": "echo"}
    with pytest.raises(MissingClass):
        codec.decode([node], None)


@pytest.mark.parametrize(
    "node", [{"!": "nonsense"}, {"!": "tuple"}, {"!": "float", "bits": "zz"}, {"!": "range", "items": 3}]
)
def test_a_tree_that_makes_no_sense_names_the_place(node):
    """Whole to the last byte, it is not damage either: an older checkpoint would be no better."""
    with pytest.raises(UndecodableState, match=r"a\.0"):
        codec.decode({"a": [node]}, None)


class Unhashable(enum.Enum):
    NAN = float("nan")
    TENSOR = torch.tensor([1.0, 2.0])


@dataclasses.dataclass
class Base:
    x: int = 1


@dataclasses.dataclass
class WithMore(Base):
    def __post_init__(self):
        self.computed = 3


@dataclasses.dataclass
class OfASet(set):
    x: int = 1


EMPTY = [
    np.str_(""),
    np.bytes_(b""),
    np.array(["", ""]),
    np.zeros((2, 3), dtype="S0"),
    np.zeros(3, dtype="V0"),
    np.zeros((), dtype=[]),
]


@pytest.mark.parametrize("value", EMPTY, ids=repr)
def test_numpy_values_without_bytes_come_back(value):
    """They were saved for hours, and every checkpoint was called damaged at the first resume."""
    back = through_json({"v": value})["v"]
    assert (type(back), back.dtype, back.shape) == (type(value), value.dtype, value.shape)
    assert back.tobytes() == value.tobytes()


def test_enum_members_come_back_by_name():
    """A NaN or a tensor is no key to look a member up by."""
    assert through_json([Unhashable.NAN, Unhashable.TENSOR]) == [Unhashable.NAN, Unhashable.TENSOR]


def test_a_generator_spawns_the_same_children_after_the_round_trip():
    """What spawn() gives comes from the seed, which the bit generator's state does not hold."""
    generator = np.random.default_rng(5)
    generator.spawn(2)
    back = through_json([generator])[0]
    assert back.spawn(1)[0].normal() == generator.spawn(1)[0].normal()


@pytest.mark.parametrize(
    "value", [WithMore(), OfASet(), np.random.RandomState(np.random.PCG64(3))], ids=["more", "set", "random-state"]
)
def test_what_would_come_back_with_less_is_refused_at_the_save(value):
    """Attributes that are no fields, a base that is no dataclass, a legacy state over another generator."""
    with pytest.raises(UnsupportedState):
        codec.encode({"v": value})


def test_strings_that_utf8_cannot_hold_are_held_everywhere():
    """In a path, as a key, and as the name of a tensor."""
    state = {"p": pathlib.Path("a\udcff"), "\ud800": torch.ones(2)}
    assert_same(through_json(state), state)


@pytest.mark.parametrize("index", range(len(USERS_VALUES)))
def test_the_check_before_training_passes_what_comes_back(index):
    """It decodes what it encoded, on the live tensors."""
    tensor = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    codec.check_inverse({"v": USERS_VALUES[index], "t": tensor, "u": tensor, "p": torch.nn.Parameter(tensor)})


def test_the_check_before_training_finds_what_could_be_saved_but_not_loaded(monkeypatch):
    """A decoder that fails is found before the first step, and named by path."""

    def broken(decoder, node, path):
        raise ValueError("no")

    monkeypatch.setitem(codec._DECODERS, "range", broken)
    with pytest.raises(UnsupportedState, match=r"a\.b.*not loaded"):
        codec.check_inverse({"a": {"b": range(3)}})
