"""torch.save files read without running anything that they hold."""

import contextlib
import pickle
import pickletools
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
    if names := _unsafe_globals(file, zipped):
        return (
            f"{name} holds more than tensors and plain values: {', '.join(names)}. Unpickling that can run any code, "
            f"so it was not done. If you trust the file, load it with the program that wrote it and torch.save it "
            f"again without these, or permit them in Python: `with torch.serialization.safe_globals([...])` around "
            f"trainerd.checkpoint.import_checkpoint."
        )
    # What torch says of a pickle is advice to execute it.
    detail = "" if isinstance(error, pickle.UnpicklingError) else f": {str(error).strip().partition(chr(10))[0]:.200}"
    return (
        f"{name} is no whole file of torch.save{detail.rstrip('.')}. If it is cut short, bring it again; if another "
        f"program pickled it, load it there and torch.save its tensors and plain values. Nothing in it was executed."
    )


def _unsafe_globals(file: str | BinaryIO, zipped: bool) -> list[str]:
    """The functions and classes that a pickle names and weights_only=True does not permit, as far as can be seen."""
    if not isinstance(file, str):
        file.seek(0)
    try:
        if zipped:
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
        with contextlib.ExitStack() as stack:
            return sorted(_foreign_globals(stack.enter_context(open(file, "rb")) if isinstance(file, str) else file))
    except Exception:  # a hostile file can fail in any way
        return []


def _foreign_globals(file: BinaryIO) -> set[str]:
    """Of a file of pickles one after the other, as torch wrote it before there were zip files."""
    found: set[str] = set()
    texts: list[str] = []
    with contextlib.suppress(ValueError):  # the end, or what follows the pickles
        while True:
            for operation, argument, _ in pickletools.genops(file):
                if operation.name == "GLOBAL":
                    found.add(str(argument).replace(" ", "."))
                elif operation.name == "STACK_GLOBAL":
                    found.add(".".join(texts[-2:]))
                elif isinstance(argument, str):
                    texts.append(argument)
    return {name for name in found if name.partition(".")[0] not in ("torch", "collections", "numpy")}
