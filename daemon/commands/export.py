"""`trainerd export`: a checkpoint, or a part of it, as a file that other programs read."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from trainerd.daemon.commands.operands import StorageOptions

if TYPE_CHECKING:
    from trainerd.checkpoint.convert.exporting import Exported

_SHOWN = 8


def export_run(
    operand: Annotated[
        str, typer.Argument(metavar="DIR[@STEP]", help="The run folder; the newest valid step if none is given.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="*.safetensors, *.pt, *.pth; with --to dcp a folder.")],
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="safetensors, torch or dcp. [default: by OUT's suffix]")
    ] = "",
    path: Annotated[
        str, typer.Option("--path", metavar="PATH", help="A part of the state, its names without that prefix: model.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    storage_options: StorageOptions = [],  # noqa: B006 # typer makes a new one
) -> None:
    """Write a checkpoint, or a part of it, to a file that other programs read. Most want `--path model`."""
    from trainerd.checkpoint.convert.exporting import FORMATS, export_checkpoint
    from trainerd.daemon import console
    from trainerd.daemon.commands.operands import open_run, split_operand
    from trainerd.daemon.console import format_bytes

    if to and to not in FORMATS:
        raise typer.BadParameter(f"{to} is none of {', '.join(FORMATS)}", param_hint="--to")
    directory, step = split_operand(operand)
    line = console.ProgressLine()
    line.show(f"exporting {operand} ...")
    try:
        exported = export_checkpoint(
            open_run(directory, storage_options),
            out,
            step=step,
            path=path,
            to=to or None,  # type: ignore[arg-type] # one of FORMATS
            force=force,
            progress=lambda done, size: line.show(f"exporting {operand}: {format_bytes(done)} of {format_bytes(size)}"),
        )
    finally:
        line.clear()
    console.write(_text(exported, directory, path))


def _text(exported: "Exported", directory: str, path: str) -> str:
    from trainerd.daemon.console import format_bytes

    of = f"{path} of " if path else ""
    size = f"{exported.tensors} tensors, {format_bytes(exported.bytes)}"
    lines = [f"{of}{directory}, step {exported.step} -> {exported.out}: {exported.format}, {size}"]
    if exported.repeated:
        lines.append(f"{exported.repeated} names share a tensor with another name, and were written again for each.")
    if exported.left_out:
        lines.append(f"Left out, as safetensors cannot hold them: {_named(exported.left_out, 'values')}.")
    if exported.changed:
        told = [f"{place or 'the state'} ({kind} -> {became})" for place, kind, became in exported.changed]
        lines.append(f"Made plain, as weights_only=True loads no others: {_named(told, 'values')}.")
    return "\n".join(lines)


def _named(names: Iterable[str], what: str) -> str:
    known = list(names)
    more = f", and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f"{len(known)} {what}: {', '.join(known[:_SHOWN])}{more}"
