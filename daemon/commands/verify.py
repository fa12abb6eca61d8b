"""`trainerd verify`: every byte of a run against its hash."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from trainerd.daemon.commands.operands import StorageOptions
from trainerd.daemon.exit_codes import ExitCode

if TYPE_CHECKING:
    from trainerd.checkpoint.listing import CheckpointInfo


def verify_run(
    operand: Annotated[str, typer.Argument(metavar="DIR[@STEP]", help="The run folder, or one step of it.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; its shape is in docs/commands.md.")] = False,
    storage_options: StorageOptions = [],  # noqa: B006 # typer makes a new one
) -> None:
    """Check every byte of a run's checkpoints against its hash; exit 65 when damage was found."""
    from trainerd.checkpoint.errors import RunDamaged
    from trainerd.checkpoint.reader import read_step
    from trainerd.checkpoint.verifying import verify_checkpoints
    from trainerd.daemon import console
    from trainerd.daemon.commands.list import report_json, report_table
    from trainerd.daemon.commands.operands import open_run, split_operand

    directory, step = split_operand(operand)
    storage = open_run(directory, storage_options)
    bar = console.ProgressBar(f"verifying {operand}", time.monotonic)
    try:
        found = list(verify_checkpoints(storage, step, bar.show))
    except RunDamaged as damage:
        bar.clear()
        console.fail(str(damage))
        raise typer.Exit(ExitCode.DAMAGE_FOUND) from None
    finally:
        bar.clear()
    if step is not None and not found:
        read_step(storage, step)  # raises NoCheckpoint, which names the steps there are

    damaged = [info for info in found if info.state == "damaged"]
    if as_json:
        console.write(report_json(directory, found))
    elif not found:
        console.write(f"{directory}: no checkpoint has been committed yet, so there is nothing to verify.")
    else:
        whole = sum(info.state == "valid" for info in found)
        verdict = f"{len(damaged)} damaged. {_way_out(directory, found)}" if damaged else "no damage found."
        console.write(f"{report_table(found)}\n{whole} valid, {verdict}")
    if damaged:
        raise typer.Exit(ExitCode.DAMAGE_FOUND)


def _way_out(directory: str, found: "list[CheckpointInfo]") -> str:
    newest = max((info.step for info in found if info.state == "damaged"), default=0)
    whole = max((info.step for info in found if info.state == "valid"), default=None)
    if whole is None:
        cost = "Nothing that was looked at could be resumed from"
    elif whole < newest:
        cost = f"A resume goes back to step {whole}, {newest - whole} steps before the newest damaged one"
    else:
        cost = f"A resume takes step {whole}, which is whole"
    return f"{cost}. `trainerd repair {directory}` moves what is damaged aside."
