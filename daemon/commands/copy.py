"""`trainerd copy`: a run's checkpoints at another place, verified while they are read."""

from typing import Annotated

import typer

from trainerd.daemon.commands.operands import StorageOptions
from trainerd.daemon.exit_codes import ExitCode


def copy_checkpoints(
    operand: Annotated[str, typer.Argument(metavar="DIR[@STEP]", help="The run folder, or one step of it.")],
    destination: Annotated[str, typer.Argument(metavar="DEST", help="Another run folder: new, or an earlier copy.")],
    storage_options: StorageOptions = [],  # noqa: B006 # typer makes a new one
    to_storage: Annotated[
        list[str],
        typer.Option("--to-storage", metavar="KEY=VALUE", help="As --storage, for DEST's filesystem. Repeatable."),
    ] = [],  # noqa: B006 # typer makes a new one
) -> None:
    """Copy a run's valid checkpoints, newest first, each byte verified. Start it again to go on; exit 65 on damage."""
    from trainerd.checkpoint.convert.copying import copy_run
    from trainerd.daemon import console
    from trainerd.daemon.commands.operands import open_run, open_url, split_operand
    from trainerd.daemon.console import format_bytes, table

    directory, step = split_operand(operand)
    line = console.ProgressLine()
    line.show(f"copying {operand} ...")
    try:
        copied = copy_run(
            open_run(directory, storage_options),
            open_url(destination, to_storage),
            step=step,
            progress=lambda step, done, size: line.show(
                f"copying step {step}: {format_bytes(done)} of {format_bytes(size)}"
            ),
        )
    finally:
        line.clear()
    rows = [[str(one.step), str(one.term), format_bytes(one.bytes), one.fate, one.reason] for one in copied]
    console.write(table(["step", "term", "size", "state", "why"], rows, left=["state", "why"]))
    if any(one.fate == "damaged" for one in copied):
        raise typer.Exit(ExitCode.DAMAGE_FOUND)
