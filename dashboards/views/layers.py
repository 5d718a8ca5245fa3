"""Layers × steps of one metric: which rows there are, in which order, and the worst value of each cell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..source import HAD_NO_GRADIENT, WAS_MEASURED, WAS_NONFINITE, Source
from .common import Range

Array = np.ndarray[Any, Any]
Group = Literal["auto", "none", "module", "top"]
Order = Literal["network", "worst"]

ROWS, COLUMNS = 200, 600
"""Most rows and columns sent: a heatmap of 300 × 500 cells is 1 MB and takes a browser 0.3 s."""
LOW_IS_BAD = frozenset({"headroom_bits"})

VALUE, ABSENT, NONFINITE, UNBOUNDED, UNSAMPLED = 0, 1, 2, 3, 4
"""What a cell holds: a value; no gradient; NaN or inf; an infinite metric (all gradients zero); nothing was looked at."""


@dataclass(frozen=True)
class Row:
    """One row: a layer, or the layers of a module folded into one (`count` of them). `key` names it to the server."""

    key: str
    label: str
    layers: tuple[int, ...]
    is_group: bool
    worst: float = float("nan")
    bad: int = 0
    """Columns in which one of its layers was not finite."""

    @property
    def count(self) -> int:
        """Layers in the row."""
        return len(self.layers)


@dataclass(frozen=True)
class LayerMap:
    """The heatmap: `values` float32 [R, C], `cells` uint8 [R, C], `edges` [C + 1] steps."""

    metric: str
    rows: list[Row]
    edges: Array
    values: Array
    cells: Array
    matched: int
    total: int
    left_out: int
    done: float
    raw: bool
    opened: list[str] = field(default_factory=list)
    problem: str = ""


class Query:
    """A search: words that must all occur (case ignored), or `re:` and a regular expression.

    `problem` says why a regular expression was not understood; then everything matches.
    """

    def __init__(self, text: str | None) -> None:
        text = (text or "").strip()[:200]
        self.problem = ""
        self._pattern: re.Pattern[str] | None = None
        self._words: list[str] = []
        if text.startswith("re:"):
            try:
                self._pattern = re.compile(text[3:].strip(), re.IGNORECASE)
            except re.error as error:
                self.problem = f"not a regular expression: {error}"
        else:
            self._words = text.lower().split()

    def __call__(self, name: str) -> bool:
        """Whether a name matches."""
        if self._pattern is not None:
            return self._pattern.search(name) is not None
        return all(word in name.lower() for word in self._words)


def group_of(name: str, group: Group | int) -> str:
    """Return the module a parameter is folded into ("" for none); a number is how many parts of its name that has."""
    parts = name.split(".")[:-1]
    if group == "top":
        group = 1
    if isinstance(group, int):
        return ".".join(parts[:group])
    return ".".join(parts) if group == "module" else ""


def fitting(names: Sequence[str], chosen: Sequence[int]) -> Group | int:
    """Return the finest grouping that leaves at most `ROWS` rows."""
    if len(chosen) <= ROWS:
        return "none"
    deepest = max(names[i].count(".") for i in chosen)
    for depth in range(deepest, 1, -1):
        if len({group_of(names[i], depth) or names[i] for i in chosen}) <= ROWS:
            return depth
    return 1


def make_rows(names: Sequence[str], indices: Iterable[int], group: Group, opened: Iterable[str]) -> list[Row]:
    """Return rows in network order.

    Args:
        names: all layers' names.
        indices: which of them to show.
        group: "auto" folds only where there are more than `ROWS` layers, and no more than needed.
        opened: modules whose layers are shown one by one.
    """
    chosen = list(indices)
    how = fitting(names, chosen) if group == "auto" else group
    members: dict[str, list[int]] = {}
    for i in chosen:
        members.setdefault(group_of(names[i], how), []).append(i)
    unfolded = {*opened, ""}
    rows: list[Row] = []
    seen: set[str] = set()
    for i in chosen:
        module = group_of(names[i], how)
        if module in unfolded or len(members[module]) == 1:
            rows.append(Row(names[i], names[i], (i,), False))
        elif module not in seen:
            seen.add(module)
            inside = members[module]
            rows.append(Row(module, f"{module}.* ({len(inside)})", tuple(inside), True))
    return rows


def layer_map(
    source: Source,
    rank: int,
    metric: str,
    span: Range,
    *,
    order: Order = "network",
    group: Group = "auto",
    query: str | None = "",
    opened: Sequence[str] = (),
    rows: int = ROWS,
    columns: int = COLUMNS,
) -> LayerMap:
    """Return the heatmap of a metric over a range of steps: at most `rows` rows (the rest is counted) and `columns` columns."""
    names = [layer.name for layer in source.layers]
    wanted = Query(query)
    chosen = [i for i, name in enumerate(names) if wanted(name)]
    table = source.table(metric, rank, span.low, span.high, columns)
    values = table.low if metric in LOW_IS_BAD else table.high
    every = make_rows(names, chosen, group, opened)
    merged = [_fold(row, values, table.flags, metric in LOW_IS_BAD) for row in every]
    every = [_judged(row, v, f, metric in LOW_IS_BAD) for row, (v, f) in zip(every, merged, strict=True)]
    at = list(range(len(every)))
    if order == "worst":
        at.sort(key=lambda i: _badness(every[i], metric))
    at = at[:rows]
    if at and len(table.edges) > 1:
        z = np.stack([merged[i][0] for i in at])
        cells = classify(z, np.stack([merged[i][1] for i in at]))
    else:
        z, cells = np.zeros((len(at), 0), np.float32), np.zeros((len(at), 0), np.uint8)
    return LayerMap(
        metric, [every[i] for i in at], table.edges, np.where(np.isfinite(z), z, np.nan).astype(np.float32), cells,
        len(chosen), len(names), len(every) - len(at), table.done, table.raw,
        [m for m in opened if any(n.startswith(f"{m}.") for n in names)], wanted.problem,
    )  # fmt: skip


def classify(values: Array, flags: Array) -> Array:
    """Return what each cell holds, uint8 like `values`."""
    cells = np.full(values.shape, VALUE, np.uint8)
    nothing = np.isnan(values)
    cells[nothing] = UNSAMPLED
    cells[nothing & ((flags & HAD_NO_GRADIENT) > 0) & ((flags & WAS_MEASURED) == 0)] = ABSENT
    cells[np.isinf(values)] = UNBOUNDED
    cells[(flags & WAS_NONFINITE) > 0] = NONFINITE
    return cells


def _fold(row: Row, values: Array, flags: Array, low_is_bad: bool) -> tuple[Array, Array]:
    """Return the worst value and the joined flags of a row's layers, [C] each."""
    if len(row.layers) == 1:
        return values[:, row.layers[0]], flags[:, row.layers[0]]
    inside = list(row.layers)
    reduce = np.fmin if low_is_bad else np.fmax
    return np.asarray(reduce.reduce(values[:, inside], axis=1)), np.asarray(
        np.bitwise_or.reduce(flags[:, inside], axis=1)
    )


def _judged(row: Row, values: Array, flags: Array, low_is_bad: bool) -> Row:
    known = values[np.isfinite(values)]
    worst = float(known.min() if low_is_bad else known.max()) if len(known) else float("nan")
    return Row(row.key, row.label, row.layers, row.is_group, worst, int(((flags & WAS_NONFINITE) > 0).sum()))


def _badness(row: Row, metric: str) -> tuple[float, float]:
    """Return a key that sorts the worst first: more non-finite columns, then the worse value, then rows with none."""
    value = row.worst if metric in LOW_IS_BAD else -row.worst
    return (-row.bad, float("inf") if np.isnan(value) else value)
