"""What leaves the daemon: the worker's output as it came, our own lines, and one line at the bottom of a terminal.

Nothing here ever waits for whoever reads: a thread of its own writes, from a bounded queue, and what does not fit is
dropped and counted. A reader that has gone, a full disk or a closed descriptor costs output, never the training.
"""

import contextlib
import errno
import logging
import os
import select
import threading
from collections import deque

STDOUT, STDERR = 1, 2

QUEUE_BYTES = 16 * 2**20
OWN_LINES_BYTES = 2**20  # beyond QUEUE_BYTES: what the daemon has to say is not lost in the worker's noise
CLOSE_SECONDS = 2.0  # for the reader to take what is left

_CLEAR = b"\r\x1b[2K"
_GONE = frozenset({errno.EPIPE, errno.EBADF, errno.EIO, errno.ECONNRESET})


class Output:
    """Writes to standard output and standard error of the daemon, in order, without ever blocking the caller."""

    def __init__(self) -> None:
        self.live = _is_terminal(STDERR)
        self._gone: set[int] = set()
        self._shares_terminal = self.live and _is_terminal(STDOUT)
        self._pieces: deque[tuple[int, bytes]] = deque()
        self._queued_bytes = 0
        self._dropped_bytes = 0
        self._line = b""
        self._closing = False
        # Streams that end in one place (2>&1) share their lines, too.
        self._line_of = {STDOUT: STDOUT, STDERR: STDOUT if _same_place() else STDERR}
        self._mid_line = {STDOUT: False, STDERR: False}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name="output", daemon=True)
        self._thread.start()

    def take_log(self, logger: str) -> None:
        """Say what that logger and its children have to tell, from INFO on."""
        handler = logging.Handler()
        handler.emit = lambda record: self.say(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger(logger).addHandler(handler)
        logging.getLogger(logger).setLevel(logging.INFO)

    def pass_through(self, fd: int, piece: bytes) -> None:
        """Write a worker's bytes to `fd` unchanged; they are dropped, and counted, if too many wait already."""
        with self._changed:
            if self._queued_bytes + len(piece) > QUEUE_BYTES:
                self._dropped_bytes += len(piece)
                return
            self._tell_dropped()
            self._queue(fd, piece)

    def say(self, text: str) -> None:
        """Write one line of our own to standard error."""
        line = f"trainerd: {text}\n".encode(errors="replace")
        with self._changed:
            self._tell_dropped()
            if self._queued_bytes + len(line) <= QUEUE_BYTES + OWN_LINES_BYTES:
                self._queue(STDERR, line, starts_line=True)

    def show_line(self, line: bytes) -> None:
        """Keep `line` at the bottom of the terminal in place of the last one; b"" takes it away."""
        with self._changed:
            self._line = line
            self._changed.notify()

    def close(self) -> None:
        """Take the bottom line away and write what is queued, for CLOSE_SECONDS at most."""
        with self._changed:
            self._line = b""
            self._tell_dropped(room_bytes=QUEUE_BYTES + OWN_LINES_BYTES)
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)

    def _tell_dropped(self, room_bytes: int = QUEUE_BYTES // 2) -> None:
        if self._dropped_bytes and self._queued_bytes < room_bytes:
            note = (
                f"trainerd: {self._dropped_bytes} bytes of the worker's output were dropped: nobody read them in time\n"
            )
            self._dropped_bytes = 0
            self._queue(STDERR, note.encode(), starts_line=True)

    def _queue(self, fd: int, piece: bytes, starts_line: bool = False) -> None:
        line = self._line_of[fd]
        if starts_line and self._mid_line[line]:
            piece = b"\n" + piece
        self._mid_line[line] = not piece.endswith((b"\n", b"\r"))
        self._pieces.append((fd, piece))
        self._queued_bytes += len(piece)
        self._changed.notify()

    def _write_all(self) -> None:
        shown = b""
        while True:
            with self._changed:
                while not self._pieces and self._line == shown and not self._closing:
                    self._changed.wait()
                pieces, self._pieces = self._pieces, deque()
                line, closing = self._line, self._closing
            if shown and (line != shown or any(self._is_on_terminal(fd) for fd, _ in pieces)):
                self._write(STDERR, _CLEAR)
                shown = b""
            for fd, piece in pieces:
                self._write(fd, piece)
                with self._changed:
                    self._queued_bytes -= len(piece)
            if line and not shown:
                self._write(STDERR, line)
                shown = line
            if closing and not self._pieces:
                return

    def _is_on_terminal(self, fd: int) -> bool:
        return fd == STDERR or self._shares_terminal

    def _write(self, fd: int, piece: bytes) -> None:
        rest = memoryview(piece)
        while rest and fd not in self._gone:
            try:
                rest = rest[os.write(fd, rest[:65536]) :]
            except BlockingIOError:  # someone who shares the stream made it non-blocking
                select.select([], [fd], [], 1.0)
            except OSError as error:
                if error.errno in _GONE:
                    self._gone.add(fd)
                else:  # a full disk may have room again later
                    with self._changed:
                        self._dropped_bytes += len(rest)
                return


class LineGate:
    """Cuts one stream of bytes after its last complete line, so that two streams do not mix within lines."""

    HELD_BYTES = 2**20  # a line longer than this passes in pieces

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """Return what may pass now that `chunk` has come."""
        self._held += chunk
        end = max(self._held.rfind(b"\n"), self._held.rfind(b"\r")) + 1
        if len(self._held) - end > self.HELD_BYTES:
            end = len(self._held)
        return self._take(end)

    def flush(self) -> bytes:
        """Return what is held although its line never ended."""
        return self._take(len(self._held))

    def _take(self, end: int) -> bytes:
        passing = bytes(self._held[:end])
        del self._held[:end]
        return passing


def _same_place() -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(STDOUT), os.fstat(STDERR))
    return False


def _is_terminal(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return os.isatty(fd)
    return False
