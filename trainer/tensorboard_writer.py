"""Metrics for TensorBoard, in event files that a resumed training continues without repeating a step."""

import inspect
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from trainerd.checkpoint import durable
from trainerd.trainer import event_files
from trainerd.trainer.events import get_event_storage
from trainerd.trainer.writers import EventWriter, NewScalars

logger = logging.getLogger(__name__)

LONGEST_WAIT_SECONDS = 2.0


class TensorboardXWriter(EventWriter):
    """Writes new scalars, and the images and histograms that wait in the storage, with torch's SummaryWriter.

    Each write is in the operating system's hands when it returns. The event file is made at the first write; its name
    ends in `.trainerd`, and only such files are changed at resume: with a loaded state, what was written after it goes
    from their ends to files with "superseded" in place of "tfevents" in their names. Each file also tells TensorBoard
    to forget all steps from the one that it begins with, those in other files of the folder included.

    Images and histograms that no writer has shown when a state is saved are not in the state.

    Args:
        log_dir: the folder; it is made if there is none.
        window_size: noisy scalars are the median of the newest so many values.
        kwargs: for SummaryWriter.

    ImportError without the package tensorboard, TypeError for arguments that SummaryWriter does not take, OSError at
    `resume` if the folder cannot be written.
    """

    def __init__(self, log_dir: str | os.PathLike[str], window_size: int = 20, **kwargs: Any) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            text = "TensorboardXWriter needs the package tensorboard: pip install 'trainerd[tensorboard]'"
            raise ImportError(text) from error
        if not isinstance(log_dir, str | os.PathLike):
            raise TypeError(f"TensorboardXWriter: log_dir is a path, not {type(log_dir).__qualname__}.")
        self._log_dir = os.path.abspath(log_dir)
        self._scalars = NewScalars("TensorboardXWriter", window_size)
        if "purge_step" in kwargs:
            raise TypeError("TensorboardXWriter: purge_step is the step that training resumes at; leave it out.")
        suffix = kwargs.pop("filename_suffix", "") + event_files.MARK
        self._options = {"log_dir": self._log_dir, "filename_suffix": suffix, **kwargs}
        try:
            inspect.signature(SummaryWriter).bind(**self._options)
        except TypeError as error:
            raise TypeError(f"TensorboardXWriter: SummaryWriter does not take these arguments: {error}") from error
        self._purge_step: int | None = None
        self._loaded = False
        self._writer: SummaryWriter | None = None
        self._unsynced = ""

    def write(self) -> None:
        """Write what is new, and take images and histograms out of the storage."""
        storage = get_event_storage()
        rows, images, histograms = self._scalars.rows(), storage.images, storage.histograms
        if not rows and not images and not histograms:
            return
        writer = self._writer or self._open()
        # First, so that what a resume cuts off after the state's last scalar leaves those of before.
        for name, image, iteration in images:
            writer.add_image(name, image, iteration)
        for histogram in histograms:
            writer.add_histogram_raw(**histogram)
        for iteration, scalars in rows.items():
            for name, value in scalars.items():
                writer.add_scalar(name, value, iteration)
        writer.flush()
        self._unsynced = self._unsynced or event_files.marked(self._log_dir)[-1]
        self._scalars.mark(rows)
        storage.clear_images()
        storage.clear_histograms()

    def _open(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        durable.make_folder(self._log_dir)
        self._wait_for_a_later_name()
        self._writer = SummaryWriter(**self._options, purge_step=self._purge_step)
        return self._writer

    def _wait_for_a_later_name(self) -> None:
        # TensorBoard reads files in the order of their names, which begin with the second they were made in.
        ahead = event_files.newest_second(self._log_dir) + 1 - time.time()
        if ahead > LONGEST_WAIT_SECONDS:
            text = "%s has event files from %d seconds in the future, which TensorBoard reads last: was the clock set?"
            logger.warning(text, self._log_dir, ahead)
        elif ahead > 0:
            time.sleep(ahead)

    def resume(self, step: int) -> None:
        """Take out what was written after this point."""
        self._close_writer()
        loaded, self._loaded = self._loaded, False
        self._purge_step = step
        try:
            durable.make_folder(self._log_dir)
            if not os.access(self._log_dir, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied", self._log_dir)
            if loaded:
                event_files.cut(self._log_dir, step, self._scalars.written)
            elif os.listdir(self._log_dir):
                self._open()
        except OSError as error:
            text = f"TensorboardXWriter cannot use its folder, give it another one ({error.strerror})"
            raise OSError(error.errno, text, error.filename or self._log_dir) from error
        if not loaded:
            self._scalars.written = {name: at for name, at in self._scalars.written.items() if at < step}

    def sync(self) -> None:
        """Flush what was written to the disk."""
        if self._unsynced:
            event_files.sync(self._unsynced)
            self._unsynced = ""

    def close(self) -> None:
        """Flush to the disk and close the event file."""
        self._loaded = False
        try:
            self._close_writer()
        finally:
            self.sync()

    def _close_writer(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def state_dict(self) -> dict[str, Any]:
        """Return which iteration of each scalar was written last."""
        return self._scalars.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on after what the saved state had written."""
        self._scalars.written = dict(state_dict["written"])
        self._loaded = True
