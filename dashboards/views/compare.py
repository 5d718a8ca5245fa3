"""Runs side by side: curves on a common axis, and the numbers of `ampscope compare`: a table, and gradient norm ratios."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ampscope.analysis.compare import Comparison as Pair
from ampscope.analysis.compare import Side
from ampscope.analysis.compare import compare as compare_pair

from ..source import Source
from .common import Curve, curve, duration, number, percent, power, size
from .overview import latest

Array = np.ndarray[Any, Any]
Align = Literal["step", "relative", "wall"]

MOST = 6
"""Runs compared at once: as many as there are colours that can be told apart."""
SAME = 0.02
"""Step times within this share count as alike, as in `ampscope compare`."""


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
    base = sources[0][0] if sources else None
    pairs = [pair_of(base, other) for other, _ in sources[1:]] if base is not None else []
    ratios = [_ratio(other.key, pair) for (other, _), pair in zip(sources[1:], pairs, strict=True)]
    sides = [pairs[0].a, *[pair.b for pair in pairs]] if pairs else [pair_of(s, s).a for s, _ in sources]
    words = _words(sources, pairs)
    return Comparison(curves, align, _table(sources, sides), [r for r in ratios if r.layers], words)


def pair_of(base: Source, other: Source) -> Pair:
    """Return what `ampscope compare` says of two runs, kept until one of them grows."""
    key = ("compare", base.key, base.revision)
    return other.cached(key, lambda: compare_pair(base.run, other.run))


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


def _ratio(name: str, pair: Pair) -> Ratio:
    if not pair.compared_steps:
        return Ratio(name, [], np.zeros(0))
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log2(pair.grad_norm_ratio)
    return Ratio(name, list(pair.layers), np.where(np.isfinite(logs), logs, np.nan))


def _median(source: Source, rank: int, name: str) -> float:
    values = source.values(name, rank)
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else math.nan


def _table(sources: list[tuple[Source, int]], sides: list[Side]) -> list[tuple[str, list[str]]]:
    def of_side(name: str, value: Any) -> tuple[str, list[str]]:
        return name, [value(side) for side in sides]

    def row(name: str, value: Any) -> tuple[str, list[str]]:
        return name, [value(s, r) for s, r in sources]

    def span(s: Source, r: int) -> str:
        times = s.values("time", r)
        times = times[np.isfinite(times)]
        return duration(float(times[-1] - times[0])) if len(times) > 1 else "unknown"

    def seconds(side: Side) -> str:
        return f"{number(1e3 * side.step_seconds, 3)} ms" if math.isfinite(side.step_seconds) else "unknown"

    return [
        of_side("precision", lambda side: side.precision),
        of_side("steps", lambda side: f"{side.steps:,}"),
        row("time", span),
        of_side("step time (median)", seconds),
        of_side("peak memory", lambda side: size(side.peak_memory_bytes)),
        of_side("final loss", lambda side: number(side.final_loss)),
        of_side("skipped steps", lambda side: f"{side.skipped:,} ({percent(side.skipped / max(side.steps, 1))})"),
        row("last loss scale", lambda s, r: power(latest(s.values("loss_scale", r)))),
        row("underflow (median)", lambda s, r: percent(_median(s, r, "underflow_ratio"))),
        of_side("device", lambda side: side.device or "unknown"),
    ]


def _words(sources: list[tuple[Source, int]], pairs: list[Pair]) -> list[str]:
    """Return what the others gained over the first run."""
    if not pairs:
        return ["Choose a second run to compare." if sources else "Choose runs to compare."]
    base = sources[0][0].key
    return [f"{other.key}: {_gain(pair, base)}." for (other, _), pair in zip(sources[1:], pairs, strict=True)]


def _gain(pair: Pair, base: str) -> str:
    speed, memory = pair.speed, pair.memory
    if not math.isfinite(speed) or speed <= 0:
        said = "speed unknown"
    elif abs(math.log(speed)) < SAME:
        said = f"as fast as {base}"
    else:
        said = f"{speed:.2f}× faster than {base}" if speed > 1 else f"{1 / speed:.2f}× slower than {base}"
    return f"{said}, with {memory:.2f}× its peak memory" if math.isfinite(memory) else f"{said}; peak memory unknown"
