"""`trainerd diff`: what differs between two checkpoints."""

from typing import Annotated

import typer

from trainerd.daemon.commands.operands import StorageOptions
from trainerd.daemon.exit_codes import ExitCode


def diff_runs(
    a: Annotated[str, typer.Argument(metavar="A", help="DIR[@STEP]: the older one, say.")],
    b: Annotated[str, typer.Argument(metavar="B", help="DIR[@STEP], of the same run or of another.")],
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A place in the state: model, hooks.EMA.", show_default=False)
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; its shape is in docs/commands.md.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show every line of long lists.")] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="End with 1 when the two differ, as git diff.")
    ] = False,
    storage_options: StorageOptions = [],  # noqa: B006 # typer makes a new one
) -> None:
    """Show what differs between two checkpoints: how far each tensor moved, and every value, old -> new."""
    from trainerd.checkpoint.convert.diffing import diff_checkpoints
    from trainerd.daemon import console
    from trainerd.daemon.commands.diff_text import difference_json, difference_text
    from trainerd.daemon.commands.operands import open_run, split_operand

    (directory_a, step_a), (directory_b, step_b) = split_operand(a), split_operand(b)
    line = console.ProgressLine()
    line.show(f"comparing {a} and {b} ...")
    try:
        found = diff_checkpoints(
            open_run(directory_a, storage_options),
            open_run(directory_b, storage_options),
            step_a=step_a,
            step_b=step_b,
            path=path,
            progress=lambda tensor: line.show(f"comparing {tensor} ..."),
        )
    finally:
        line.clear()
    if as_json:
        console.write(difference_json(found, directory_a, directory_b, path))
    else:
        console.write(difference_text(found, directory_a, directory_b, path, limit=None if everything else 20))
    if exit_code and not found.is_empty:
        raise typer.Exit(ExitCode.BUDGET_USED_UP)
