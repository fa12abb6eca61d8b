"""Nodes for NumPy: scalars inline, arrays as tensors of the file, generators by the state they give out."""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from trainerd.checkpoint.errors import UnsupportedState
from trainerd.checkpoint.trees import KIND, Path, joined

_BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}
_SEED = ("entropy", "spawn_key", "pool_size", "n_children_spawned")
_SIMPLE_TYPE = re.compile(r"[<>|][biufcSUVMm][0-9]{1,9}(\[[A-Za-z0-9/]{1,20}\])?")
_MOST_NESTING = 20
_LARGEST_POOL = 256


def _encode_array(encoder: Any, value: np.ndarray[Any, Any], path: Path) -> Any:
    described = _describe(value.dtype, path)
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    flat = _row_major(value.T if order == "F" else value)
    stored = flat.reshape(-1).view(np.uint8) if flat.nbytes else np.empty(0, dtype=np.uint8)
    return {
        KIND: "ndarray",
        "dtype": described,
        "shape": list(value.shape),
        "order": order,
        "tensor": encoder.reference(torch.from_numpy(stored if stored.flags.writeable else stored.copy()), path),
    }


def _row_major(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if value.flags.c_contiguous:
        return value
    # Between the fields of a record a plain copy would leave whatever lay in memory: each save would differ.
    room = np.ndarray(value.shape, value.dtype, bytearray(value.nbytes or 1))
    room[...] = value
    return room


def _decode_array(decoder: Any, node: Any, _path: Path) -> np.ndarray[Any, Any]:
    shape, dtype = tuple(node["shape"]), _dtype(node["dtype"])
    stored: np.ndarray[Any, Any] = decoder.tensor(node["tensor"]).numpy()
    if stored.dtype != np.uint8 or stored.size != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{stored.size} elements of {stored.dtype} for the shape {shape} of {dtype}")
    # Its bytes are copied as bytes: NumPy copies records field by field. No elements have no memory to look at.
    return np.ndarray(shape, dtype, stored.copy() if stored.size else bytearray(1), order=node["order"])


def _encode_scalar(_encoder: Any, value: np.generic, path: Path) -> Any:
    # An empty string gives out a byte that is none of its own.
    data = value.tobytes()[: value.dtype.itemsize]
    node = {KIND: "numpy", "dtype": _describe(value.dtype, path), "hex": data.hex()}
    if type(value) is not value.dtype.type:
        raise UnsupportedState(joined(path), f"a NumPy scalar of type {type(value).__name__}")
    return node


def _decode_scalar(_decoder: Any, node: Any, _path: Path) -> Any:
    dtype, data = _dtype(node["dtype"]), bytearray.fromhex(node["hex"])
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a {dtype}")
    # NumPy itself would take zeros at the end of a string for filling.
    if dtype.kind == "S":
        return np.bytes_(data)
    if dtype.kind == "U":
        return np.str_(data.decode("utf-32-be" if dtype.str[0] == ">" else "utf-32-le", "surrogatepass"))
    return np.ndarray((), dtype, data or bytearray(1))[()]


def _describe(dtype: np.dtype[Any], path: Path) -> Any:
    """As .npy files do: a string, or for records the list of fields. UnsupportedState if that does not say it all."""
    if dtype.hasobject:
        raise UnsupportedState(joined(path), f"a NumPy value of type {dtype}", "it holds Python objects")
    why = ".npy files, whose words are used here, cannot describe it"
    try:
        with warnings.catch_warnings():
            # NumPy only warns of metadata and of foreign types, which it describes as nameless bytes.
            warnings.simplefilter("error")
            described = _listed(np.lib.format.dtype_to_descr(dtype))
        again = _dtype(described)
    except (ValueError, TypeError, RecursionError, Warning) as error:
        raise UnsupportedState(joined(path), f"a NumPy value of type {_shown(dtype)}", f"{why}: {error}") from None
    if again != dtype or again.type is not dtype.type or again.isalignedstruct != dtype.isalignedstruct:
        raise UnsupportedState(joined(path), f"a NumPy value of type {_shown(dtype)}", why)
    return described


def _shown(dtype: np.dtype[Any]) -> str:
    return f"{dtype.type.__name__} of {dtype.itemsize} bytes"


def _listed(description: Any) -> Any:
    return [_listed(item) for item in description] if isinstance(description, (list, tuple)) else description


def _dtype(description: Any) -> np.dtype[Any]:
    dtype = np.lib.format.descr_to_dtype(_fields(description, 0))
    if dtype.hasobject:
        raise ValueError(f"{dtype} holds Python objects")
    return dtype


def _fields(description: Any, depth: int) -> Any:
    if depth > _MOST_NESTING:
        raise ValueError(f"records within records, more than {_MOST_NESTING} deep")
    if isinstance(description, str):
        if not _SIMPLE_TYPE.fullmatch(description):
            raise ValueError(f"{description!r} is no type of NumPy")
        return description
    return [(_name(field[0]), _fields(field[1], depth + 1), *map(tuple, field[2:])) for field in description]


def _name(described: Any) -> Any:
    """A field's name, or a pair of its title and its name."""
    return tuple(described) if isinstance(described, list) else described


def _encode_generator(encoder: Any, value: np.random.Generator, path: Path) -> Any:
    bits = value.bit_generator
    if type(bits) not in _BIT_GENERATORS.values():
        raise UnsupportedState(joined(path), f"a NumPy Generator over {type(bits).__name__}")
    seed = bits.seed_seq
    if type(seed) is not np.random.SeedSequence:
        raise UnsupportedState(joined(path), f"a NumPy Generator seeded by {type(seed).__name__}")
    if seed.pool_size > _LARGEST_POOL:
        raise UnsupportedState(joined(path), "a NumPy Generator", f"the pool of its seed has {seed.pool_size} words")
    node = {KIND: "numpy.Generator", "state": encoder.encode(dict(bits.state), path)}
    # Not for its numbers, which the state gives, but for the children that spawn() makes.
    return node | {"seed": encoder.encode({name: getattr(seed, name) for name in _SEED}, path)}


def _decode_generator(decoder: Any, node: Any, path: Path) -> np.random.Generator:
    state = _checked(decoder.decode(node["state"], path))
    seed = decoder.decode(node["seed"], path)
    if seed["pool_size"] > _LARGEST_POOL:
        raise ValueError(f"a seed with a pool of {seed['pool_size']} words")  # mixing takes the square of it
    seed = np.random.SeedSequence(**seed)
    bits = _BIT_GENERATORS[state["bit_generator"]](seed)
    bits.state = state
    return np.random.Generator(bits)


def _checked(state: Any) -> Any:
    """NumPy takes positions in its buffers on trust, and reads beyond their ends."""
    limits = {"MT19937": (state["state"].get("pos", 0), 624), "Philox": (state.get("buffer_pos", 0), 4)}
    position, most = limits.get(state["bit_generator"], (0, 0))
    if not 0 <= position <= most:
        raise ValueError(f"a {state['bit_generator']} at position {position}")
    return state


def _encode_random_state(encoder: Any, value: np.random.RandomState, path: Path) -> Any:
    state = dict(value.get_state(legacy=False))
    if state["bit_generator"] != "MT19937":
        raise UnsupportedState(joined(path), f"a NumPy RandomState over {state['bit_generator']}")
    return {KIND: "numpy.RandomState", "state": encoder.encode(state, path)}


def _decode_random_state(decoder: Any, node: Any, path: Path) -> np.random.RandomState:
    value = np.random.RandomState()
    value.set_state(_checked(decoder.decode(node["state"], path)))
    return value


def handler_for(value: object) -> Callable[[Any, Any, Path], Any] | None:
    """NumPy has a class for each scalar type, so they are told by what they derive from."""
    return _encode_scalar if isinstance(value, np.generic) else None


ENCODERS: dict[type, Callable[[Any, Any, Path], Any]] = {
    np.ndarray: _encode_array,
    np.random.Generator: _encode_generator,
    np.random.RandomState: _encode_random_state,
}

DECODERS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "ndarray": _decode_array,
    "numpy": _decode_scalar,
    "numpy.Generator": _decode_generator,
    "numpy.RandomState": _decode_random_state,
}
