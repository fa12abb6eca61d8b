"""A checkpoint's tree as nested, aligned lines, cut where it would drown the reader."""

from typing import Any

from trainerd.checkpoint.trees import children
from trainerd.daemon.commands.node_text import key_text, label, one_line, tensors_in
from trainerd.daemon.console import format_bytes

_LEVELS = 3
_SHOWN_ENTRIES = 12
_WIDEST_NAME = 48


class TreeText:
    """The lines of a subtree; `deeper` is the path of the first place that was cut, "" if all is shown."""

    def __init__(self, node: Any, path: str) -> None:
        self.lines: list[str] = []
        self.deeper = ""
        leaf = one_line(node)
        if leaf is not None:
            self.lines.append(leaf)
        else:
            # What was asked for by its path is shown whole; only what lies below it is cut.
            self._add(children(node), path, level=1, limit=None)

    def _add(self, entries: dict[str, Any], path: str, level: int, limit: int | None) -> None:
        shown = list(entries.items())[:limit]
        texts = [one_line(child) for _, child in shown]
        names = [key_text(name) for name, _ in shown]
        leaves = [len(name) for name, text in zip(names, texts, strict=True) if text is not None]
        width = min(max(leaves, default=0), _WIDEST_NAME)
        indent = "  " * (level - 1)
        for (key, child), name, text in zip(shown, names, texts, strict=True):
            if text is not None:
                self.lines.append(f"{indent}{name.ljust(width)}  {text}")
                continue
            below = f"{path}.{key}" if path else key
            self.lines.append(f"{indent}{name}  ({_summary(child)})")
            if level == _LEVELS:
                self.deeper = self.deeper or below
            else:
                self._add(children(child), below, level + 1, _SHOWN_ENTRIES)
        if len(shown) < len(entries):
            self.deeper = self.deeper or path
            self.lines.append(f"{indent}... {len(entries) - len(shown)} more")


def _summary(node: Any) -> str:
    count = len(children(node))
    size = sum(tensors_in(node).values())
    parts = [label(node), f"{count} entries" if count != 1 else "1 entry", format_bytes(size) if size else ""]
    return ", ".join(part for part in parts if part)
