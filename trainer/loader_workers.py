"""Iterators of other people's DataLoaders, with processes that behave as those of our own loader do."""

import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from trainerd.trainer.loader_processes import LoaderProcesses, ProcessStart


class LoaderWorkers:
    """Iterates over a loader; processes that a DataLoader starts for it survive signals, and never outlive this object.

    DataLoader's own processes notice the death of a trainer only between two fetches, and die of the signals that
    a scheduler sends to a whole job, so that the trainer cannot finish its step.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._processes = LoaderProcesses() if _starts_processes(loader) else None
        self._iterator: Any = None

    def iterate(self) -> Iterator[Any]:
        """Return a new iterator of the loader."""
        if self._processes is None:
            return iter(self._loader)
        loader = self._loader
        if loader.persistent_workers and type(loader) is DataLoader and loader._iterator is not self._iterator:
            loader._iterator = None  # it serves another trainer, and would be taken away from it
        users_own = loader.worker_init_fn
        loader.worker_init_fn = start = ProcessStart(users_own)
        try:
            self._iterator = self._processes.start(loader, start)
        finally:
            loader.worker_init_fn = users_own
        return self._iterator  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            self._processes.close()
            if self._loader._iterator is self._iterator:
                self._loader._iterator = None  # else DataLoader would reuse processes that have ended
            self._iterator = None

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()


def _starts_processes(loader: Any) -> bool:
    """Say whether `iter` of a loader starts processes at once, as DataLoader's own does and torchdata's."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return False
    return type(loader).__iter__.__module__.partition(".")[0] in ("torch", "torchdata")
