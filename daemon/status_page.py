"""The page of memory that a worker and its daemon share: where the training is, and whether it shall stop.

Each worker gets a fresh page, so that a mark left by a dead one never counts. It lies in a memfd and stays readable
after a SIGKILL of the worker. Each field has one writer and is naturally aligned; a reader may see the step of one mark
beside the phase of the next, never half a number.
"""

import math
import mmap
import os
import struct
import time
from dataclasses import dataclass

PAGE_BYTES = 4096
PHASE_BYTES = 32  # longer names are cut

_MARK = struct.Struct(f"=dq{PHASE_BYTES}s")  # monotonic time, step, phase: written by the training thread only
_MARK_AT = 0
_LOSS = struct.Struct("=d")
_LOSS_AT = 64
_STOP_AT = 128  # only ever set: by the daemon, or by the worker's own signal handler


@dataclass(frozen=True)
class Status:
    """What the page said at one moment: `marked_at` is monotonic, `loss` NaN before the first."""

    phase: str
    step: int
    marked_at: float
    loss: float


class StatusPage:
    """One shared page; `fd` is what a worker inherits."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, PAGE_BYTES)
        self._phases: dict[str, bytes] = {}

    @classmethod
    def create(cls, step: int = 0) -> "StatusPage":
        """Return a new page: phase "start", at `step`, no loss, no stop asked for."""
        fd = os.memfd_create("trainerd-status", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES)
        page = cls(fd)
        page.publish_loss(math.nan)
        page.mark("start", step)
        return page

    def mark(self, phase: str, step: int) -> None:
        """Note that the training thread is alive, in `phase`, with `step` completed; about a microsecond."""
        name = self._phases.get(phase)
        if name is None:
            name = self._phases[phase] = phase.encode()
        _MARK.pack_into(self._memory, _MARK_AT, time.monotonic(), step, name)

    def publish_loss(self, loss: float) -> None:
        """Show `loss` to the daemon."""
        _LOSS.pack_into(self._memory, _LOSS_AT, loss)

    def request_stop(self) -> None:
        """Ask the worker to finish its step, save and leave. Safe in a signal handler, and any number of times."""
        self._memory[_STOP_AT] = 1

    @property
    def stop_requested(self) -> bool:
        """Whether anybody asked the worker to stop."""
        return self._memory[_STOP_AT] != 0

    def read(self) -> Status:
        """Return what the page says now."""
        marked_at, step, name = _MARK.unpack_from(self._memory, _MARK_AT)
        (loss,) = _LOSS.unpack_from(self._memory, _LOSS_AT)
        return Status(name.rstrip(b"\0").decode(errors="replace"), step, marked_at, loss)

    def close(self) -> None:
        """Unmap the page and close its file descriptor."""
        self._memory.close()
        os.close(self.fd)
