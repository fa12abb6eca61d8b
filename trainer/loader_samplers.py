"""What the samplers inside a DataLoader are, and what they draw from that no state_dict of the loader holds."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from trainerd.trainer.errors import StateMismatch


def sampling(loader: DataLoader[Any]) -> tuple[Any, int]:
    """Return what indices come from, and how many make a batch; 0 if a batch sampler of another kind decides."""
    batches: Any = loader.batch_sampler
    if batches is None:
        return loader.sampler, 1
    # Exactly: a subclass may batch in its own way.
    if type(batches) is BatchSampler or type(batches).__module__ == "torchdata.stateful_dataloader.sampler":
        return batches.sampler, batches.batch_size
    return batches, 0


def capture(loader: Any) -> dict[str, Any]:
    """Return the states of the torch.Generators of a DataLoader and its samplers, and what `set_epoch` set, if any."""
    state = {
        "generators": [generator.get_state() for generator in _generators(loader)],
        "epochs": [sampler.epoch for sampler in _with_epoch(loader)],
    }
    return {name: values for name, values in state.items() if values}


def restore(loader: Any, state: Mapping[str, Any]) -> None:
    """Put back what `capture` took; what has no counterpart is passed over."""
    for generator, saved in zip(_generators(loader), state.get("generators", ()), strict=False):
        generator.set_state(saved)
    for sampler, epoch in zip(_with_epoch(loader), state.get("epochs", ()), strict=False):
        sampler.set_epoch(epoch)


def settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what a position counts in, as plain values."""
    sampler, _ = sampling(loader)
    return {
        "batch_size": getattr(loader.batch_sampler, "batch_size", loader.batch_size),
        "drop_last": getattr(loader.batch_sampler, "drop_last", loader.drop_last),
        "num_workers": loader.num_workers,
        "samples": _samples(loader.dataset),
        "sampler": type(sampler).__qualname__,
    }


def check(loader: DataLoader[Any], saved: Mapping[str, Any]) -> None:
    """Raise StateMismatch, with both values, for settings other than those that were saved."""
    now = settings(loader)
    differing = [f"{name} was {value}, now {now[name]}" for name, value in saved.items() if value != now[name]]
    if differing:
        raise StateMismatch(
            f"The saved position of the data loader ({type(loader).__qualname__}) was counted with other settings "
            f"({'; '.join(differing)}): some samples would come twice and others never. Set them back, or start afresh."
        )


def _samples(dataset: Any) -> int | None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return None
    return len(dataset)


def _parts(loader: Any) -> Iterator[Any]:
    if isinstance(loader, DataLoader):
        batches = loader.batch_sampler
        yield from (loader, loader.sampler, batches, getattr(batches, "sampler", None))


def _generators(loader: Any) -> list[torch.Generator]:
    found = {id(one): one for one in (getattr(part, "generator", None) for part in _parts(loader))}
    return [one for one in found.values() if isinstance(one, torch.Generator)]


def _with_epoch(loader: Any) -> list[Any]:
    found = {id(part): part for part in _parts(loader) if callable(getattr(part, "set_epoch", None))}
    return [part for part in found.values() if isinstance(getattr(part, "epoch", None), int)]
