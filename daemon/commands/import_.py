"""`trainerd import`: begin a run with a checkpoint of another program."""

from typing import TYPE_CHECKING, Annotated

import typer

from trainerd.daemon.commands.operands import StorageOptions

if TYPE_CHECKING:
    from trainerd.checkpoint.convert.importing import Imported


def import_run(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A file or folder of detectron2, torch, Lightning, Hugging Face or DCP."),
    ],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The run folder to make; new or empty.")],
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", min=0, help="Completed iterations. [default: as the source tells, else 0]"),
    ] = None,
    storage_options: StorageOptions = [],  # noqa: B006 # typer makes a new one
) -> None:
    """Begin a run with the checkpoint of another program. Nothing in it is executed; what finds no place is kept."""
    from trainerd.checkpoint.convert.importing import import_checkpoint
    from trainerd.daemon import console
    from trainerd.daemon.commands.operands import open_url

    line = console.ProgressLine()
    line.show(f"importing {source} ...")
    try:
        imported = import_checkpoint(source, open_url(directory, storage_options), step=step)
    finally:
        line.clear()
    console.write(_text(imported, source, directory))


def _text(imported: "Imported", source: str, directory: str) -> str:
    from trainerd.daemon.console import format_bytes

    lines = [
        f"{source} ({imported.kind}) -> {directory}, step {imported.step}: {format_bytes(imported.bytes)} of tensors",
        f"Carried over: {', '.join(imported.carried)}.",
    ]
    if imported.kept:
        lines.append(f"Kept under `imported`, where no trainer looks: {', '.join(imported.kept)}.")
    lines += [f"Note: {note}." for note in imported.notes]
    if imported.carried != ("the whole state",):
        lines.append(
            "Data position, random numbers and metrics begin anew; say so when you resume: "
            "`trainerd run ... --checkpoint-on-mismatch entries=warn`."
        )
    return "\n".join(lines)
