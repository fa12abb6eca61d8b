"""How every command speaks: results on standard output, one paragraph of trouble on standard error."""

import os
import sys
from collections.abc import Sequence


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
