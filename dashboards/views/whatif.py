"""What another format or loss scale would do, and what other scaler settings would have done."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ampscope.analysis import shares
from ampscope.analysis.formats import find
from ampscope.analysis.policy import simulate
from ampscope.analysis.replay import TOO_MUCH
from ampscope.analysis.whatif import Collected, WhatIf, evaluate
from ampscope.analysis.window import windows

from ..background import Prepared
from ..decimate import pick
from ..source import Source
from .common import Range, duration, percent, power

Array = np.ndarray[Any, Any]

LOW, HIGH = -8, 32
"""Exponents of the scales on the slider."""
LAYERS = 60


@dataclass(frozen=True)
class Row:
    """One layer at the chosen scale: shares of its elements, and its window of good scales as exponents (NaN: none)."""

    name: str
    flushed: float
    subnormal: float
    overflow: float
    low: float
    high: float


@dataclass(frozen=True)
class Sweep:
    """The what-if chart. `exponents` [E] of the scales; `flushed`, `overflow` [E] shares of all elements."""

    format: str
    exponent: int
    recorded: tuple[float, float]
    """Exponents of the least and the greatest scale recorded."""
    exponents: Array
    flushed: Array
    overflow: Array
    at: tuple[float, float, float]
    """Flushed, subnormal and overflowing share of all elements at the chosen scale."""
    window: tuple[float, float] | None
    """Exponents between which every layer is well."""
    rows: list[Row]
    left_out: int
    words: list[str]
    assumptions: list[str]


def curves(collected: Collected, name: str) -> tuple[Array, Array, Array]:
    """Return (exponents, flushed, overflowing) of a format over the slider's scales: shares of all elements, [E]."""
    form, t = find(name), collected.tally
    exponents = np.arange(LOW, HIGH + 1)
    n = max(1.0, float(t.elements.sum()))
    lost, over = np.zeros(len(exponents)), np.zeros(len(exponents))
    for i, k in enumerate(exponents.tolist()):
        scale = 2.0**k
        lost[i] = (shares.flushed(t, form, scale).value + shares.already(t, form, scale)[0]).sum() / n
        over[i] = shares.overflowing(t, form, scale).value.sum() / n
    return exponents, lost, over


def sweep(source: Source, rank: int, collected: Collected, name: str, exponent: int) -> Sweep:
    """Return the what-if chart at a scale of 2^exponent."""
    found: WhatIf = source.cached(("whatif", name, exponent), lambda: evaluate(collected, name, 2.0**exponent))
    exponents, flushed, overflow = source.cached(("sweep", name), lambda: curves(collected, name))
    low, high = source.cached(("windows", name), lambda: windows(collected.tally, find(name), found.share))
    scale = source.values("loss_scale", rank)
    scale = np.log2(scale[np.isfinite(scale) & (scale > 0)])
    elements = np.nan_to_num(found.elements.astype(np.float64))
    n = max(1.0, float(elements.sum()))
    lost = np.nan_to_num(found.underflow_ratio + found.already_flushed_ratio)
    weak, over = np.nan_to_num(found.subnormal_ratio_high), np.nan_to_num(found.overflow_ratio_high)
    with np.errstate(divide="ignore", invalid="ignore"):
        ends = np.log2(low), np.log2(high)
    every = [
        Row(layer, float(a), float(b), float(c), float(d), float(e))
        for layer, a, b, c, d, e in zip(found.layers, lost, weak, over, *ends, strict=True)
    ]
    every.sort(key=lambda r: (-(r.flushed + r.overflow), _width(r)))
    window = None if found.window is None else (math.log2(found.window[0]), math.log2(found.window[1]))
    at = (float((lost * elements).sum() / n), float((weak * elements).sum() / n), float((over * elements).sum() / n))
    return Sweep(
        found.format, exponent, (float(scale.min()), float(scale.max())) if len(scale) else (math.nan, math.nan), exponents,
        flushed, overflow, at, window, every[:LAYERS], max(0, len(every) - LAYERS), _words(found, at), list(found.assumptions),
    )  # fmt: skip


