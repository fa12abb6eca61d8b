"""What can go wrong with a checkpoint, as answers to the caller's question: retry, go to an older one, or ask a human.

Every message is one paragraph for the user: the thing, the place, the way out.
"""

import datetime
import errno as errno_names
import os

_SHOWN_CHARACTERS = 400


def _shown(text: str) -> str:
    """What a file or a user's key says, as a part of one paragraph: bounded, and nothing that a terminal obeys."""
    printable = text if text.isprintable() else text.encode("unicode_escape").decode()
    if len(printable) <= _SHOWN_CHARACTERS:
        return printable
    return f"{printable[: _SHOWN_CHARACTERS // 2]} ... {printable[-_SHOWN_CHARACTERS // 2 :]}"


class CheckpointError(Exception):
    """Base of everything this package raises on purpose."""


class UnsupportedState(CheckpointError):
    """The state holds a value that cannot be stored; nothing was written."""

    def __init__(self, path: str, kind: str, why: str = "") -> None:
        self.path = path
        self.kind = kind
        reason = f" ({why})" if why else ""
        super().__init__(
            f"The state cannot be saved: {_shown(path) or 'the state itself'}: {kind}{reason}. A checkpoint holds "
            f"tensors, NumPy arrays and plain Python values only (docs/checkpoint-format.md lists them); let the "
            f"state_dict() that returns it give such values instead. Nothing was written."
        )


class UndecodableState(CheckpointError):
    """A tree whose hash is right describes no value: not damage, and an older checkpoint would be no better."""

    def __init__(self, path: str, kind: str, why: str) -> None:
        self.path = path
        self.kind = kind
        self.why = why
        super().__init__(
            f"The state at {_shown(path) or 'its root'} cannot be built from what was saved, though every byte of it "
            f"is as it was written: it is no valid {_shown(kind)} here ({_shown(why)}). Load it with the versions that "
            f"`trainerd inspect` and the manifest name, or report it. Nothing was changed."
        )


class MissingClass(CheckpointError):
    """The state names a class that the loading program has not imported."""

    def __init__(self, path: str, reference: str, why: str) -> None:
        self.path = path
        self.reference = reference
        super().__init__(
            f"The checkpoint's state at {_shown(path) or 'its root'} is a {_shown(reference)}, but {_shown(why)}. "
            f"Import the module that defines it before loading; `trainerd inspect` shows the value without the class."
        )


class Damaged(CheckpointError):
    """One stored thing is not what was written; an older checkpoint may still be whole."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        super().__init__(f"{name} is damaged: {_shown(reason)}.")


class NotCommitted(Damaged):
    """A checkpoint without a manifest: a save that was not finished, or what is left of one that was pruned."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "its manifest is gone")


class RunDamaged(CheckpointError):
    """A file on which the whole run depends is not what was written: nothing may be loaded or written by guesswork."""

    def __init__(self, damage: Damaged) -> None:
        super().__init__(
            f"{damage} Without it nobody can tell which checkpoints count, so nothing was read or changed. Bring that "
            f"file back from a copy of the run folder, or train on in another --dir."
        )


class FormatTooNew(CheckpointError):
    """The run was made by a format that this version does not know."""

    def __init__(self, place: str, found: object, written_by: str) -> None:
        self.place = place
        self.found = found
        super().__init__(
            f"{place} is in format {found}, this trainerd reads format 1. It was written by "
            f"{_shown(written_by) or 'a newer trainerd'}: use that version or a newer one. Nothing was changed."
        )


class DoesNotFit(CheckpointError):
    """The live tensors to load into are not those of the checkpoint; none was touched."""

    def __init__(self, place: str, faults: list[str]) -> None:
        self.faults = faults
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        super().__init__(
            f"{place} cannot be loaded into these tensors: {shown}. Nothing was changed; build the model that was "
            f"saved, or load without `into`."
        )


class NoCheckpoint(CheckpointError):
    """What was asked for is not there, or nothing of what was committed is valid any more."""


