"""`trainerd inspect`: what a checkpoint holds, from its manifest alone."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainerd.daemon.commands.operands import StorageOptions

if TYPE_CHECKING:
    from trainerd.checkpoint.reader import StoredTree


def inspect_checkpoint(
    operand: Annotated[
        str, typer.Argument(metavar="DIR[@STEP]", help="The run folder; the newest valid step if none is given.")
    ],
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A place in the state: hooks.EMA, model.", show_default=False),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; its shape is in docs/commands.md.")] = False,
    storage_options: StorageOptions = [],  # noqa: B006 # typer makes a new one
) -> None:
    """Show what a checkpoint holds, without loading it: names, values, tensors with type, shape and size."""
    from trainerd.checkpoint.reader import read_tree
    from trainerd.daemon import console
    from trainerd.daemon.commands.operands import open_run, split_operand

    directory, step = split_operand(operand)
    stored = read_tree(open_run(directory, storage_options), step)
    node = find(stored.tree, path, f"{directory}@{stored.step}")
    if as_json:
        import json

        console.write(json.dumps({"step": stored.step, "term": stored.term, "tree": node}, indent=2))
    else:
        console.write(_text(stored, node, directory, path))


def find(tree: Any, path: str, place: str) -> Any:
    """The node at a path, or all entries whose dotted names begin with it; NoCheckpoint with near names otherwise."""
    from trainerd.checkpoint import trees
    from trainerd.checkpoint.errors import NoCheckpoint
    from trainerd.daemon.near_names import did_you_mean

    try:
        return trees.find(tree, path)
    except KeyError as error:
        rest, names = error.args
    # Where model has the key `blocks.0.attn.weight`, model.blocks is no entry; people ask for it all the same.
    parent = path.removesuffix(rest).rstrip(".")
    entries = trees.children(trees.find(tree, parent))
    if group := {name: child for name, child in entries.items() if name.startswith(f"{rest}.")}:
        return group
    where = f"in {parent} of {place}" if parent else f"in {place}"
    raise NoCheckpoint(f"There is no {rest} {where}. {did_you_mean(rest, names)}".rstrip())


def _text(stored: "StoredTree", node: Any, directory: str, path: str) -> str:
    import shlex

    from trainerd.daemon.commands.node_text import tensors_in
    from trainerd.daemon.commands.tree_text import TreeText
    from trainerd.daemon.console import format_bytes

    text = TreeText(node, path)
    of = f"{path} of " if path else ""
    size = format_bytes(sum(tensors_in(node).values()))
    head = f"{of}{directory}, step {stored.step}, term {stored.term}, {size} of tensors"
    lines = [head, *text.lines]
    if text.deeper:
        # shlex: keys may hold spaces and quotes.
        command = shlex.join(["trainerd", "inspect", f"{directory}@{stored.step}", text.deeper])
        lines.append(f"Not everything is shown; go deeper with a path: {command}")
    return "\n".join(lines)
