"""`trainerd run`: build the job and hand it to the supervisor."""

import inspect
from typing import Annotated, Any

import typer

from trainerd.daemon.commands.operands import StorageOptions
from trainerd.daemon.durations import Interval, Seconds
from trainerd.daemon.job_keys import Key, flag_keys

_METAVARS = {int: "N", Seconds: "DURATION", Interval: "INTERVAL"}


def run(
    job: str,
    settings: list[str],
    storage_options: list[str],
    fresh: bool,
    take_over: bool,
    no_daemon: bool,
    **flags: str | None,
) -> None:
    """Train, and bring the training back after any death.

    JOB is a job file (job.toml) or the function that builds the trainer (train.py:build_trainer or
    package.module:build_trainer). A run folder that holds checkpoints is resumed. Flags override the job file.
    SIGTERM or Ctrl-C: finish the step, save, exit 75.
    """
    from trainerd.daemon.job_file import build_job

    given = {key.path: text for key in flag_keys() if (text := flags[_parameter(key)]) is not None}
    built = build_job(job, given, settings, storage_options)
    if no_daemon:
        from trainerd.daemon.worker import train_here

        raise typer.Exit(train_here(built, fresh=fresh, take_over=take_over))
    from trainerd.daemon.supervisor import supervise

    raise typer.Exit(supervise(built, fresh=fresh, take_over=take_over))


def _signature() -> inspect.Signature:
    """The parameters that typer sees: a flag for every key of the job file, read off the structs."""
    fresh = "Start at step 0 in a used run folder; what is there stays until it is pruned."
    take_over = "Take a remote run from an owner that lives, or that may: what it saves after that does not count."
    no_daemon = "Train in this process, without restarts: for debuggers and tests."
    setting = "Set a key of [config]: lr=3e-4, model.width=256. Repeatable."
    return inspect.Signature(
        [
            _keyword("job", Annotated[str, typer.Argument(metavar="JOB", help="job.toml or train.py:build_trainer")]),
            *(_keyword(_parameter(key), _flag(key), None) for key in flag_keys()),
            _keyword("settings", Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help=setting)], []),
            _keyword("storage_options", StorageOptions, []),
            _keyword("fresh", Annotated[bool, typer.Option("--fresh", help=fresh)], False),
            _keyword("take_over", Annotated[bool, typer.Option("--take-over", help=take_over)], False),
            _keyword("no_daemon", Annotated[bool, typer.Option("--no-daemon", help=no_daemon)], False),
        ]
    )


def _keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag(key: Key) -> Any:
    # Taken as text and read by job_keys, so that a flag and a file's key are refused in the same words.
    metavar = "RULES" if key.is_table else _METAVARS.get(key.kind, key.name.upper())
    help_text = key.help[0].upper() + key.help[1:] + "."
    if key.default_text:
        help_text += f" [default: {key.default_text}]"
    return Annotated[str | None, typer.Option(key.flag, metavar=metavar, help=help_text)]


def _parameter(key: Key) -> str:
    return key.path.replace(".", "_")


run.__signature__ = _signature()  # type: ignore[attr-defined]
