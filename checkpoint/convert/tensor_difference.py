"""How far two stored tensors of one type and shape are apart, read side by side in blocks."""

import math
from collections.abc import Iterator

import torch

from trainerd.checkpoint import dtypes
from trainerd.checkpoint.convert.diffing import Distance
from trainerd.checkpoint.convert.streams import stored_blocks
from trainerd.checkpoint.manifest import Manifest
from trainerd.checkpoint.storage import Storage

Place = tuple[Storage, Manifest, str]

# In 64-bit floats, with their intermediate results, these take many times their size.
_COMPUTED_BYTES = 2**20

_PACKED = {"float4_e2m1fn_x2"}  # two numbers in a byte: torch does not compute with them


def distance(a: Place, b: Place, dtype: str) -> Distance | None:
    """The distance from a to b, their bytes taken as elements of `dtype`; None if all bits are equal. Damaged."""
    sums = _Sums(dtype)
    for one, other in _side_by_side(stored_blocks(*a), stored_blocks(*b)):
        sums.add(one, other)
    return sums.distance()


def _side_by_side(a: Iterator[bytes], b: Iterator[bytes]) -> Iterator[tuple[memoryview, memoryview]]:
    """Equally long pieces of both, each of whole elements; both are read to their ends, where hashes are checked."""
    one, other = memoryview(b""), memoryview(b"")
    while True:
        one = one or memoryview(next(a, b""))
        other = other or memoryview(next(b, b""))
        length = min(len(one), len(other), _COMPUTED_BYTES)
        if not length:
            return
        yield one[:length], other[:length]
        one, other = one[length:], other[length:]


class _Sums:
    """What is added up over the blocks."""

    def __init__(self, dtype: str) -> None:
        known = dtype in dtypes.DTYPES
        self._dtype = getattr(torch, dtype) if known and dtype not in _PACKED else None
        self._width = dtypes.item_bytes(dtype) if known else 1
        self._elements = self._changed = self._not_finite = 0
        self._norm_of_a = self._norm = self._largest = 0.0

    def add(self, a: memoryview, b: memoryview) -> None:
        """Take in a block of each."""
        bits_a, bits_b = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (a, b))
        changed = (bits_a != bits_b).view(-1, self._width).any(dim=1)
        self._elements += len(changed)
        self._changed += int(changed.sum())
        if self._dtype is None:
            return
        one, other = (_as_float64(bits.view(self._dtype)) for bits in (bits_a, bits_b))
        finite = one.isfinite() & other.isfinite()
        moved = torch.where(finite, other - one, 0.0)
        self._not_finite += int((changed & ~finite.view(len(changed), -1).all(dim=1)).sum())
        self._norm_of_a = math.hypot(self._norm_of_a, float(torch.where(one.isfinite(), one, 0.0).norm()))
        self._norm = math.hypot(self._norm, float(moved.norm()))
        self._largest = max(self._largest, float(moved.abs().max()))

    def distance(self) -> Distance | None:
        """What it came to."""
        if not self._changed:
            return None
        fraction = self._changed / self._elements
        if self._dtype is None:
            return Distance(fraction)
        relative = self._norm / self._norm_of_a if self._norm_of_a else None
        return Distance(fraction, self._norm, relative, self._largest, self._not_finite)


def _as_float64(values: torch.Tensor) -> torch.Tensor:
    """Real numbers; a complex one is two of them."""
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.to(torch.float64)
