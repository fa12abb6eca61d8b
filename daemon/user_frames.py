"""What of an exception is the user's own: frames, places, and a text that fits a paragraph."""

import os
import sysconfig
import traceback
from types import TracebackType

MESSAGE_CHARACTERS = 600

_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for path in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of `error` that lie in the user's own files, outermost first."""
    frames = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if _is_users(code.co_filename, str(frame.f_globals.get("__name__", ""))):
            frames.append(traceback.FrameSummary(code.co_filename, line, code.co_name, lookup_line=False))
    return frames


def chain(error: BaseException) -> str:
    """Return the user's own frames as `train.py:12 (build_trainer) → data.py:40 (load)`; "" when there are none."""
    return " → ".join(f"{_short(frame)} ({frame.name})" for frame in user_frames(error))


def at(error: BaseException) -> str:
    """Return ` at train.py:12 (build_trainer)` for a message; "" when no frame is the user's."""
    frames = chain(error)
    return f" at {frames}" if frames else ""


def fingerprint(error: BaseException, step: int) -> str:
    """Return what makes two failures the same: type, innermost frame of the user's (else of all), step."""
    frames = user_frames(error) or list(traceback.extract_tb(error.__traceback__))
    place = _short(frames[-1]) if frames else "an unknown place"
    return f"{type(error).__qualname__} at {place}, step {step}"


def one_paragraph(error: BaseException) -> str:
    """Return type and message in one line of bounded length."""
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = "(its message cannot be shown)"
    if len(message) > MESSAGE_CHARACTERS:
        message = f"{message[:MESSAGE_CHARACTERS]}..."
    name = type(error).__qualname__
    return f"{name}: {message}".rstrip(".") if message else name


def without_ours(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame that is not the daemon's; all of it if there is none."""
    trace = error.__traceback__
    while trace is not None and _is_daemons(trace):
        trace = trace.tb_next
    return trace or error.__traceback__


def _is_daemons(trace: TracebackType) -> bool:
    name = str(trace.tb_frame.f_globals.get("__name__", ""))
    return name == "__main__" or name.startswith("trainerd.daemon.")


def _is_users(path: str, module: str) -> bool:
    # By module, not path: an editable install keeps our own files outside site-packages. __main__ is the worker itself.
    if module == "__main__" or module.startswith("trainerd.") or path.startswith("<"):
        return False
    return not os.path.realpath(path).startswith(_LIBRARIES)


def _short(frame: traceback.FrameSummary) -> str:
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"
