"""Two states held against each other value by value, knowing nothing of the codec: same types, order and bits."""

import collections
import dataclasses
import datetime
import enum
import pathlib
import struct

import numpy as np
import torch

_BY_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def difference(left, right, path="state"):
    """Where and how two states differ first; None if they are the same to the bit."""
    if type(left) is not type(right):
        return f"{path}: {type(left).__name__} is not {type(right).__name__}"
    if isinstance(left, enum.Enum):
        return None if left is right or (isinstance(left, enum.Flag) and left == right) else f"{path}: another member"
    if isinstance(left, torch.Tensor):
        return _first(path, _tensor_facts(left), _tensor_facts(right))
    if isinstance(left, np.ndarray):
        return _first(path, _array_facts(left), _array_facts(right))
    if isinstance(left, np.generic):
        facts = [(value.dtype, value.dtype.isalignedstruct, value.tobytes()) for value in (left, right)]
        return None if facts[0] == facts[1] else f"{path}: {facts}"
    if isinstance(left, (set, frozenset)):
        # A set has no order, and NaN no equal: by what each member is made of.
        facts = [sorted(map(_atom, value)) for value in (left, right)]
        return None if facts[0] == facts[1] else f"{path}: {facts}"
    if isinstance(left, dict):
        return _mapping(left, right, path)
    if isinstance(left, (list, tuple, collections.deque)):
        if len(left) != len(right) or getattr(left, "maxlen", None) != getattr(right, "maxlen", None):
            return f"{path}: {len(left)} and {len(right)} items"
        pairs = zip(left, right, strict=True)
        return next(filter(None, (difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(pairs))), None)
    if dataclasses.is_dataclass(left) and not isinstance(left, type):
        names = [field.name for field in dataclasses.fields(left)]
        found = (difference(getattr(left, name), getattr(right, name), f"{path}.{name}") for name in names)
        return next(filter(None, found), None)
    if isinstance(left, (np.random.Generator, np.random.RandomState, torch.Generator)):
        facts = [_generator_facts(value) for value in (left, right)]
        return difference(facts[0], facts[1], path)
    return None if _atom(left) == _atom(right) else f"{path}: {left!r} is not {right!r}"


def _mapping(left, right, path):
    keys = [list(left), list(right)]
    found = difference(keys[0], keys[1], f"{path}.keys()")
    if found or getattr(left, "default_factory", None) is not getattr(right, "default_factory", None):
        return found or f"{path}: another factory"
    if isinstance(left, collections.OrderedDict) and (found := difference(vars(left), vars(right), f"vars({path})")):
        return found
    pairs = zip(left.items(), right.values(), strict=True)
    return next(filter(None, (difference(a, b, f"{path}[{_atom(key)}]") for (key, a), b in pairs)), None)


def _atom(value):
    """What a value without parts is made of, so that equal means the same bits; for a tuple its members."""
    if isinstance(value, float) and not isinstance(value, np.generic):
        return ("float", struct.pack("<d", value))
    if isinstance(value, complex):
        return ("complex", struct.pack("<dd", value.real, value.imag))
    if isinstance(value, tuple):
        return ("tuple", *map(_atom, value))
    if isinstance(value, datetime.datetime):
        zone = value.tzinfo
        return ("datetime", value.replace(tzinfo=None).isoformat(), value.fold, type(zone).__name__, repr(zone))
    if isinstance(value, np.generic):
        return ("numpy", str(value.dtype), value.tobytes())
    if isinstance(value, (slice, range)):
        return (type(value).__name__, *map(_atom, (value.start, value.stop, value.step)))
    if isinstance(value, pathlib.PurePath):
        return (type(value).__name__, str(value))
    return (type(value).__name__, repr(value) if not isinstance(value, int) else hex(value))


def _first(path, left, right):
    for (name, ours), theirs in zip(left.items(), right.values(), strict=True):
        if isinstance(ours, torch.Tensor):
            if found := difference(ours, theirs, f"{path}.{name}"):
                return found
        elif ours != theirs:
            return f"{path}: {name} {str(ours)[:200]} is not {str(theirs)[:200]}"
    return None


def _tensor_facts(tensor):
    facts = {
        "layout": tensor.layout,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "requires_grad": tensor.requires_grad,
        "device": tensor.device,
    }
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return facts | {"coalesced": tensor.is_coalesced(), "indices": tensor._indices(), "values": tensor._values()}
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return facts | {"crow": tensor.crow_indices(), "col": tensor.col_indices(), "values": tensor.values()}
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return facts | {"ccol": tensor.ccol_indices(), "row": tensor.row_indices(), "values": tensor.values()}
    facts["stride"] = _kept_stride(tensor)
    if tensor.is_quantized:
        facts |= {"scheme": tensor.qscheme(), "numbers": tensor.int_repr().contiguous()}
        if tensor.qscheme() is torch.per_tensor_affine:
            return facts | {"scale": struct.pack("<d", tensor.q_scale()), "zero": tensor.q_zero_point()}
        names = ("q_per_channel_scales", "q_per_channel_zero_points")
        return facts | {name: getattr(tensor, name)() for name in names} | {"axis": tensor.q_per_channel_axis()}
    return facts | {"bits": _bits(tensor)}


def _kept_stride(tensor):
    """The strides of a tensor that lies without holes; others come back row-major."""
    order = sorted((step, extent) for step, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent != 1)
    expected = 1
    for step, extent in order:
        if step != expected:
            return "row-major"
        expected *= extent
    return "row-major" if tensor.is_contiguous() or not tensor.numel() else tensor.stride()


def _bits(tensor):
    plain = tensor.resolve_conj().resolve_neg()
    if plain.element_size() in _BY_WIDTH:
        plain = plain.view(_BY_WIDTH[plain.element_size()])
    return plain.numpy().tobytes()


def _array_facts(array):
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    # Only what belongs to a field counts, not what lies between the fields of a record.
    room = np.ndarray(array.shape, array.dtype, bytearray(array.nbytes or 1))
    room[...] = array
    return {
        "dtype": array.dtype,
        "type": array.dtype.type,
        "aligned": array.dtype.isalignedstruct,
        "shape": array.shape,
        "order": "F" if fortran else "C",
        "bytes": room.tobytes(),
    }


def _generator_facts(generator):
    if isinstance(generator, torch.Generator):
        return [str(generator.device), generator.get_state()]
    if isinstance(generator, np.random.RandomState):
        return [generator.get_state(legacy=False)]
    bits = generator.bit_generator
    seed = bits.seed_seq
    return [type(bits).__name__, bits.state, seed.entropy, seed.spawn_key, seed.pool_size, seed.n_children_spawned]
