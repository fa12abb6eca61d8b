"""Quantities as the job file writes them."""

_SECONDS = (("h", 3600), ("min", 60))
_BYTES = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def steps_in_words(steps: int) -> str:
    """`1 step`, `500 steps`."""
    return f"{steps} step" if steps == 1 else f"{steps} steps"


def duration_in_words(seconds: float) -> str:
    """`2 h`, `90 s`, `0.5 s`: exact, in the largest unit that divides it."""
    for unit, size in _SECONDS:
        if seconds >= size and seconds % size == 0:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s" if seconds == int(seconds) else f"{seconds!r} s"


def bytes_in_words(count: int) -> str:
    """`200 GB`, `1500 MB`: exact, in the largest unit that divides it."""
    for unit, size in _BYTES:
        if count >= size and count % size == 0:
            return f"{count // size} {unit}"
    return f"{count} B"
