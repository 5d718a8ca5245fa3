"""Runs side by side: curves on a common axis, a table, and the gradient norms of their layers as ratios."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..source import Source
from .common import Curve, curve, duration, number, percent, power, size
from .overview import latest

Array = np.ndarray[Any, Any]
Align = Literal["step", "relative", "wall"]

MOST = 6
"""Runs compared at once: as many as there are colours that can be told apart."""
COLUMNS = 400


@dataclass(frozen=True)
class RunCurves:
    """One run's curves; x is the step, seconds since its first step, or Unix seconds."""

    name: str
    loss: Curve
    scale: Curve
    grad_norm: Curve
    step_seconds: Curve


@dataclass(frozen=True)
class Ratio:
    """Gradient norm of each common layer, the other run's over the first's, as log2 of the median ratio."""

    other: str
    layers: list[str]
    log2: Array


@dataclass(frozen=True)
class Comparison:
    """Everything the tab shows. `rows` is the table: a name, then a value a run."""

    runs: list[RunCurves]
    align: Align
    rows: list[tuple[str, list[str]]]
    ratios: list[Ratio]
    words: list[str]


def compare(sources: list[tuple[Source, int]], align: Align) -> Comparison:
    """Return the comparison of up to `MOST` (run, rank) pairs; the first is what the others are measured against."""
    sources = [(s, r) for s, r in sources[:MOST] if len(s.steps)]
    curves = [_curves(source, rank, align) for source, rank in sources]
    ratios = [_ratio(sources[0], other) for other in sources[1:]]
    return Comparison(curves, align, _table(sources), [r for r in ratios if r.layers], _words(sources))


def _curves(source: Source, rank: int, align: Align) -> RunCurves:
    times = source.values("time", rank)
    known = times[np.isfinite(times)]
    origin = float(known[0]) if len(known) and align == "relative" else 0.0

    def line(name: str, nan_is_bad: bool = False) -> Curve:
        x, y = source.line(name, rank, None, None, 1000)
        if align != "step":
            x = times[np.searchsorted(source.steps, x)] - origin
        return curve(x, y, nan_is_bad)

    return RunCurves(source.key, line("loss", True), line("loss_scale"), line("grad_norm"), line("step_seconds"))


def _ratio(base: tuple[Source, int], other: tuple[Source, int]) -> Ratio:
    (a, rank_a), (b, rank_b) = base, other
    left, right = a.table("grad_norm", rank_a, None, None, COLUMNS), b.table("grad_norm", rank_b, None, None, COLUMNS)
    at_b = {layer.name: i for i, layer in enumerate(b.layers)}
    common = [(layer.name, i, at_b[layer.name]) for i, layer in enumerate(a.layers) if layer.name in at_b]
    if not common or len(left.edges) < 2 or len(right.edges) < 2:
        return Ratio(b.key, [], np.zeros(0))
    start = left.edges[:-1]
    column = np.searchsorted(right.edges, start, "right") - 1
    both = (column >= 0) & (column < len(right.edges) - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        x = left.high[both][:, [i for _, i, _ in common]].astype(np.float64)
        y = right.high[column[both]][:, [j for _, _, j in common]].astype(np.float64)
        logs = np.log2(y / x)
    logs[~np.isfinite(logs)] = np.nan
    known = np.isfinite(logs).any(0)
    out = np.full(len(common), np.nan)
    if known.any():
        out[known] = np.nanmedian(logs[:, known], axis=0)
    return Ratio(b.key, [name for name, _, _ in common], out)


def _median(source: Source, rank: int, name: str) -> float:
    values = source.values(name, rank)
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else math.nan


def _peak(source: Source, rank: int) -> float:
    values = source.values("peak_memory_bytes", rank)
    values = values[np.isfinite(values)]
    return float(values.max()) if len(values) else math.nan


def _table(sources: list[tuple[Source, int]]) -> list[tuple[str, list[str]]]:
    def row(name: str, value: Any) -> tuple[str, list[str]]:
        return name, [value(s, r) for s, r in sources]

    def span(s: Source, r: int) -> str:
        times = s.values("time", r)
        times = times[np.isfinite(times)]
        return duration(float(times[-1] - times[0])) if len(times) > 1 else "unknown"

    def skipped(s: Source, r: int) -> str:
        n = int(np.nansum(s.values("skipped", r)))
        return f"{n:,} ({percent(n / len(s.steps))})"

    def seconds(s: Source, r: int) -> str:
        value = _median(s, r, "step_seconds")
        return f"{number(1e3 * value, 3)} ms" if math.isfinite(value) else "unknown"

    return [
        row("steps", lambda s, _: f"{len(s.steps):,}"),
        row("time", span),
        row("step time (median)", seconds),
        row("peak memory", lambda s, r: size(_peak(s, r))),
        row("last loss", lambda s, r: number(latest(s.values("loss", r)))),
        row("last loss scale", lambda s, r: power(latest(s.values("loss_scale", r)))),
        row("skipped", skipped),
        row("underflow (median)", lambda s, r: percent(_median(s, r, "underflow_ratio"))),
        row("device", lambda s, _: str(s.run.metadata.get("device_name") or s.run.metadata.get("device") or "unknown")),
    ]


def _words(sources: list[tuple[Source, int]]) -> list[str]:
    """Return what the others gained over the first run."""
    if len(sources) < 2:
        return ["Choose a second run to compare." if sources else "Choose runs to compare."]
    words = []
    base, rank = sources[0]
    slow, large = _median(base, rank, "step_seconds"), _peak(base, rank)
    for other, r in sources[1:]:
        parts = []
        fast, small = _median(other, r, "step_seconds"), _peak(other, r)
        if slow > 0 and fast > 0:
            parts.append(f"{number(slow / fast, 3)} times the speed")
        if large > 0 and small > 0:
            parts.append(f"{number(100 * small / large, 3)} % of the memory")
        words.append(
            f"{other.key} has {' and '.join(parts)} of {base.key}."
            if parts
            else f"{other.key}: speed and memory are unknown."
        )
    return words
