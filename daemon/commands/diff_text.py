"""The difference of two checkpoints as text and as JSON."""

import json
import math
from typing import Any

from trainerd.checkpoint.convert.diffing import Difference, TensorChange, ValueChange
from trainerd.checkpoint.convert.flattening import FlatTensor
from trainerd.checkpoint.trees import children
from trainerd.daemon.commands.node_text import one_line
from trainerd.daemon.console import table

_NONE = "-"


def difference_text(found: Difference, a: str, b: str, path: str, limit: int | None) -> str:
    """Tensors that moved most first, then values in the order of the state; `limit` lines of each, None for all."""
    of = f"{path} of " if path else ""
    lines = [f"{of}a: {a}, step {found.a.step}, term {found.a.term}; b: {b}, step {found.b.step}, term {found.b.term}"]
    if found.tensors:
        rows = [_tensor_row(change) for change in sorted(found.tensors, key=_relevance)]
        columns = ["tensor", "relative", "l2", "max abs", "changed", "what"]
        lines += ["", table(columns, rows[:limit], left=["tensor", "what"]), *_more(rows, limit)]
    if found.values:
        rows = [_value_row(change) for change in found.values]
        lines += ["", table(["value", "a", "b"], rows[:limit], left=["value", "a", "b"]), *_more(rows, limit)]
    differ = f"{_counted(len(found.tensors), len(found.values))} differ"
    equal = f"{_counted(found.equal_tensors, found.equal_values)} are equal to the bit."
    lines += ["", f"{differ}, {equal}"] if not found.is_empty else [f"No difference: {equal}"]
    return "\n".join(lines)


def difference_json(found: Difference, a: str, b: str, path: str) -> str:
    """The documented object of `diff`."""
    report = {
        "a": {"run": a, "step": found.a.step, "term": found.a.term},
        "b": {"run": b, "step": found.b.step, "term": found.b.term},
        "path": path,
        "tensors": [_tensor_record(change) for change in found.tensors],
        "values": [{"path": v.path, "change": v.change, "a": v.a, "b": v.b} for v in found.values],
        "equal_tensors": found.equal_tensors,
        "equal_values": found.equal_values,
    }
    return json.dumps(report, indent=2, allow_nan=False)


def _counted(tensors: int, values: int) -> str:
    return f"{tensors} tensor{'s' * (tensors != 1)} and {values} value{'s' * (values != 1)}"


def _relevance(change: TensorChange) -> tuple[int, float]:
    """What cannot be compared first, then numbers that are none, then the largest relative change."""
    moved = change.distance
    if moved is None:
        return (0, 0.0)
    if moved.not_finite:
        return (1, -moved.not_finite)
    return (2, -(math.inf if moved.relative is None else moved.relative))


def _tensor_row(change: TensorChange) -> list[str]:
    moved = change.distance
    if moved is None:
        kinds = [_kind(side) for side in (change.a, change.b) if side is not None]
        return [change.path, _NONE, _NONE, _NONE, _NONE, _what(change, " -> ".join(kinds))]
    what = f"{moved.not_finite} not finite" if moved.not_finite else ""
    numbers = [_number(value) for value in (moved.relative, moved.l2, moved.max_abs)]
    return [change.path, *numbers, _percent(moved.changed_fraction), what]


def _what(change: TensorChange | ValueChange, text: str) -> str:
    return text if change.change in ("value", "type") else f"{change.change}: {text}"


def _kind(tensor: FlatTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.3g}"


def _percent(fraction: float) -> str:
    # Neither none nor all of them by rounding alone.
    return "100%" if fraction == 1 else f"{min(max(fraction * 100, 0.01), 99.99):.2f}%"


def _value_row(change: ValueChange) -> list[str]:
    shown_a, shown_b = (_value(node) for node in (change.a, change.b))
    return [
        change.path,
        _NONE if change.change == "only in b" else shown_a,
        _NONE if change.change == "only in a" else shown_b,
    ]


def _value(node: Any) -> str:
    text = one_line(node)
    return f"({len(children(node))} entries)" if text is None else text


def _more(rows: list[list[str]], limit: int | None) -> list[str]:
    return [] if limit is None or len(rows) <= limit else [f"... {len(rows) - limit} more: --all shows them"]


def _tensor_record(change: TensorChange) -> dict[str, Any]:
    sides = {
        name: None if side is None else {"dtype": side.dtype, "shape": list(side.shape)}
        for name, side in (("a", change.a), ("b", change.b))
    }
    moved = change.distance
    numbers = {
        name: value if isinstance(value, int) or (value is not None and math.isfinite(value)) else None
        for name in ("changed_fraction", "l2", "relative", "max_abs", "not_finite")
        for value in [None if moved is None else getattr(moved, name)]
    }
    return {"path": change.path, "change": change.change, **sides, **numbers}
