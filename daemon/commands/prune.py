"""`trainerd prune`: apply retention rules by hand, or show what they would do."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainerd.daemon.commands.operands import StorageOptions

if TYPE_CHECKING:
    from trainerd.checkpoint.pruning import Plan
    from trainerd.checkpoint.retention import Keep
    from trainerd.checkpoint.storage import Storage

_KEEP = (
    "A rule, as in checkpoint.keep of the job file; may be repeated. Without any: those the run was last saved with."
)


def prune_run(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The run folder.")],
    keep: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help=_KEEP)] = None,
    superseded: Annotated[
        bool, typer.Option("--superseded", help="Delete also those that a step back took off the lineage.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go and why the rest stays.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; its shape is in docs/commands.md.")] = False,
    storage_options: StorageOptions = [],  # noqa: B006 # typer makes a new one
) -> None:
    """Delete the checkpoints that no rule wants, and what failed saves left."""
    from trainerd.checkpoint.ownership import RunOwner
    from trainerd.checkpoint.pruning import Pruner
    from trainerd.checkpoint.terms import newest_term
    from trainerd.daemon import console
    from trainerd.daemon.commands.operands import open_run
    from trainerd.daemon.keep_rules import read_keep

    given = read_keep(keep, "--keep") if keep else None
    storage = open_run(directory, storage_options)
    if dry_run:
        rules = given or _last_rules(storage)
        plan = Pruner(storage).plan(rules, superseded=superseded)
    else:
        owner = RunOwner.acquire(storage)
        try:
            rules = given or _last_rules(storage)
            plan = Pruner(storage).prune(rules, term=newest_term(storage), superseded=superseded)
        finally:
            owner.release()
    console.write(_report_json(directory, plan, rules, dry_run) if as_json else _report(plan, rules, dry_run))


def _last_rules(storage: "Storage") -> "Keep":
    """The rules that the newest valid manifest remembers."""
    from trainerd.checkpoint.reader import read_newest
    from trainerd.checkpoint.retention import Keep, recorded_keep
    from trainerd.daemon.exit_codes import ExitCode
    from trainerd.daemon.job_errors import JobError

    newest = read_newest(storage)
    if newest is None:
        return Keep()
    keep = recorded_keep(newest.keep)
    if keep is None:
        raise JobError(
            f"{storage.url} does not remember by which rules its checkpoints are kept, so nothing was deleted. Give "
            f"them: `trainerd prune {storage.url} --keep last=3 --dry-run` shows what would go.",
            ExitCode.WRONG_USAGE,
        )
    return keep


def _report(plan: "Plan", keep: "Keep", dry_run: bool) -> str:
    from trainerd.daemon.console import format_bytes, table

    rows = [[str(name.step), str(name.term), "stays", ", ".join(why)] for name, why in plan.kept.items()]
    rows += [[str(name.step), str(name.term), "goes", ""] for name in plan.goes]
    rows.sort(key=lambda row: (int(row[0]), int(row[1])))
    shown = [table(["step", "term", "fate", "why"], rows, left=["fate", "why"])] if rows and dry_run else []
    did = "Would delete" if dry_run else "Deleted"
    debris = f" and what {len(plan.debris)} unfinished saves left" if plan.debris else ""
    rules = ", ".join(map(str, keep.rules))
    text = (
        f"{did} {len(plan.goes)} of {len(rows)} checkpoints{debris}; {format_bytes(plan.bytes)} freed. Rules: {rules}."
    )
    return "\n".join([*shown, text])


def _report_json(directory: str, plan: "Plan", keep: "Keep", dry_run: bool) -> str:
    import json

    checkpoints: list[dict[str, Any]] = [
        {
            "step": name.step,
            "term": name.term,
            "kept": name in plan.kept,
            "kept_because": plan.kept.get(name, ()),
        }
        for name in sorted([*plan.kept, *plan.goes])
    ]
    report = {
        "run": directory,
        "dry_run": dry_run,
        "rules": [str(rule) for rule in keep.rules],
        "freed_bytes": plan.bytes,
        "debris": [str(name) for name in plan.debris],
        "checkpoints": checkpoints,
    }
    return json.dumps(report, indent=2)
