"""Which software writes a checkpoint."""

import importlib.metadata
import platform

TRAINERD = importlib.metadata.version("trainerd")
WRITTEN_BY = f"trainerd {TRAINERD}"


def versions() -> dict[str, str]:
    """Versions of what a checkpoint's exactness depends on, by name; torch's come from whoever has it loaded."""
    return {"trainerd": TRAINERD, "python": platform.python_version()}
