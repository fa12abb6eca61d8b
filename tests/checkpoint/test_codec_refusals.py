"""What a checkpoint cannot give back is refused at the save, by path and kind; and how deep and wide a state may be."""

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import pathlib
import typing

import numpy as np
import pytest
import torch
from support.same_bits import difference
from support.user_values import Frozen, Point

from trainerd.checkpoint import codec, dtypes
from trainerd.checkpoint.errors import UndecodableState, UnsupportedState
from trainerd.checkpoint.ownership import RunOwner
from trainerd.checkpoint.storage import open_storage
from trainerd.checkpoint.store import CheckpointStore
from trainerd.checkpoint.trees import MAX_DEPTH, children


class MyTensor(torch.Tensor):
    pass


class MyParameter(torch.nn.Parameter):
    pass


class MyInt(int):
    pass


class MyText(str):
    pass


class MyList(list):
    pass


class MyDict(dict):
    pass


class MyOrderedDict(collections.OrderedDict):
    pass


class MyPoint(Point):
    pass


class MyPath(type(pathlib.Path())):
    pass


class MySet(set):
    pass


T = typing.TypeVar("T")


@dataclasses.dataclass
class Box(typing.Generic[T]):
    item: T


@dataclasses.dataclass
class NotFilled:
    computed: int = dataclasses.field(init=False)


class WithSlot(Frozen):
    __slots__ = ("more",)


def with_slot():
    value = WithSlot(1)
    object.__setattr__(value, "more", 2)
    return value


def freed():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def counter_with_attribute():
    counter = collections.Counter("ab")
    counter.total_seen = 3
    return counter


def nested_record(depth):
    dtype = np.dtype("i4")
    for _ in range(depth):
        dtype = np.dtype([("a", dtype)])
    return np.zeros(1, dtype)


def quantized(dtype):
    return torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, dtype)


PARTS = [torch.ones(2), torch.ones(3)]
REFUSED = {
    "tensor subclass": (lambda: torch.ones(2).as_subclass(MyTensor), "MyTensor"),
    "parameter subclass": (lambda: MyParameter(torch.ones(2)), "MyParameter"),
    "uninitialized parameter": (torch.nn.UninitializedParameter, "UninitializedParameter"),
    "meta": (lambda: torch.empty(2, device="meta"), "meta"),
    "freed": (freed, "freed"),
    "nested": (lambda: torch.nested.nested_tensor(PARTS), "nested"),
    "jagged": (lambda: torch.nested.nested_tensor(PARTS, layout=torch.jagged), "NestedTensor"),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), "_mkldnn"),
    "quantized in halves": (lambda: quantized(torch.quint4x2), "quint4x2"),
    "strided bytes called quantized": (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.quint8), "quint8"),
    "max": (lambda: torch.ones(2, 2).max(0), "return_types"),
    "matrix": (lambda: np.matrix([[1]]), "matrix"),
    "masked array": (lambda: np.ma.masked_array([1, 2], [0, 1]), "MaskedArray"),
    "record array": (lambda: np.rec.array([(1,)], dtype=[("a", "i4")]), "recarray"),
    "record": (lambda: np.rec.array([(1,)], dtype=[("a", "i4")])[0], "record"),
    "aligned record": (lambda: np.zeros(2, np.dtype([("a", "i1"), ("b", "i4")], align=True)), "void"),
    "overlapping record": (
        lambda: np.zeros(2, np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 2]})),
        "overlapping",
    ),
    "type with metadata": (lambda: np.zeros(2, np.dtype("i4", metadata={"a": 1})), "metadata"),
    "type with another name": (lambda: np.longlong(1), "longlong"),
    "strings as objects": (lambda: np.array(["a"], dtype=np.dtypes.StringDType()), "objects"),
    "deep record": (lambda: nested_record(30), "records within records"),
    "record too deep for NumPy": (lambda: nested_record(3000), "NumPy"),
    "generator of RandomState": (lambda: np.random.Generator(np.random.RandomState(1)._bit_generator), "NoneType"),
    "int subclass": (lambda: MyInt(3), "MyInt"),
    "text subclass": (lambda: MyText("a"), "MyText"),
    "list subclass": (MyList, "MyList"),
    "dict subclass": (MyDict, "MyDict"),
    "ordered dict subclass": (MyOrderedDict, "MyOrderedDict"),
    "set subclass": (MySet, "MySet"),
    "named tuple subclass": (lambda: MyPoint(1, 2), "MyPoint"),
    "path subclass": (lambda: MyPath("a"), "MyPath"),
    "key of a subclass": (lambda: {MyInt(1): 2}, "MyInt"),
    "tensor as a key": (lambda: {torch.ones(1): 1}, "Tensor"),
    "tensor within a key": (lambda: {(1, (torch.ones(1),)): 1}, "equal key"),
    "counter with attributes": (counter_with_attribute, "total_seen"),
    "generic with its argument": (lambda: Box[int](1), "__orig_class__"),
    "dataclass not filled": (NotFilled, "no value for computed"),
    "dataclass with a slot more": (with_slot, "more"),
    "time": (lambda: datetime.time(1), "time"),
    "zone by itself": (lambda: datetime.UTC, "timezone"),
    "decimal": (lambda: decimal.Decimal(1), "Decimal"),
    "array": (lambda: array.array("i", [1]), "array"),
    "class": (lambda: enum.Enum, "EnumType"),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors", "ignore:torch.quantize_per", "ignore:the matrix")
