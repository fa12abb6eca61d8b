"""What shows metrics while a trainer trains: the base class, which scalars are new to a writer, and a file of rows."""

import io
import json
import math
import os
from collections.abc import Mapping
from typing import Any

from trainerd.checkpoint import durable
from trainerd.trainer import metric_rows
from trainerd.trainer.arguments import require_count
from trainerd.trainer.events import get_event_storage


class EventWriter:
    """Shows what the open EventStorage holds; a subclass defines at least `write`.

    The rest lets a writer take part in exact resumes, and may be left out.
    """

    def write(self) -> None:
        """Show what is new in `get_event_storage()`; called between two iterations, and once after training."""
        raise NotImplementedError(f"{type(self).__qualname__} must define write")

    def close(self) -> None:
        """Release what is open, after the last `write`; training may begin once more, with `resume`."""

    def resume(self, step: int) -> None:
        """Get ready before training, with the number of completed iterations: take out what later ones left behind.

        State that was saved is loaded before, and once more afterwards.
        """

    def sync(self) -> None:
        """Make durable what was written; called before each checkpoint, so cheap when nothing was written since."""

    def state_dict(self) -> dict[str, Any]:
        """Return what must be saved, as tensors and plain values."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""


class NewScalars:
    """The scalars that were put since a writer wrote them last, remembered by name and iteration."""

    def __init__(self, owner: str, window_size: int) -> None:
        require_count(owner, "window_size", window_size)
        self._window_size = window_size
        self.written: dict[str, int] = {}

    def rows(self) -> dict[int, dict[str, float]]:
        """Return the new scalars, noisy ones as the median of the window, by iteration and name, both in order."""
        rows: dict[int, dict[str, float]] = {}
        latest = get_event_storage().latest_with_smoothing_hint(self._window_size)
        for name, (value, iteration) in sorted(latest.items()):
            # By name: with metrics that are written late, the loss of an iteration comes after its learning rate.
            if iteration > self.written.get(name, -math.inf):
                rows.setdefault(int(iteration), {})[name] = value
        return dict(sorted(rows.items()))

    def mark(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Remember that these rows are written."""
        for iteration, scalars in rows.items():
            self.written.update(dict.fromkeys(scalars, iteration))

    def state_dict(self) -> dict[str, Any]:
        """Return by name the iteration that was written last."""
        return {"written": dict(self.written)}


class JSONWriter(EventWriter):
    """Writes a JSON object a line: "iteration" and the new scalars of that iteration, in the order of their names.

    Each write is in the operating system's hands when it returns, so that a killed process loses none; `sync` and
    `close` make it durable. What is not finite is written as NaN, Infinity and -Infinity, as Python's json does and
    reads it; JSON itself has no such numbers. A scalar that is named "iteration" is left out.

    Resuming takes out of the file what was written after the state was saved: with a loaded state, rows with a scalar
    that the state has not written; without one, rows of iterations from the given step on. They and a torn last line
    go to `<json_file>.superseded`. Lines that are no rows stay where they are.

    Args:
        json_file: the path; its folder is made if there is none.
        window_size: noisy scalars are the median of the newest so many values.

    ValueError if the path is a folder, OSError at `resume` if the file cannot be written.
    """

    def __init__(self, json_file: str | os.PathLike[str], window_size: int = 20) -> None:
        if not isinstance(json_file, str | os.PathLike):
            raise TypeError(f"JSONWriter: json_file is a path, not {type(json_file).__qualname__}.")
        # Not a link's own path: replacing the file would put another one in place of the link.
        self._path = os.path.realpath(json_file)
        if os.path.isdir(self._path):
            raise ValueError(f"JSONWriter: {self._path} is a folder; name a file in it, such as metrics.json.")
        self._scalars = NewScalars("JSONWriter", window_size)
        self._loaded = False
        self._file: io.FileIO | None = None
        self._unsynced = False

    def write(self) -> None:
        """Append the new scalars, older iterations first."""
        rows = self._scalars.rows()
        if not rows:
            return
        lines = [json.dumps(metric_rows.row(iteration, scalars)) for iteration, scalars in rows.items()]
        self._append("".join(f"{line}\n" for line in lines).encode())
        self._scalars.mark(rows)

    def _append(self, data: bytes) -> None:
        file = self._file or self._open()
        end = os.fstat(file.fileno()).st_size
        self._unsynced = True
        try:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(end)  # a disk that is full takes half a line, which the next write would continue
            raise

    def _open(self) -> io.FileIO:
        durable.make_folder(os.path.dirname(self._path))
        is_new = not os.path.exists(self._path)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - until close
        if is_new:
            durable.sync_folder(os.path.dirname(self._path))
        return self._file

    def resume(self, step: int) -> None:
        """Cut what was written after this point, and open the file."""
        self._close_file()
        loaded, self._loaded = self._loaded, False
        try:
            rows = metric_rows.cut(self._path, step, self._scalars.written if loaded else None)
            self._open()
        except OSError as error:
            text = f"JSONWriter cannot use its file, give it another path ({error.strerror})"
            raise OSError(error.errno, text, error.filename or self._path) from error
        if not loaded:
            self._scalars.written = metric_rows.newest(rows)

    def sync(self) -> None:
        """Flush what was written to the disk."""
        if self._file is not None and self._unsynced:
            os.fsync(self._file.fileno())
            self._unsynced = False

    def close(self) -> None:
        """Flush to the disk and close the file."""
        self._loaded = False
        try:
            self.sync()
        finally:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def state_dict(self) -> dict[str, Any]:
        """Return which iteration of each scalar was written last."""
        return self._scalars.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on after what the saved state had written."""
        self._scalars.written = dict(state_dict["written"])
        self._loaded = True