def _width(row: Row) -> float:
    width = row.high - row.low
    return width if math.isfinite(width) else -1.0


def _words(found: WhatIf, at: tuple[float, float, float]) -> list[str]:
    words = [
        f"{found.format.upper()} at {power(found.scale)}: {percent(at[0])} of the elements flushed to zero, {percent(at[1])} "
        f"kept with fewer bits, {percent(at[2])} overflowing, over {len(found.steps):,} steps."
    ]
    if found.window is not None:
        words.append(
            f"Good for every layer: {power(found.window[0])} to {power(found.window[1])} "
            f"(no overflow, at most {percent(found.share)} flushed)."
        )
    return [*words, *found.advice]


@dataclass(frozen=True)
class ReplayView:
    """A replay over a range of steps: recorded and replayed scale, decimated; steps that were skipped in each."""

    x: Array
    recorded: Array
    x_replayed: Array
    replayed: Array
    recorded_skips: Array
    replayed_skips: Array
    span: Range
    words: list[str]
    assumptions: list[str]


MARKS = 400


def replay(prepared: Prepared, override: dict[str, Any], span: Range) -> ReplayView:
    """Return a replay with some settings replaced.

    Args:
        prepared: of the run.
        override: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`; those left out are the recorded ones.
        span: range of steps to draw; the words are of the whole run.
    """
    record, found = prepared.record, prepared.found
    out = simulate(found.limit, record, override)
    wasted = prepared.cost.of(out)
    too_low = ~out.skipped & (wasted > TOO_MUCH)
    steps = prepared.steps
    inside = np.ones(len(steps), bool)
    if span.low is not None and span.high is not None:
        inside = (steps >= span.low) & (steps <= span.high)
    x, a, b = steps[inside], record.scale[inside], out.loss_scale[inside]
    rows, rows_b = pick(a), pick(b)
    return ReplayView(
        x[rows], a[rows], x[rows_b], b[rows_b], _few(steps[inside & record.skipped]), _few(steps[inside & out.skipped]), span,
        _told(prepared, override, out, too_low), _assumed(prepared),
    )  # fmt: skip


def _few(x: Array) -> Array:
    return x if len(x) <= MARKS else x[np.linspace(0, len(x) - 1, MARKS).astype(int)]


def _told(p: Prepared, override: dict[str, Any], out: Any, too_low: Array) -> list[str]:
    before, after = int(p.record.skipped.sum()), int(out.skipped.sum())
    words = [
        f"Skipped steps: {before:,} recorded, {after:,} replayed. Too low a scale in {int(too_low.sum()):,} steps "
        f"({duration(float(p.seconds[too_low].sum()))}); {duration(float(p.seconds[out.skipped].sum()))} spent on skipped steps."
    ]
    if not override:
        same = np.array_equal(out.loss_scale, p.record.scale) and np.array_equal(out.skipped, p.record.skipped)
        words.append("These are the run's own settings; the replay gives the recorded curve." if same else
                     "These are the run's own settings; the replay differs from the record where something else set the scale.")  # fmt: skip
    if p.best is not None:
        b = p.best
        words.append(
            f"Least waste of those tried: init_scale={power(b.init_scale)}, growth_interval={b.growth_interval:,}, "
            f"with {p.best_skipped:,} step{'' if p.best_skipped == 1 else 's'} skipped."
        )
    return words


def _assumed(p: Prepared) -> list[str]:
    hopeless = int(p.found.hopeless.sum())
    said = [
        "Training is taken to have gone as recorded: the same gradients come at every step, whatever was skipped.",
        "A step that was finite is finite at every smaller scale.",
    ]
    if hopeless:
        said.append(f"{hopeless:,} skipped steps are taken to be non-finite at any scale.")
    return said
