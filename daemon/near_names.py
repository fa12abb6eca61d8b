"""What somebody may have meant: the nearest known name for one that nobody knows."""

import os
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The most similar known name; "" if none is similar."""
    # Imported here: needed only once something went wrong.
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, list(known), n=1)), "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`Did you mean X?` for the nearest of `known`, else a list of what there is; "" when nothing is known."""
    names = list(known)
    if near := nearest(name, names):
        return f"Did you mean {near}?"
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"Known here: {shown}." if names else ""


def near_files(path: str) -> str:
    """What to say of a missing file or folder: the nearest name beside it, or that its parent is missing as well."""
    folder = os.path.dirname(path) or "."
    try:
        near = nearest(os.path.basename(path), os.listdir(folder))
    except OSError:
        return "" if os.path.isdir(folder) else f"Nor does {folder}."
    return f"Did you mean {os.path.join(os.path.dirname(path), near)}?" if near else ""