@pytest.mark.parametrize("what", REFUSED)
def test_what_would_come_back_as_something_else_is_refused_by_path_and_kind(what):
    """Never turned into its base, its values or its bytes in silence."""
    make, says = REFUSED[what]
    with pytest.raises(UnsupportedState, match=says) as refused:
        codec.encode({"hooks": {"Mine": [make()]}})
    assert refused.value.path.startswith("hooks.Mine.0")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_element_type_of_this_torch_is_held_or_quantized():
    """A new torch with a new type is noticed here, and refused by name until it is in the table."""
    known = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert known - dtypes.DTYPES == {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
    for name in dtypes.DTYPES:
        assert torch.empty(0, dtype=getattr(torch, name)).element_size() == dtypes.item_bytes(name)


def nest(kind, depth):
    wrap = {
        "list": lambda value: [value],
        "tuple": lambda value: (value,),
        "dict": lambda value: {"a": value},
        "keyed dict": lambda value: {1: value},
        "set": lambda value: frozenset([value]),
        "deque": lambda value: collections.deque([value]),
        "named tuple": Point,
        "dataclass": Frozen,
        "slice": lambda value: slice(value, None),
    }
    value = 0
    for _ in range(depth):
        value = wrap[kind](value)
    return value


KINDS = ["list", "tuple", "dict", "keyed dict", "set", "deque", "named tuple", "dataclass", "slice"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_ten_thousand_levels_is_refused_not_followed(kind):
    """One paragraph, whatever the levels are made of; no recursion of the interpreter is used up."""
    with pytest.raises(UnsupportedState, match="deeper than 100") as refused:
        codec.encode({"v": nest(kind, 10_000)})
    assert len(str(refused.value)) < 1500


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_just_the_allowed_depth_comes_back_from_the_disk(kind, tmp_path):
    """The limit of the state, that of the manifest and the readers' recursion fit each other."""
    state = nest(kind, MAX_DEPTH - 1)
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    store = CheckpointStore(storage, term=owner.ensure_term(0))
    store.save(1, state)
    owner.release()
    assert difference(state, store.load().state) is None


def test_keys_and_members_are_no_way_around_the_depth():
    deep = nest("tuple", 10_000)
    holder = enum.Enum("holder", {"DEEP": [nest("list", 10_000)]}, module=__name__)
    globals()["holder"] = holder
    for state in ({deep: 1}, {1: {deep: 2}}, holder.DEEP, {2**20000: deep}):
        with pytest.raises(UnsupportedState, match="deeper than 100"):
            codec.encode({"v": state})


def test_states_that_contain_themselves_are_refused_not_followed():
    items, mapping, queue = [], {}, collections.deque()
    items.append(items)
    mapping["self"] = [mapping]
    queue.append(queue)
    for loop in (items, mapping, queue):
        with pytest.raises(UnsupportedState, match="contain itself"):
            codec.encode(loop)


def test_an_integer_of_any_size_is_a_key_and_a_value():
    """Python refuses to write one of more than 4300 digits in decimal, also in a message."""
    state = {3**20_000: torch.ones(1), (1, 5**20_000): -(7**20_000)}
    tree, leaves = codec.encode(state)
    assert difference(state, codec.decode(tree, lambda name: leaves[name].tensor)) is None


def test_a_broken_value_below_a_strange_key_is_still_named():
    """The message is one printable paragraph."""
    with pytest.raises(UnsupportedState) as refused:
        codec.encode({"\ud800\x1b[2J": {"x" * 10_000: object()}})
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1000


def test_keys_that_look_alike_are_all_shown():
    """1 and "1" are two entries; both can be asked for."""
    tree, _ = codec.encode({1: "int", "1": "text", True + 1: "two"})
    assert children(tree) == {"1": "int", "1#2": "text", "2": "two"}


def test_two_hundred_thousand_values_come_back_from_the_disk(tmp_path):
    state = {"values": [{"i": i, "f": i / 3} if i % 2 else (i, f"s{i}") for i in range(100_000)]}
    storage = open_storage(str(tmp_path / "run"))
    owner = RunOwner.acquire(storage)
    store = CheckpointStore(storage, term=owner.ensure_term(0))
    store.save(1, state)
    owner.release()
    assert store.load().state == state


def test_two_hundred_thousand_tensors_keep_their_names_and_values():
    """Scalars of their own memory, as an optimizer's step counters are."""
    state = {f"step.{i}": torch.tensor(float(i)) for i in range(200_000)}
    tree, leaves = codec.encode(state)
    assert len(leaves) == 200_000
    back = codec.decode(tree, lambda name: leaves[name].tensor)
    assert list(back) == list(state)
    assert all(back[name] is tensor for name, tensor in state.items())


def test_a_state_without_the_attributes_of_its_ordered_dict_would_be_another(tmp_path):
    """`_metadata` of a module's state_dict() tells the versions of its parts."""
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    tree, leaves = codec.encode(state)
    back = codec.decode(tree, lambda name: leaves[name].tensor)
    assert back._metadata == state._metadata
    assert back._metadata["0"] == {"version": 2}


def test_a_name_that_a_lazy_module_would_import_for_is_not_asked_for(monkeypatch):
    """A module's __getattr__ is code, and loading runs none by name."""
    import types

    lazy = types.ModuleType("lazy")
    asked = []
    lazy.__getattr__ = asked.append
    monkeypatch.setitem(__import__("sys").modules, "lazy", lazy)
    with pytest.raises(Exception, match="lazy has no such class"):
        codec.decode({"!": "enum", "class": "lazy:Color", "name": "RED", "value": 1}, None)
    assert not asked


def test_a_class_whose_fields_changed_is_refused_not_filled_up():
    """A default of today's code is no value of the saved state."""
    tree, _ = codec.encode(Frozen(1))
    tree["fields"]["gone"] = tree["fields"].pop("value")
    with pytest.raises(UndecodableState, match=r"value is new, the field gone is gone"):
        codec.decode(tree, None)
