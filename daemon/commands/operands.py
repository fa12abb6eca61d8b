"""DIR and DIR@STEP: which run a reading command means, and what to say when it is not there."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trainerd.checkpoint.storage import Storage


StorageOptions = Annotated[
    list[str],
    typer.Option(
        "--storage", metavar="KEY=VALUE", help="An option of a remote DIR's filesystem (docs/storage.md). Repeatable."
    ),
]


def split_operand(text: str) -> tuple[str, int | None]:
    """Run URL and step of `DIR` or `DIR@STEP`.

    A folder of that whole name wins, so `runs/a@5` may be a run; step 5 of `runs/a` is then `runs/a/@5`.
    """
    directory, at, step = text.rpartition("@")
    if not at or not directory or not (step.isascii() and step.isdigit()) or os.path.isdir(text):
        return text, None
    return directory, int(step)


def split_step(text: str, command: str) -> tuple[str, int]:
    """Run URL and step of `DIR@STEP`, for a command that needs a step; BadParameter without one."""
    directory, step = split_operand(text)
    if step is None:
        raise typer.BadParameter(f"{text} names no step: give DIR@STEP, as in `trainerd {command} {text}@500`")
    return directory, step


def open_url(url: str, storage_options: Sequence[str]) -> "Storage":
    """The storage behind a run URL, there or not, with the texts of --storage as its options."""
    from trainerd.checkpoint.storage import open_storage
    from trainerd.daemon.job_config import apply_settings

    return open_storage(url, apply_settings({}, storage_options, "--storage"))


def open_run(url: str, storage_options: Sequence[str] = ()) -> "Storage":
    """The storage of a run that exists; NoCheckpoint otherwise. Changes nothing."""
    from trainerd.checkpoint.errors import NoCheckpoint
    from trainerd.checkpoint.layout import CHECKPOINTS, RUN_FILE, parse_checkpoint

    storage = open_url(url, storage_options)
    if storage.guarantees.life_lock:
        _require_folder(url)
    if storage.size(RUN_FILE) is not None:
        return storage
    parent, _, name = url.rstrip("/").rpartition("/")
    checkpoint = parse_checkpoint(name)
    if checkpoint is not None and parent.endswith(f"/{CHECKPOINTS}"):
        raise NoCheckpoint(
            f"{url} is a checkpoint's own folder. Name the run and the step instead: "
            f"{parent.removesuffix(f'/{CHECKPOINTS}')}@{checkpoint.step}."
        )
    inside = [name for name in storage.names("")[:100] if storage.size(f"{name}/{RUN_FILE}") is not None][:8]
    hint = f"Runs inside it: {', '.join(inside)}." if inside else "`trainerd run JOB --dir DIR` starts one."
    raise NoCheckpoint(f"There is no run at {url}: it has no {RUN_FILE}, so no training began there yet. {hint}")


def _require_folder(url: str) -> None:
    from trainerd.checkpoint.errors import NoCheckpoint
    from trainerd.daemon.near_names import near_files

    folder = os.path.expanduser(url.removeprefix("file://")).rstrip("/") or "/"
    if not os.path.lexists(folder):
        hint = near_files(folder)
        if "@" in os.path.basename(folder):
            hint = f"{hint} A step is given as a number: DIR@500."
        raise NoCheckpoint(f"There is no run at {url}: the folder does not exist. {hint}".rstrip())
    if not os.path.isdir(folder):
        raise NoCheckpoint(f"There is no run at {url}: it is a file, and a run is a folder.")
