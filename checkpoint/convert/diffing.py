"""What differs between two checkpoints: names, values, and how far each tensor moved.

Tensors whose hashes say that they are equal are not read, and torch is not imported as long as none is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from trainerd.checkpoint.convert.errors import NotConverted
from trainerd.checkpoint.convert.flattening import Flat, FlatTensor, flatten
from trainerd.checkpoint.convert.selection import select
from trainerd.checkpoint.manifest import TensorEntry
from trainerd.checkpoint.reader import StoredTree, read_tree
from trainerd.checkpoint.storage import Storage

Change = Literal["value", "type", "only in a", "only in b"]


@dataclass(frozen=True)
class Distance:
    """How far a tensor moved from a to b, in 64-bit floats.

    `l2` and `max_abs` are norms of b - a over the elements where it is finite; `relative` is l2 over the norm of a's
    finite elements, None if that is 0. `changed_fraction`: elements of other bits. `not_finite`: those among them that
    are NaN or infinite in a or b. Where torch cannot compute with the type, all but `changed_fraction` are None.
    """

    changed_fraction: float
    l2: float | None = None
    relative: float | None = None
    max_abs: float | None = None
    not_finite: int | None = None


@dataclass(frozen=True)
class TensorChange:
    """A tensor that differs; None on the side that lacks it. There is a distance where type and shape are equal."""

    path: str
    change: Change
    a: FlatTensor | None
    b: FlatTensor | None
    distance: Distance | None = None


@dataclass(frozen=True)
class ValueChange:
    """A value that differs, as nodes of the trees (docs/checkpoint-format.md); None on the side that lacks it."""

    path: str
    change: Change
    a: Any
    b: Any


@dataclass(frozen=True)
class Difference:
    """What differs, in the order of the state, and how many tensors and values are equal to the bit."""

    a: StoredTree
    b: StoredTree
    tensors: tuple[TensorChange, ...]
    values: tuple[ValueChange, ...]
    equal_tensors: int
    equal_values: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        return not self.tensors and not self.values


def diff_checkpoints(
    a: Storage,
    b: Storage,
    *,
    step_a: int | None = None,
    step_b: int | None = None,
    path: str = "",
    progress: Callable[[str], None] = lambda _tensor: None,
) -> Difference:
    """Compare two checkpoints, of one run or of two, or the part at `path` of both; tensors in blocks of 16 MiB.

    `a` and `b` are the runs' storages; without a step the newest valid one. `progress` is told the path of each tensor
    that is read. NoCheckpoint, Damaged; NotConverted if neither has the path.
    """
    stored_a, stored_b = read_tree(a, step_a), read_tree(b, step_b)
    flat_a, flat_b = _parts(stored_a, stored_b, path, f"{a.url}@{stored_a.step} and {b.url}@{stored_b.step}")
    values = _changed_values(flat_a.values, flat_b.values)
    tensors: list[TensorChange] = []
    for name in _either(flat_a.tensors, flat_b.tensors):
        one, other = flat_a.tensors.get(name), flat_b.tensors.get(name)
        if one is None or other is None:
            tensors.append(TensorChange(name, "only in b" if one is None else "only in a", one, other))
        elif (one.dtype, one.shape) != (other.dtype, other.shape):
            tensors.append(TensorChange(name, "type", one, other))
        elif not _equal(stored_a.manifest.tensors[one.stored], stored_b.manifest.tensors[other.stored]):
            from trainerd.checkpoint.convert.tensor_difference import distance

            progress(name)
            places = (a, stored_a.manifest, one.stored), (b, stored_b.manifest, other.stored)
            moved = distance(*places, one.dtype)
            tensors += [TensorChange(name, "value", one, other, moved)] if moved else []
    return Difference(
        stored_a,
        stored_b,
        tuple(tensors),
        tuple(values),
        equal_tensors=len(_either(flat_a.tensors, flat_b.tensors)) - len(tensors),
        equal_values=len(_either(flat_a.values, flat_b.values)) - len(values),
    )


def _parts(a: StoredTree, b: StoredTree, path: str, place: str) -> tuple[Flat, Flat]:
    """The part at a path on both sides; nothing on one that lacks it."""
    found: list[Flat] = []
    refusals = []
    for stored in (a, b):
        try:
            found.append(flatten(select(stored.tree, path, place), path))
        except NotConverted as error:
            found.append(Flat({}, {}))
            refusals.append(error)
    if len(refusals) == 2:
        raise refusals[0]
    return found[0], found[1]


def _changed_values(a: dict[str, Any], b: dict[str, Any]) -> list[ValueChange]:
    changes = []
    for name in _either(a, b):
        if name not in b:
            changes.append(ValueChange(name, "only in a", a[name], None))
        elif name not in a:
            changes.append(ValueChange(name, "only in b", None, b[name]))
        # As text, in which 1, 1.0 and true, or 0.0 and -0.0, are not the same.
        elif msgspec.json.encode(a[name]) != msgspec.json.encode(b[name]):
            changes.append(ValueChange(name, "value", a[name], b[name]))
    return changes


def _either(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [*a, *(name for name in b if name not in a)]


def _equal(a: TensorEntry, b: TensorEntry) -> bool:
    """Whether the hashes of equal pieces say that the tensors are equal; if the pieces differ, they say nothing."""
    return [(c.at, c.shape, c.xxh3_128) for c in a.chunks] == [(c.at, c.shape, c.xxh3_128) for c in b.chunks]
