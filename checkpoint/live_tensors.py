"""Where a load puts each tensor: into memory of its own, or straight into tensors that a program already has."""

from collections.abc import Iterable

import torch

from trainerd.checkpoint import codec, trees
from trainerd.checkpoint.chunk_reader import read_chunks, reads_of
from trainerd.checkpoint.errors import Damaged, DoesNotFit
from trainerd.checkpoint.manifest import Manifest
from trainerd.checkpoint.storage import Storage
from trainerd.checkpoint.tensor_values import Leaf, empty, memory_view


def read_tensors(
    storage: Storage, manifest: Manifest, names: Iterable[str], into: object | None = None
) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint by name, every byte verified; those that a state `into` has are filled in place there.

    Damaged, or DoesNotFit, which leaves `into` as it was.
    """
    destinations = Destinations(manifest, names, into, f"{storage.url}@{manifest.step}")
    read_chunks(storage, manifest.name, reads_of(manifest, destinations.memories()))
    destinations.finish()
    return destinations.tensors


class Destinations:
    """Memory for the tensors of one checkpoint; `into` is a state whose tensors are to be filled, None for none."""

    def __init__(self, manifest: Manifest, names: Iterable[str], into: object | None = None, place: str = "") -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._copies: list[tuple[str, torch.Tensor]] = []
        if into is not None:
            self._take(manifest, codec.encode(into)[1], place)
        for name in names:
            entry = manifest.tensors.get(name)
            if entry is None:
                raise Damaged(str(manifest.name), f"its tree refers to a tensor {name!r} that it does not hold")
            if name not in self.tensors:
                self.tensors[name] = empty(entry.dtype, entry.shape)

    def memories(self) -> dict[str, memoryview]:
        """The bytes of each tensor, to be filled."""
        return {name: memory_view(tensor) for name, tensor in self.tensors.items()}

    def finish(self) -> None:
        """Hand on what could not be read straight into its place: to other devices, strides and ties."""
        for name, live in self._copies:
            live.detach().copy_(self.tensors[name])

    def _take(self, manifest: Manifest, leaves: dict[str, Leaf], place: str) -> None:
        faults = []
        fitting = []
        for path, leaf in leaves.items():
            name = _stored_name(manifest, path)
            if name is None:
                faults.append(f"{path} is not in it")
                continue
            entry = manifest.tensors[name]
            if (entry.dtype, entry.shape) != (leaf.dtype, leaf.shape):
                faults.append(
                    f"{path} is {leaf.dtype} {list(leaf.shape)} here and {entry.dtype} {list(entry.shape)} in it"
                )
            fitting.append((name, leaf.tensor))
        if faults:
            raise DoesNotFit(place, faults)
        for name, live in fitting:
            plain = live.device.type == "cpu" and live.is_contiguous() and not (live.is_conj() or live.is_neg())
            if plain and name not in self.tensors:
                self.tensors[name] = live.detach()
            else:
                self._copies.append((name, live))


def _stored_name(manifest: Manifest, path: str) -> str | None:
    """The name under which the tensor at a path was stored: its own, or that of the one it is tied to."""
    if path in manifest.tensors:
        return path
    try:
        node = trees.find(manifest.tree, path)
    except KeyError:
        return None
    name = node.get("tensor") if isinstance(node, dict) else None
    return name if name in manifest.tensors else None
