"""A line in the terminal that says where the training stands."""

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from trainerd.trainer.arguments import require_count
from trainerd.trainer.events import KEPT_VALUES, EventStorage, get_event_storage
from trainerd.trainer.writers import EventWriter

if TYPE_CHECKING:
    from rich.console import Console


class CommonMetricPrinter(EventWriter):
    """Prints time left, iteration, losses, times, learning rate and GPU memory, as far as they are known.

    Losses are all scalars with "loss" in their name, as the median of the window; "time" and "data_time" (seconds) are
    shown as the mean of the window and the newest value. The time left is the median of "time" for each iteration left.
    Unlike detectron2's printer it reads the storage only, and puts no "eta_seconds" there.

    Args:
        max_iter: where training ends; without it no time left is shown.
        window_size: how many of the newest values count.
        console: where to print; the standard output when left out.
    """

    def __init__(self, max_iter: int | None = None, window_size: int = 20, *, console: "Console | None" = None) -> None:
        from rich.console import Console

        if max_iter is not None:
            require_count("CommonMetricPrinter", "max_iter", max_iter)
        require_count("CommonMetricPrinter", "window_size", window_size)
        self._max_iter = max_iter
        self._window_size = window_size
        self._console = console or Console()
        self._shown = -1

    def write(self) -> None:
        """Print a line, unless nothing was put since the last one or training is over."""
        storage = get_event_storage()
        newest = max((iteration for _, iteration in storage.latest().values()), default=-1)
        if storage.iter == self._max_iter or newest <= self._shown:
            return
        self._shown = newest
        self._print(list(self._fields(storage)))

    def _print(self, fields: list[tuple[str, str]]) -> None:
        from rich.text import Text

        # Text, not a string, in which rich would take the brackets of a name for markup.
        line = Text()
        for name, value in fields:
            line.append("  " if line else "").append(f"{name}: ", style="dim").append(value)
        self._console.print(line, soft_wrap=True, highlight=False)

    def _fields(self, storage: EventStorage) -> Iterator[tuple[str, str]]:
        histories, window = storage.histories(), self._window_size
        if self._max_iter is not None and "time" in histories:
            seconds = histories["time"].median(KEPT_VALUES) * (self._max_iter - storage.iter - 1)
            yield "eta", str(timedelta(seconds=int(seconds)))
        yield "iter", str(storage.iter)
        for name, history in histories.items():
            if "loss" in name:
                yield name, f"{history.median(window):.4g}"
        for name in ("time", "data_time"):
            if name in histories:
                yield name, f"{histories[name].avg(window):.4f}"
                yield f"last_{name}", f"{histories[name].latest():.4f}"
        if "lr" in histories:
            yield "lr", f"{histories['lr'].latest():.5g}"
        if torch.cuda.is_available():
            yield "max_mem", f"{torch.cuda.max_memory_allocated() / 1024**2:.0f}M"

    def resume(self, step: int) -> None:  # noqa: ARG002 - the base's signature
        """Begin anew."""
        self._shown = -1
