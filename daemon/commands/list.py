"""`trainerd list`: the checkpoints of a run, newest last."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainerd.daemon.commands.operands import StorageOptions

if TYPE_CHECKING:
    from trainerd.checkpoint.listing import CheckpointInfo


def list_run(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; its shape is in docs/commands.md.")] = False,
    storage_options: StorageOptions = [],  # noqa: B006 # typer makes a new one
) -> None:
    """Show the checkpoints of a run, newest last, without reading their data."""
    from trainerd.checkpoint.listing import list_checkpoints
    from trainerd.daemon import console
    from trainerd.daemon.commands.operands import open_run

    found = list_checkpoints(open_run(directory, storage_options))
    if as_json:
        console.write(report_json(directory, found))
    elif found:
        console.write(report_table(found))
    else:
        console.write(f"{directory}: no checkpoint has been committed yet.")


def report_json(directory: str, found: "list[CheckpointInfo]") -> str:
    """The documented object of `list` and `verify`."""
    import json

    return json.dumps({"run": directory, "checkpoints": [_record(info) for info in found]}, indent=2)


def report_table(found: "list[CheckpointInfo]") -> str:
    """One line per checkpoint: what it is, what it takes, and why it is kept or does not count."""
    import time

    from trainerd.daemon.console import format_age, format_bytes, table

    now = time.time()
    rows = [
        [
            str(info.step),
            str(info.term),
            info.state,
            format_bytes(info.bytes),
            format_bytes(info.unique_bytes),
            format_age(now - info.time) if info.time is not None else "-",
            ", ".join([*([info.reason] if info.reason else []), *info.kept_because]),
        ]
        for info in found
    ]
    return table(["step", "term", "state", "size", "own size", "age", "why"], rows, left=["state", "why"])


def _record(info: "CheckpointInfo") -> dict[str, Any]:
    return {
        "step": info.step,
        "term": info.term,
        "state": info.state,
        "reason": info.reason,
        "bytes": info.bytes,
        "unique_bytes": info.unique_bytes,
        "time": info.time,
        "pinned": info.pinned,
        "kept_because": list(info.kept_because),
    }