class RunOwned(CheckpointError):
    """Another live daemon owns the run; `started` is ISO 8601, `advice` one more sentence on the way out."""

    def __init__(self, url: str, host: str | None, pid: int | None, started: str | None, advice: str = "") -> None:
        self.host = host
        self.pid = pid
        self.started = started
        holder = f"process {pid} on {host}, running since {started}" if pid else "another process (it left no name yet)"
        super().__init__(
            f"{url} is owned by {holder}. Only one daemon may train in a run folder: stop that one "
            f"first (`kill -TERM {pid or 'PID'}` saves and ends it), or choose another --dir. {advice}".rstrip()
        )


class TakenOver(RunOwned):
    """Another daemon has begun a later term: this process must neither train nor write any more."""

    def __init__(self, url: str, host: str, pid: int, time: float, term: int, resumed_from: int) -> None:
        self.host = host
        self.pid = pid
        self.started = datetime.datetime.fromtimestamp(time, datetime.UTC).isoformat(timespec="seconds")
        CheckpointError.__init__(
            self,
            f"{url} was taken over by process {pid} on {host}, which began term {term} from step {resumed_from} at "
            f"{self.started}. This process ends without saving: what it has done beyond that step does not count any "
            f"more. To train here again, stop that one first (`kill -TERM {pid}` saves and ends it), or choose another "
            f"--dir.",
        )


DISK_FULL = frozenset({errno_names.ENOSPC, errno_names.EDQUOT})
"""Numbers of the errors that space would cure."""

_HINTS = {
    errno_names.ENOSPC: "The disk is full: free some space or choose another --dir",
    errno_names.EDQUOT: "Your disk quota is used up: free some space or choose another --dir",
    errno_names.EROFS: "The file system is mounted read-only: choose another --dir or remount it",
    errno_names.EACCES: "This user may not do that there: change the folder's permissions or choose another --dir",
    errno_names.EPERM: "This user may not do that there: change the folder's permissions or choose another --dir",
    errno_names.EOPNOTSUPP: "The file system has no hard links, by which checkpoints are committed: choose another",
    errno_names.ENOENT: "Is its disk mounted? Bring it back and start again",
    errno_names.ENOTDIR: "A part of the path is a file where a folder is needed: choose another --dir",
    errno_names.ENAMETOOLONG: "The path is too long for the file system: choose a shorter --dir",
}


class StorageUnusable(CheckpointError):
    """The storage refused an operation: permission, space, connection. Not damage: retry, then stop."""

    may_have_committed = False
    """The answer to the commit itself is what did not come: the checkpoint may be there, or still appear."""

    def __init__(self, action: str, place: str, cause: Exception) -> None:
        self.errno = (cause.errno if isinstance(cause, OSError) else None) or 0
        self.place = place
        number = self.errno if self.errno in _HINTS or not str(cause) else 0
        reason = os.strerror(number) if number else _in_one_line(cause)
        hint = _HINTS.get(self.errno) or _hint_by_kind(cause)
        super().__init__(f"Cannot {action} {place}: {reason}. {hint}. Nothing that was saved is lost.")


def _in_one_line(cause: Exception) -> str:
    text = " ".join(str(cause).split())
    return "no answer in time" if isinstance(cause, TimeoutError) else f"{type(cause).__name__}: {text}"


def _hint_by_kind(cause: Exception) -> str:
    """Libraries raise these without a number."""
    if isinstance(cause, FileNotFoundError) or type(cause).__name__ == "ResourceNotFoundError":
        return "Is the bucket, container or folder there? Make it and start again"
    denied = getattr(cause, "status_code", None) in {401, 403}
    if (
        denied
        or isinstance(cause, PermissionError)
        or "redential" in type(cause).__name__
        or "uth" in type(cause).__name__
    ):
        return "Check the credentials and what they allow; docs/storage.md says where they come from"
    if isinstance(cause, TimeoutError):
        return "Is it reachable from here, and are there credentials for it? Then start again"
    if isinstance(cause, ImportError | TypeError | ValueError):
        return "Check the run URL and its options: docs/storage.md"
    return "Check the storage and start again"
