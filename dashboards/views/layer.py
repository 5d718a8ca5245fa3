"""One layer: its lines, and its exponents over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ampscope.errors import AmpscopeError
from ampscope.record.step import Layer

from ..decimate import bucket_edges
from ..source import Source, Window
from .common import Curve, Range, curve

Array = np.ndarray[Any, Any]
View = Literal["scaled", "true"]

LINES = (
    "grad_norm", "grad_max", "underflow_ratio", "underflow_ratio_low", "underflow_ratio_high", "underflow_ratio_measured",
    "zero_ratio", "subnormal_ratio", "headroom_bits", "weight_norm",
)  # fmt: skip
POINTS = 1500
COLUMNS = 300
"""Columns of the exponent picture."""


FAR = 160
"""Binades a histogram is moved at most: no loss scale lies beyond 2^±150."""


@dataclass(frozen=True)
class LayerLines:
    """The curves of one layer by metric, over a range of steps."""

    layer: Layer
    curves: dict[str, Curve]
    sessions: list[tuple[float, str]]
    span: Range
    done: float
    raw: bool


@dataclass(frozen=True)
class Exponents:
    """Elements by binade over time: `share` float64 [C, K] of the layer's elements, binade i is 2^(first + i) and up.

    `edges` [C + 1] steps; `shift` float64 [C]: log2 of the loss scale where `view` is "true", else 0. `every`: histograms
    that were joined into a column, at most.
    """

    layer: Layer
    view: View
    edges: Array
    steps: Array
    share: Array
    first: int
    shift: Array
    every: int
    read: int
    """Histograms the picture rests on, `of` how many that there are."""
    of: int
    span: Range


def find(source: Source, name: str | None) -> int | None:
    """Return the index of a layer by its name, None if there is none of that name."""
    for i, layer in enumerate(source.layers):
        if layer.name == name:
            return i
    return None


def lines(source: Source, rank: int, index: int, span: Range, columns: int = 600) -> LayerLines:
    """Return every curve of a layer; where a column joins many steps, both its least and its greatest value are drawn."""
    tables = {metric: source.table(metric, rank, span.low, span.high, columns) for metric in LINES}
    curves = {metric: _envelope(table, index) for metric, table in tables.items()}
    breaks = [
        (float(s.first_step), f"session {s.index}") for s in source.run.sessions if s.index > 0 and s.first_step >= 0
    ]
    done, raw = min(t.done for t in tables.values()), all(t.raw for t in tables.values())
    return LayerLines(source.layers[index], curves, breaks, span, done, raw)


def _envelope(table: Window, index: int) -> Curve:
    if not len(table.edges) or table.low.shape[0] == 0:
        return curve(np.zeros(0, np.int64), np.zeros(0))
    low, high, start = table.low[:, index].astype(np.float64), table.high[:, index].astype(np.float64), table.edges[:-1]
    if table.raw:
        return curve(start, high)
    x = np.stack([start, (start + table.edges[1:]) // 2], 1).ravel()
    return curve(x, np.stack([low, high], 1).ravel())


def exponents(source: Source, rank: int, index: int, span: Range, view: View = "scaled") -> Exponents | None:
    """Return the exponent picture of a layer, None if no histogram was recorded in the range."""
    found = source.exponents(index, rank, span.low, span.high)
    steps, counts = found.steps, found.counts
    if not len(steps):
        return None
    starts = bucket_edges(len(steps), COLUMNS)[:-1]
    scale = source.values("loss_scale", rank)[np.searchsorted(source.steps, steps)]
    shift = np.zeros(len(steps))
    base = -127
    if view == "true":
        with np.errstate(divide="ignore", invalid="ignore"):
            shift = np.nan_to_num(np.floor(np.log2(scale)), nan=0.0, posinf=0.0, neginf=0.0)
        counts, base = _shifted(counts, -shift.astype(np.int64)), -127 - FAR
    joined = np.add.reduceat(counts, starts, axis=0).astype(np.float64)
    many = np.add.reduceat(found.many, starts)
    share = joined / (many[:, None] * max(1, source.layers[index].numel))
    used = np.flatnonzero(joined.any(0))
    first, last = (int(used[0]), int(used[-1])) if len(used) else (-base, -base)
    spacing = int(np.median(np.diff(steps))) if len(steps) > 1 else 1
    edges = np.append(steps[starts], steps[-1] + max(1, spacing))
    return Exponents(
        source.layers[index], view, edges, steps[starts], share[:, first : last + 1], base + first, shift[starts],
        int(many.max()), found.read, found.of, span,
    )  # fmt: skip


def _shifted(counts: Array, by: Array) -> Array:
    """Return [H, 256 + 2 FAR] histograms, each moved by its own number of binades, at most `FAR` of them."""
    out = np.zeros((len(counts), 256 + 2 * FAR), counts.dtype)
    moves = np.clip(by, -FAR, FAR)
    for move in np.unique(moves).tolist():
        mine = moves == move
        out[mine, FAR + move : FAR + move + 256] = counts[mine]
    return out


def require(source: Source, name: str | None) -> int:
    """Return the index of a layer.

    Raises:
        AmpscopeError: the run has no layer of that name.
    """
    index = find(source, name)
    if index is None:
        raise AmpscopeError(f"no layer {name!r} in run {source.key!r}")
    return index
