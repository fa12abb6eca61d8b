"""`trainerd repair`: bring a damaged run into order, without deleting anything."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from trainerd.daemon.commands.operands import StorageOptions

if TYPE_CHECKING:
    from trainerd.checkpoint.repair import Step
    from trainerd.checkpoint.storage import Storage


def repair_run(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The run folder; no daemon may be alive.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")] = False,
    resumed_from: Annotated[
        list[str],
        typer.Option(metavar="TERM=STEP", help="From which step the term of a damaged ticket resumed. Repeatable."),
    ] = [],  # noqa: B006 # typer makes a new one
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; its shape is in docs/commands.md.")] = False,
    storage_options: StorageOptions = [],  # noqa: B006 # typer makes a new one
) -> None:
    """Adopt checkpoints that are proven whole, move damaged ones aside, rebuild damaged records; delete nothing."""
    from trainerd.checkpoint.ownership import RunOwner
    from trainerd.daemon import console
    from trainerd.daemon.commands.operands import open_run

    given = dict(map(_read_resumed_from, resumed_from))
    storage = open_run(directory, storage_options)
    if dry_run:
        steps, unseen = _repair(storage, directory, given, apply=False)
    else:
        owner = RunOwner.acquire(storage, to_repair=True)
        try:
            steps, unseen = _repair(storage, directory, given, apply=True)
        finally:
            owner.release()
    console.write(_report_json(directory, steps, dry_run) if as_json else _report(directory, steps, dry_run, unseen))


def _repair(storage: "Storage", directory: str, given: dict[int, int], *, apply: bool) -> tuple[list["Step"], bool]:
    """Plan and do; true if checkpoints could not be looked at yet, because what they depend on is damaged."""
    from trainerd.checkpoint.repair import plan_checkpoints, plan_records
    from trainerd.daemon import console

    steps = plan_records(storage, resumed_from=given)
    if steps and not apply:
        return steps, True
    for step in steps:
        step.do(storage)
    bar = console.ProgressBar(f"reading {directory}", time.monotonic)
    done = 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        bar.show(done, total)

    try:
        total = _total_bytes(storage)
        found = plan_checkpoints(storage, told)
    finally:
        bar.clear()
    if apply:
        for step in found:
            step.do(storage)
    return steps + found, False


def _total_bytes(storage: "Storage") -> int:
    from trainerd.checkpoint.listing import list_checkpoints

    files = {path: size for info in list_checkpoints(storage) for path, size in info.files.items()}
    return sum(files.values())


def _read_resumed_from(text: str) -> tuple[int, int]:
    term, equals, step = text.partition("=")
    if not (equals and term.isascii() and term.isdigit() and step.isascii() and step.isdigit() and len(text) < 40):
        raise typer.BadParameter(f"--resumed-from {text}: give TERM=STEP, as in --resumed-from 3=500")
    return int(term), int(step)


def _report(directory: str, steps: list["Step"], dry_run: bool, unseen: bool) -> str:
    if not steps:
        return f"{directory}: nothing is damaged, nothing was changed."
    lines = [f"{step.action}: {step.what} ({step.why})" for step in steps]
    if unseen:
        lines.append("The checkpoints themselves are looked at when that is done.")
    lines.append("Nothing was changed yet; without --dry-run it is done." if dry_run else "Nothing was deleted.")
    return "\n".join(lines)


def _report_json(directory: str, steps: list["Step"], dry_run: bool) -> str:
    import json

    done = [{"action": step.action, "what": step.what, "why": step.why} for step in steps]
    return json.dumps({"run": directory, "dry_run": dry_run, "steps": done}, indent=2)
