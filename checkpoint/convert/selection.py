"""A part of a checkpoint's tree, and the leaves below it by their dotted names."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from trainerd.checkpoint import trees
from trainerd.checkpoint.convert.errors import NotConverted
from trainerd.checkpoint.trees import KIND

_SHOWN_NAMES = 12


def select(tree: Any, path: str, place: str) -> Any:
    """The node at a path; where no key is called so, all entries whose dotted names begin with it, without that prefix.

    "" is the whole tree. NotConverted names what there is in `place` instead.
    """
    try:
        return trees.find(tree, path)
    except KeyError as error:
        rest, names = error.args
    parent = path.removesuffix(rest).rstrip(".")
    entries = trees.children(trees.find(tree, parent))
    group = {name[len(rest) + 1 :]: child for name, child in entries.items() if name.startswith(f"{rest}.")}
    if group:
        return group
    near = get_close_matches(rest, names, n=1)
    shown = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
    hint = f"Did you mean {near[0]}?" if near else f"There is: {shown}." if names else ""
    raise NotConverted(f"There is no {rest} in {f'{parent} of ' if parent else ''}{place}. {hint}".rstrip())


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf below a node with its dotted name; "" for the node itself. Empty containers have none.

    Tensors are leaves, and so is a list, tuple or set of plain values.
    """
    if is_leaf(node):
        yield prefix, node
        return
    for name, child in trees.children(node).items():
        yield from leaves(child, f"{prefix}.{name}" if prefix else name)


def is_leaf(node: Any) -> bool:
    """Whether a node is one value rather than a container of named or several things."""
    return not is_keyed(node) and not any(map(_is_more_than_a_value, trees.children(node).values()))


def _is_more_than_a_value(node: Any) -> bool:
    return is_keyed(node) or holds_tensor(node) or any(map(_is_more_than_a_value, trees.children(node).values()))


def is_tensor(node: Any) -> bool:
    """Whether a node is a reference to a tensor."""
    return isinstance(node, dict) and node.get(KIND) == "tensor"


def is_keyed(node: Any) -> bool:
    """Whether a node is a mapping, or an object with fields."""
    return isinstance(node, dict) and (KIND not in node or node[KIND] in _KEYED)


def holds_tensor(node: Any) -> bool:
    """Whether a node refers to a tensor, itself or in a part of it, as arrays and sparse tensors do."""
    if isinstance(node, list):
        return any(map(holds_tensor, node))
    if not isinstance(node, dict):
        return False
    return (KIND in node and isinstance(node.get("tensor"), str)) or any(map(holds_tensor, node.values()))


_KEYED = frozenset({"dict", "OrderedDict", "defaultdict", "Counter", "namedtuple", "dataclass"})
