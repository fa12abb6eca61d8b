"""Metrics of a running training: bounded histories of scalars, and what writers show of them."""

import statistics
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch

KEPT_VALUES = 1000
KEPT_IMAGES = 100
KEPT_HISTOGRAMS = 1000

_open_storages: list["EventStorage"] = []


def get_event_storage() -> "EventStorage":
    """Return the innermost open storage; AssertionError outside `with EventStorage(...)`."""
    assert _open_storages, "get_event_storage() needs an open EventStorage: call it while a trainer trains."
    return _open_storages[-1]


class HistoryBuffer:
    """The newest `max_length` values of one scalar, and the average over all that ever came."""

    def __init__(self, max_length: int = KEPT_VALUES) -> None:
        if max_length < 1:
            raise ValueError(f"a HistoryBuffer keeps at least one value, not {max_length}")
        self._max_length = max_length
        self._values = array("d")
        self._iterations = array("q")
        self._count = 0
        self._total = 0.0

    def update(self, value: float, iteration: int | None = None) -> None:
        """Add a value; without `iteration` it counts as the next one after all that came before."""
        self._values.append(value)
        self._iterations.append(self._count if iteration is None else int(iteration))
        self._count += 1
        self._total += value
        # Cutting at twice the length makes the cost of a cut vanish; readers only ever see the newest max_length.
        if len(self._values) >= 2 * self._max_length:
            del self._values[: -self._max_length]
            del self._iterations[: -self._max_length]

    def _newest(self, window_size: int) -> "array[float]":
        return self._values[-min(window_size, self._max_length) :]

    def latest(self) -> float:
        """Return the newest value."""
        return self._values[-1]

    def median(self, window_size: int) -> float:
        """Return the median of the newest `window_size` values."""
        return float(statistics.median(self._newest(window_size)))

    def avg(self, window_size: int) -> float:
        """Return the mean of the newest `window_size` values."""
        return float(np.mean(self._newest(window_size)))

    def global_avg(self) -> float:
        """Return the mean of all values that ever came, those no longer kept included."""
        return self._total / self._count

    def values(self) -> list[tuple[float, int]]:
        """Return the kept values, oldest first, each with its iteration."""
        return list(zip(self._newest(self._max_length), self._iterations[-self._max_length :], strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return values (float64) and iterations (int64) as tensors, and the exact count and total."""
        return {
            "values": torch.from_numpy(np.array(self._newest(self._max_length), dtype=np.float64)),
            "iterations": torch.from_numpy(np.array(self._iterations[-self._max_length :], dtype=np.int64)),
            "count": self._count,
            "total": self._total,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the history that `state_dict` described."""
        self._values = array("d", state["values"].tolist())
        self._iterations = array("q", state["iterations"].tolist())
        self._count = state["count"]
        self._total = state["total"]


class EventStorage:
    """Where trainer, hooks and models put metrics while training; open it with `with`.

    Images and histograms wait for a writer, the newest ones only, and are not part of the state.
    """

    def __init__(self, start_iter: int = 0) -> None:
        self._history: dict[str, HistoryBuffer] = {}
        self._smoothing_hints: dict[str, bool] = {}
        self._latest_scalars: dict[str, tuple[float, int]] = {}
        self._iter = start_iter
        self._current_prefix = ""
        self._vis_data: deque[tuple[str, Any, int]] = deque(maxlen=KEPT_IMAGES)
        self._histograms: deque[dict[str, Any]] = deque(maxlen=KEPT_HISTOGRAMS)

    def put_scalar(self, name: str, value: Any, smoothing_hint: bool = True, cur_iter: int | None = None) -> None:
        """Add a number (or a tensor of one element) to the history of `name`.

        `smoothing_hint` tells writers whether the scalar is noisy; it must be the same at every call.
        """
        name = self._current_prefix + name
        number = value.item() if isinstance(value, torch.Tensor) else float(value)
        iteration = self._iter if cur_iter is None else cur_iter
        history = self._history.get(name)
        if history is None:
            history = self._history[name] = HistoryBuffer()
        hint = self._smoothing_hints.setdefault(name, smoothing_hint)
        assert hint == smoothing_hint, f"scalar {name} came with smoothing_hint={hint} before"
        history.update(number, iteration)
        self._latest_scalars[name] = (number, iteration)

    def put_scalars(self, *, smoothing_hint: bool = True, cur_iter: int | None = None, **scalars: Any) -> None:
        """Add several scalars, given as keyword arguments."""
        for name, value in scalars.items():
            self.put_scalar(name, value, smoothing_hint=smoothing_hint, cur_iter=cur_iter)

    def put_image(self, img_name: str, img_tensor: Any) -> None:
        """Keep an RGB image (channel, height, width; uint8 in [0, 255] or float in [0, 1]) for a writer."""
        self._vis_data.append((img_name, img_tensor, self._iter))

    def put_histogram(self, hist_name: str, hist_tensor: torch.Tensor, bins: int = 1000) -> None:
        """Keep a histogram of all elements of a tensor, in the form that TensorBoard's `add_histogram_raw` takes."""
        flat = hist_tensor.detach().flatten().float()
        low, high = flat.min().item(), flat.max().item()
        self._histograms.append(
            {
                "tag": hist_name,
                "min": low,
                "max": high,
                "num": flat.numel(),
                "sum": flat.sum().item(),
                "sum_squares": flat.square().sum().item(),
                "bucket_limits": torch.linspace(low, high, bins + 1)[1:].tolist(),
                "bucket_counts": torch.histc(flat, bins=bins).tolist(),
                "global_step": self._iter,
            }
        )

    def history(self, name: str) -> HistoryBuffer:
        """Return the history of one scalar; KeyError when nothing was put under that name."""
        if name not in self._history:
            known = ", ".join(sorted(self._history)) or "none yet"
            raise KeyError(f"no scalar named {name!r} was put; there are: {known}")
        return self._history[name]

    def histories(self) -> dict[str, HistoryBuffer]:
        """Return every scalar's history by name."""
        return self._history

    def latest(self) -> dict[str, tuple[float, int]]:
        """Return every scalar's newest value and the iteration it was put at."""
        return self._latest_scalars

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, tuple[float, int]]:
        """Like `latest`, with the median of the newest `window_size` values for scalars whose hint says noisy."""
        return {
            name: (self._history[name].median(window_size) if self._smoothing_hints[name] else value, iteration)
            for name, (value, iteration) in self._latest_scalars.items()
        }

    def smoothing_hints(self) -> dict[str, bool]:
        """Return for every scalar whether it was said to be noisy."""
        return self._smoothing_hints

    def step(self) -> None:
        """Go on to the next iteration; a trainer sets `iter` itself."""
        self._iter += 1

    @property
    def iter(self) -> int:
        """The iteration that new values belong to."""
        return self._iter

    @iter.setter  # noqa: A003 - detectron2's name
    def iter(self, value: int) -> None:
        self._iter = int(value)

    @property
    def iteration(self) -> int:
        """The same as `iter`, detectron2's older name for it."""
        return self._iter

    @property
    def images(self) -> list[tuple[str, Any, int]]:
        """The images waiting for a writer: name, tensor, iteration."""
        return list(self._vis_data)

    @property
    def histograms(self) -> list[dict[str, Any]]:
        """The histograms waiting for a writer."""
        return list(self._histograms)

    def clear_images(self) -> None:
        """Forget the waiting images; called by the writer that showed them."""
        self._vis_data.clear()

    def clear_histograms(self) -> None:
        """Forget the waiting histograms; called by the writer that showed them."""
        self._histograms.clear()

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Put every scalar inside the `with` under `name/`."""
        outer = self._current_prefix
        self._current_prefix = name.rstrip("/") + "/"
        try:
            yield
        finally:
            self._current_prefix = outer

    def state_dict(self) -> dict[str, Any]:
        """Return all scalars: histories as tensors, newest values and hints as plain values."""
        return {
            "histories": {name: history.state_dict() for name, history in self._history.items()},
            "latest": {name: list(pair) for name, pair in self._latest_scalars.items()},
            "smoothing_hints": dict(self._smoothing_hints),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all scalars by the saved ones; `iter` stays."""
        self._history = {}
        for name, saved in state["histories"].items():
            self._history[name] = HistoryBuffer()
            self._history[name].load_state_dict(saved)
        self._latest_scalars = {name: (value, iteration) for name, (value, iteration) in state["latest"].items()}
        self._smoothing_hints = dict(state["smoothing_hints"])

    def __enter__(self) -> Self:
        _open_storages.append(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert _open_storages[-1] is self, "EventStorages must be closed in the reverse order of opening"
        _open_storages.pop()
