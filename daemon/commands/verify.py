"""`trainerd verify`: read everything, compare every hash."""

from typing import Annotated

import typer

from trainerd.daemon.commands.operands import StorageOptions
from trainerd.daemon.exit_codes import ExitCode


def verify_run(
    operand: Annotated[str, typer.Argument(metavar="DIR[@STEP]", help="The run folder, or one step of it.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; its shape is in docs/commands.md.")] = False,
    storage_options: StorageOptions = [],  # noqa: B006 # typer makes a new one
) -> None:
    """Check every byte of a run's checkpoints against its hash; exit 65 when damage was found."""
    from trainerd.checkpoint.errors import RunDamaged
    from trainerd.checkpoint.reader import read_step, verify_checkpoints
    from trainerd.daemon import console
    from trainerd.daemon.commands.list import report_json, report_table
    from trainerd.daemon.commands.operands import open_run, split_operand

    directory, step = split_operand(operand)
    storage = open_run(directory, storage_options)
    progress = console.ProgressLine()
    progress.show(f"verifying {operand} ...")
    found = []
    try:
        for info in verify_checkpoints(storage, step):
            found.append(info)
            progress.show(f"verifying {operand}: {len(found)} done, last step {info.step} {info.state} ...")
    except RunDamaged as damage:
        progress.clear()
        console.fail(str(damage))
        raise typer.Exit(ExitCode.DAMAGE_FOUND) from None
    finally:
        progress.clear()
    if step is not None and not found:
        read_step(storage, step)  # raises NoCheckpoint, which names the steps there are

    damaged = [info for info in found if info.state == "damaged"]
    if as_json:
        console.write(report_json(directory, found))
    elif not found:
        console.write(f"{directory}: no checkpoint has been committed yet, so there is nothing to verify.")
    else:
        whole = sum(info.state == "valid" for info in found)
        verdict = f"{len(damaged)} damaged" if damaged else "no damage found"
        console.write(f"{report_table(found)}\n{whole} valid, {verdict}.")
    if damaged:
        raise typer.Exit(ExitCode.DAMAGE_FOUND)
