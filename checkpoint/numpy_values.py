"""Nodes for NumPy: scalars inline, arrays as tensors of the file, generators by the state they give out."""

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


def _encode_array(encoder: Any, value: np.ndarray[Any, Any], path: Path) -> Any:
    if value.dtype.hasobject:
        raise UnsupportedState(joined(path), f"a NumPy array of {value.dtype}", "it holds Python objects")
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    flat = np.ascontiguousarray(value.T if order == "F" else value)
    stored = (
        torch.from_numpy(np.frombuffer(flat.tobytes(), dtype=np.uint8).copy())
        if flat.nbytes
        else torch.empty(0, dtype=torch.uint8)
    )
    return {
        KIND: "ndarray",
        "dtype": _describe(value.dtype),
        "shape": list(value.shape),
        "order": order,
        "tensor": encoder.reference(stored, path),
    }


def _decode_array(decoder: Any, node: Any, _path: Path) -> np.ndarray[Any, Any]:
    shape, dtype = tuple(node["shape"]), _dtype(node["dtype"])
    if not dtype.itemsize:
        return np.zeros(shape, dtype, order=node["order"])
    flat: np.ndarray[Any, Any] = decoder.tensor(node["tensor"]).numpy().view(dtype)
    return flat.reshape(shape[::-1]).T.copy(order="F") if node["order"] == "F" else flat.reshape(shape).copy()


def _encode_scalar(_encoder: Any, value: np.generic, path: Path) -> Any:
    if value.dtype.hasobject:
        raise UnsupportedState(joined(path), f"a NumPy scalar of {value.dtype}", "it holds a Python object")
    return {KIND: "numpy", "dtype": _describe(value.dtype), "hex": value.tobytes().hex()}


def _decode_scalar(_decoder: Any, node: Any, _path: Path) -> Any:
    # A string of no characters has no bytes, which frombuffer refuses.
    return np.ndarray((), _dtype(node["dtype"]), bytes.fromhex(node["hex"]) or b"\0")[()]


def _describe(dtype: np.dtype[Any]) -> Any:
    """As .npy files do: a string, or for records the list of fields."""
    description: Any = np.lib.format.dtype_to_descr(dtype)
    return description if isinstance(description, str) else _listed(description)


def _listed(description: Any) -> Any:
    return [_listed(item) for item in description] if isinstance(description, (list, tuple)) else description


def _dtype(description: Any) -> np.dtype[Any]:
    return np.lib.format.descr_to_dtype(_fields(description))


def _fields(description: Any) -> Any:
    if isinstance(description, str):
        return description
    return [(field[0], _fields(field[1]), *map(tuple, field[2:])) for field in description]


def _encode_generator(encoder: Any, value: np.random.Generator, path: Path) -> Any:
    bits = value.bit_generator
    if type(bits).__name__ not in _BIT_GENERATORS:
        raise UnsupportedState(joined(path), f"a NumPy Generator over {type(bits).__name__}")
    seed = bits.seed_seq
    if type(seed) is not np.random.SeedSequence:
        raise UnsupportedState(joined(path), f"a NumPy Generator seeded by {type(seed).__name__}")
    node = {KIND: "numpy.Generator", "state": encoder.encode(dict(bits.state), path)}
    # Not for its numbers, which the state gives, but for the children that spawn() makes.
    return node | {"seed": encoder.encode({name: getattr(seed, name) for name in _SEED}, path)}


def _decode_generator(decoder: Any, node: Any, path: Path) -> np.random.Generator:
    state = decoder.decode(node["state"], path)
    seed = np.random.SeedSequence(**decoder.decode(node["seed"], path))
    bits = _BIT_GENERATORS[state["bit_generator"]](seed)
    bits.state = state
    return np.random.Generator(bits)


def _encode_random_state(encoder: Any, value: np.random.RandomState, path: Path) -> Any:
    state = dict(value.get_state(legacy=False))
    if state["bit_generator"] != "MT19937":
        raise UnsupportedState(joined(path), f"a NumPy RandomState over {state['bit_generator']}")
    return {KIND: "numpy.RandomState", "state": encoder.encode(state, path)}


def _decode_random_state(decoder: Any, node: Any, path: Path) -> np.random.RandomState:
    value = np.random.RandomState()
    value.set_state(decoder.decode(node["state"], path))
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
