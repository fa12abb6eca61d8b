"""`trainerd pin` and `unpin`: keep a checkpoint, whatever the rules say, until told otherwise."""

from typing import Annotated

import typer

from trainerd.daemon.commands.operands import StorageOptions

_OPERAND = typer.Argument(metavar="DIR@STEP", help="The run folder and the step.")


def pin_checkpoint(
    operand: Annotated[str, _OPERAND],
    note: Annotated[str, typer.Option(metavar="TEXT", help="Why; `trainerd list` shows it.")] = "",
    storage_options: StorageOptions = [],  # noqa: B006 # typer makes a new one
) -> None:
    """Keep a checkpoint until it is unpinned; a live daemon sees it at its next save."""
    from trainerd.checkpoint.pins import pin
    from trainerd.checkpoint.reader import read_step
    from trainerd.daemon import console
    from trainerd.daemon.commands.operands import open_run, split_step

    directory, step = split_step(operand, "pin")
    storage = open_run(directory, storage_options)
    name = read_step(storage, step).name
    note = " ".join(note.split())
    record = pin(storage, name, note)
    said = f": {record.note}" if record.note else ""
    if record.note == note:
        console.write(f"{name} is pinned{said}")
    else:
        console.write(f"{name} was pinned already{said}. `trainerd unpin {operand}` first, to give another note.")


def unpin_checkpoint(
    operand: Annotated[str, _OPERAND],
    storage_options: StorageOptions = [],  # noqa: B006 # typer makes a new one
) -> None:
    """Let the retention rules decide about a checkpoint again."""
    from trainerd.checkpoint.pins import unpin
    from trainerd.daemon import console
    from trainerd.daemon.commands.operands import open_run, split_step

    directory, step = split_step(operand, "unpin")
    for name in unpin(open_run(directory, storage_options), step):
        console.write(f"{name} is no longer pinned")
