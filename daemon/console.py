"""How every command speaks: results on standard output, one paragraph of trouble on standard error."""

import math
import os
import sys
from collections.abc import Callable, Sequence

_BAR_CELLS = 24
_SHOWN_EVERY_SECONDS = 0.1


def write(text: str) -> None:
    """A line or block of results. A reader that has seen enough and left (`| head`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        abandon_stdout()


def fail(text: str) -> None:
    """One paragraph on standard error."""
    print(f"trainerd: {' '.join(text.split())}", file=sys.stderr, flush=True)


def abandon_stdout() -> None:
    """Send what is still to be written nowhere, or the interpreter would complain again while it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class ProgressLine:
    """A line on standard error that overwrites itself on a terminal, and is not there otherwise."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Put this text in place of the last one."""
        if self._live:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave the line empty for what comes next."""
        self.show("")


class ProgressBar:
    """A bar of bytes on a `ProgressLine`: how many are done, how fast, and how long the rest will take.

    `clock` gives seconds.
    """

    def __init__(self, title: str, clock: Callable[[], float]) -> None:
        self._title = title
        self._clock = clock
        self._began = clock()
        self._shown = -math.inf
        self._line = ProgressLine()

    def show(self, done: int, total: int) -> None:
        """Tell that so many bytes of so many are done; shown some times a second at most."""
        now = self._clock()
        if now - self._shown < _SHOWN_EVERY_SECONDS:
            return
        self._shown = now
        share = min(done / total, 1.0) if total else 1.0
        filled = round(share * _BAR_CELLS)
        rate = done / max(now - self._began, 1e-9)
        left = format_age((total - done) / rate) if rate and done < total else "0 s"
        bar = "#" * filled + "." * (_BAR_CELLS - filled)
        self._line.show(
            f"{self._title} [{bar}] {share:.0%} of {format_bytes(total)}, {format_bytes(rate)}/s, {left} left"
        )

    def clear(self) -> None:
        """Leave the line empty for what comes next."""
        self._line.clear()


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> str:
    """Aligned columns under their names, right-aligned but for those in `left`."""
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    )


def format_bytes(count: float) -> str:
    """`2.4 MB`: decimal units, as disks are sold and `ls --si` counts."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.95 or unit == "TB":
            break
    return f"{count:.1f} {unit}"


def format_age(seconds: float) -> str:
    """`12 s`, `5 min`, `3 h`, `2 days`: rounded down to the largest unit that fits at least once."""
    seconds = max(seconds, 0.0)
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return "1 day" if unit == "days" and count == 1 else f"{count} {unit}"
    return f"{int(seconds)} s"
