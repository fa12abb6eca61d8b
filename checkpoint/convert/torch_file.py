"""torch.save files read without running anything that they hold."""

import zipfile
from typing import Any, BinaryIO

import numpy as np
import torch

from trainerd.checkpoint.convert.errors import NotConverted

# NumPy's arrays and numbers, as random states and metrics hold them: built from a type and bytes, calling nothing else.
_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    *(getattr(np.dtypes, name) for name in np.dtypes.__all__ if name.endswith("DType")),
    # As NumPy 2 and NumPy 1 call them.
    *(
        (build, f"numpy.{core}.multiarray.{name}")
        for build, name in ((np.empty(0).__reduce__()[0], "_reconstruct"), (np.float64(0).__reduce__()[0], "scalar"))
        for core in ("_core", "core")
    ),
]


def read_torch_file(file: str | BinaryIO, name: str = "") -> Any:
    """What a file of torch.save holds, its tensors on the CPU; given by its path, they are mapped rather than read.

    NotConverted names what is not permitted; nothing is unpickled that torch.load(weights_only=True) refuses. The
    caller may permit more with torch.serialization.safe_globals.
    """
    name = name or str(file)
    zipped = zipfile.is_zipfile(file)
    if zipped:
        _refuse_compressed(file, name)
    if not isinstance(file, str):
        file.seek(0)
    with torch.serialization.safe_globals(_NUMPY):
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipped and isinstance(file, str))
        except Exception as error:  # a hostile file can fail in any way
            raise NotConverted(_why(file, name, zipped, error)) from error


def _refuse_compressed(file: str | BinaryIO, name: str) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            compressed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, OSError) as error:
        raise NotConverted(f"{name} cannot be read: {error}. Is it whole?") from error
    if compressed:
        raise NotConverted(f"{name} was not written by torch.save: its record {compressed[0]} is compressed.")


def _why(file: str | BinaryIO, name: str, zipped: bool, error: Exception) -> str:
    if not zipped:
        return (
            f"{name} is no whole file of torch.save: {_first_line(error)} If it is cut short, bring it again; if "
            f"another program pickled it, load it there and torch.save its tensors and plain values. Nothing in it was "
            f"executed."
        )
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # as above
        unsafe = []
    if not unsafe:
        return f"{name} cannot be read by torch.load(weights_only=True): {_first_line(error)} Nothing was executed."
    names = ", ".join(sorted(unsafe))
    return (
        f"{name} holds more than tensors and plain values: {names}. Unpickling that can run any code, so it was not "
        f"done. If you trust the file, load it with the program that wrote it and torch.save it again without these, "
        f"or permit them in Python: `with torch.serialization.safe_globals([...])` around "
        f"trainerd.checkpoint.import_checkpoint."
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0][:200] or type(error).__name__
    return f"{text.rstrip('.')}."
