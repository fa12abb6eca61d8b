"""Nodes for torch: tensors of every kind, and the small torch values found beside them."""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trainerd.checkpoint.dtypes import DTYPES
from trainerd.checkpoint.errors import UnsupportedState
from trainerd.checkpoint.trees import KIND, Path, joined

_COMPRESSED = {
    torch.sparse_csr: "sparse_csr",
    torch.sparse_csc: "sparse_csc",
    torch.sparse_bsr: "sparse_bsr",
    torch.sparse_bsc: "sparse_bsc",
}


_SAMPLE_BYTES = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_QUANTIZED = {torch.quint8: torch.uint8, torch.qint8: torch.int8, torch.qint32: torch.int32}
_PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)
_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric, torch.per_channel_affine_float_qparams)


@dataclass(frozen=True)
class Leaf:
    """A strided tensor on its way into a file."""

    name: str
    tensor: torch.Tensor

    @property
    def dtype(self) -> str:
        """Torch's name of the element type."""
        return _name(self.tensor.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return tuple(self.tensor.shape)

    @property
    def bytes(self) -> int:
        """Bytes of its elements, whatever its storage takes."""
        return self.tensor.numel() * self.tensor.element_size()

    def memory(self, start: int = 0, length: int | None = None) -> memoryview:
        """Bytes of its elements in row-major order; a copy only when they do not lie so in CPU memory."""
        item = self.tensor.element_size()
        end = self.bytes if length is None else start + length
        return memory_view(self._flat()[start // item : end // item].cpu())

    def sample(self) -> str:
        """A few of its bytes in hexadecimal, spread over it, from the same places each time."""
        octets = self._flat().view(torch.uint8)
        return memory_view(octets[:: octets.numel() // _SAMPLE_BYTES | 1].contiguous().cpu()).hex()

    def _flat(self) -> torch.Tensor:
        return as_bits(self.tensor.detach().resolve_conj().resolve_neg()).contiguous().view(-1)


def memory_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, of any element type; the view keeps the tensor alive."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    # Not through numpy, which has no bfloat16, float8 or complex32.
    block = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    block.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(block).cast("B")


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: torch copies those of every width, and never as numbers."""
    integer = _INTEGERS.get(tensor.element_size())
    return tensor if integer is None else tensor.view(integer)


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """What two tensors share exactly when they are one tensor under two names."""
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _encode_tensor(encoder: Any, value: torch.Tensor, path: Path) -> Any:
    if value.device.type == "meta":
        raise UnsupportedState(joined(path), "a tensor on the meta device", "it has no values")
    if value.is_nested:
        raise UnsupportedState(joined(path), "a nested tensor", "keep its parts in a list")
    if value.is_quantized:
        return _encode_quantized(encoder, value, path)
    if value.layout is torch.sparse_coo:
        return _encode_coo(encoder, value, path) | _role(value)
    if value.layout in _COMPRESSED:
        return _encode_compressed(encoder, value, path) | _role(value)
    if value.layout is not torch.strided or _name(value.dtype) not in DTYPES:
        raise UnsupportedState(joined(path), f"a tensor of {value.dtype}, layout {value.layout}")
    if value.numel() and not value.data_ptr():
        raise UnsupportedState(joined(path), "a tensor without memory", "its storage was freed: gather it first")
    node: dict[str, Any] = {KIND: "tensor", "tensor": encoder.reference(value, path)}
    if not value.is_contiguous() and is_dense(value.shape, value.stride()):
        node["stride"] = list(value.stride())
    return node | _role(value)


def _role(value: torch.Tensor) -> dict[str, bool]:
    role = {"requires_grad": True} if value.requires_grad else {}
    return role | {"parameter": True} if type(value) is torch.nn.Parameter else role


def _in_role(tensor: torch.Tensor, node: Any) -> torch.Tensor:
    requires_grad = bool(node.get("requires_grad"))
    if node.get("parameter"):
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.detach().requires_grad_() if requires_grad else tensor


def _decode_tensor(decoder: Any, node: Any, _path: Path) -> torch.Tensor:
    name, stride = node["tensor"], node.get("stride")
    tensor: torch.Tensor = decoder.tensor(name)
    if stride is not None:
        stride = tuple(stride)
        tensor = decoder.shared((name, stride), lambda: _laid_out(tensor, stride))
    role = (bool(node.get("parameter")), bool(node.get("requires_grad")))
    if any(role):
        return decoder.shared((name, stride, *role), lambda: _in_role(tensor, node))  # type: ignore[no-any-return]
    return tensor


def _laid_out(tensor: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    """In its memory format: another one may pick another kernel, which rounds in another way."""
    if stride is None or tensor.stride() == stride:
        return tensor
    if len(stride) != tensor.dim() or not is_dense(tensor.shape, stride):
        raise ValueError(f"the strides {stride} do not lay out {tuple(tensor.shape)} without holes")
    laid_out = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype)
    as_bits(laid_out).copy_(as_bits(tensor))
    return laid_out


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements so strided fill one block of memory in some order of the dimensions."""
    if 0 in shape:
        return True
    expected = 1
    for step, extent in sorted(zip(stride, shape, strict=True)):
        if extent != 1 and step != expected:
            return False
        expected *= extent
    return True


def _encode_coo(encoder: Any, value: torch.Tensor, path: Path) -> Any:
    detached = value.detach()
    return {
        KIND: "sparse_coo",
        "shape": list(value.shape),
        "coalesced": value.is_coalesced(),
        "indices": encoder.encode(detached._indices(), (path, "indices")),
        "values": encoder.encode(detached._values(), (path, "values")),
    }


def _decode_coo(decoder: Any, node: Any, path: Path) -> torch.Tensor:
    indices, values = decoder.decode(node["indices"], path), decoder.decode(node["values"], path)
    tensor = torch.sparse_coo_tensor(
        indices, values, node["shape"], is_coalesced=node["coalesced"], check_invariants=True
    )
    return _in_role(tensor, node)


def _encode_compressed(encoder: Any, value: torch.Tensor, path: Path) -> Any:
    detached = value.detach()
    by_rows = value.layout in (torch.sparse_csr, torch.sparse_bsr)
    return {
        KIND: _COMPRESSED[value.layout],
        "shape": list(value.shape),
        "compressed": encoder.encode(
            detached.crow_indices() if by_rows else detached.ccol_indices(), (path, "compressed")
        ),
        "plain": encoder.encode(detached.col_indices() if by_rows else detached.row_indices(), (path, "plain")),
        "values": encoder.encode(detached.values(), (path, "values")),
    }


def _decode_compressed(decoder: Any, node: Any, path: Path) -> torch.Tensor:
    compressed, plain, values = (decoder.decode(node[part], path) for part in ("compressed", "plain", "values"))
    layout = next(layout for layout, kind in _COMPRESSED.items() if kind == node[KIND])
    tensor = torch.sparse_compressed_tensor(
        compressed, plain, values, node["shape"], layout=layout, check_invariants=True
    )
    return _in_role(tensor, node)


def _encode_quantized(encoder: Any, value: torch.Tensor, path: Path) -> Any:
    what = f"a quantized tensor of {value.dtype}, {value.qscheme()}"
    if value.dtype not in _QUANTIZED:
        raise UnsupportedState(joined(path), what)
    values = value.int_repr().contiguous()
    if is_dense(value.shape, value.stride()):
        values = _laid_out(values, value.stride())
    node = {
        KIND: "quantized",
        "dtype": _name(value.dtype),
        "values": encoder.encode(values, (path, "values")),
    }
    if value.qscheme() in _PER_TENSOR:
        return node | {"scale": encoder.encode(value.q_scale(), path), "zero_point": value.q_zero_point()}
    if value.qscheme() not in _PER_CHANNEL:
        raise UnsupportedState(joined(path), what)
    scales, axis = value.q_per_channel_scales(), value.q_per_channel_axis()
    if scales.numel() != value.shape[axis]:
        why = f"it is a view with {scales.numel()} scales for {value.shape[axis]} channels"
        raise UnsupportedState(joined(path), what, why)
    return node | {
        "scales": encoder.encode(scales, (path, "scales")),
        "zero_points": encoder.encode(value.q_per_channel_zero_points(), (path, "zero_points")),
        "axis": axis,
    }


def _decode_quantized(decoder: Any, node: Any, path: Path) -> torch.Tensor:
    values = decoder.decode(node["values"], path)
    dtype = _dtype(node["dtype"])
    if values.dtype != _QUANTIZED.get(dtype) or not is_dense(values.shape, values.stride()):
        raise ValueError(f"a tensor of {values.dtype} cannot be the numbers of {dtype}")
    if node.get("scale") is not None:
        scale = decoder.decode(node["scale"], path)
        empty_one = torch._empty_affine_quantized(values.shape, scale=scale, zero_point=node["zero_point"], dtype=dtype)
        quantized = empty_one if values.is_contiguous() else empty_one.as_strided(values.shape, values.stride())
    else:
        scales, zero_points = decoder.decode(node["scales"], path), decoder.decode(node["zero_points"], path)
        # Torch does not check it, and reads beyond their ends.
        channels = (values.shape[node["axis"]],)
        if scales.shape != channels or zero_points.shape != channels:
            raise ValueError(
                f"{scales.numel()} scales and {zero_points.numel()} zero points for {channels[0]} channels"
            )
        quantized = torch._empty_per_channel_affine_quantized(
            values.shape,
            scales=scales,
            zero_points=zero_points,
            axis=node["axis"],
            dtype=dtype,
            memory_format=_memory_format(values),
        )
    memory_view(quantized)[:] = memory_view(values)
    return quantized


def _memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """The one it is in, of those that a tensor quantized per channel can be in."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    found = formats.get(tensor.dim(), torch.contiguous_format)
    return torch.contiguous_format if tensor.is_contiguous() else found


def _encode_generator(encoder: Any, value: torch.Generator, path: Path) -> Any:
    return {
        KIND: "torch.Generator",
        "device": str(value.device),
        "state": encoder.encode(value.get_state(), path),
    }


def _decode_generator(decoder: Any, node: Any, path: Path) -> torch.Generator:
    generator = torch.Generator(device=node["device"])
    generator.set_state(decoder.decode(node["state"], path))
    return generator


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)  # not getattr: torch imports modules by it
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


def empty(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A CPU tensor of unset values, by the names of the manifest."""
    return torch.empty(shape, dtype=_dtype(dtype))


ENCODERS: dict[type, Callable[[Any, Any, Path], Any]] = {
    torch.Tensor: _encode_tensor,
    torch.nn.Parameter: _encode_tensor,
    torch.Size: lambda _encoder, value, _path: {KIND: "torch.Size", "items": list(value)},
    torch.dtype: lambda _encoder, value, _path: {KIND: "torch.dtype", "name": _name(value)},
    torch.device: lambda _encoder, value, _path: {KIND: "torch.device", "name": str(value)},
    torch.Generator: _encode_generator,
}

DECODERS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "tensor": _decode_tensor,
    "sparse_coo": _decode_coo,
    "quantized": _decode_quantized,
    "torch.Size": lambda _decoder, node, _path: torch.Size(node["items"]),
    "torch.dtype": lambda _decoder, node, _path: _dtype(node["name"]),
    "torch.device": lambda _decoder, node, _path: torch.device(node["name"]),
    "torch.Generator": _decode_generator,
    **dict.fromkeys(_COMPRESSED.values(), _decode_compressed),
}
