"""The first screen: a few numbers, and the curves that say whether the training is healthy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..source import Source
from . import marks as mark_view
from .common import Curve, Range, curve, number, percent, power


@dataclass(frozen=True)
class Tile:
    """A number that stands by itself: what it is, its value, one line on how to read it."""

    label: str
    value: str
    hint: str


@dataclass(frozen=True)
class Overview:
    """Everything the overview draws, in steps."""

    scale: Curve
    loss: Curve
    grad_norm: Curve
    underflow: Curve
    underflow_low: Curve
    underflow_high: Curve
    measured: Curve
    step_seconds: Curve
    marks: mark_view.Marks
    sessions: list[tuple[float, str]]
    span: Range
    last_step: int
    reading: float
    """Share of the run read so far for the underflow band, 0..1."""


def overview(source: Source, rank: int, span: Range) -> Overview:
    """Return the curves of a run over a range of steps, decimated to what a screen shows."""

    def line(name: str, nan_is_bad: bool = False, points: int = 2000) -> Curve:
        x, y = source.line(name, rank, span.low, span.high, points)
        return curve(x, y, nan_is_bad)

    reading = source.ensure("underflow", rank)
    source.ensure("measured", rank)
    low, high = band(source, rank, span)
    measured = line("underflow_ratio_measured")
    known = np.isfinite(measured.y)
    return Overview(
        scale=line("loss_scale"),
        loss=line("loss", nan_is_bad=True),
        grad_norm=_norm(source, rank, line("grad_norm")),
        underflow=line("underflow_ratio"),
        underflow_low=low,
        underflow_high=high,
        measured=Curve(measured.x[known], measured.y[known], measured.bad_x, measured.bad_kind),
        step_seconds=line("step_seconds"),
        marks=mark_view.marks(source, rank, span),
        sessions=sessions(source),
        span=span,
        last_step=int(source.steps[-1]) if len(source.steps) else -1,
        reading=reading,
    )


def _norm(source: Source, rank: int, c: Curve) -> Curve:
    """Return the gradient norm without the zeros of steps in which no element was finite: those are no zero."""
    bad = source.values("nonfinite_layers", rank)[np.searchsorted(source.steps, c.x)] > 0
    return Curve(c.x, np.where(bad & (c.y == 0), np.nan, c.y), c.bad_x, c.bad_kind)


def band(source: Source, rank: int, span: Range) -> tuple[Curve, Curve]:
    """Return the lower and the upper bound of the underflow over all elements, at the same steps."""
    x, upper = source.line("underflow_ratio_high", rank, span.low, span.high, 1000)
    lower = source.values("underflow_ratio_low", rank)[np.searchsorted(source.steps, x)]
    both = np.isfinite(lower) & np.isfinite(upper)
    return curve(x[both], lower[both]), curve(x[both], upper[both])


def sessions(source: Source) -> list[tuple[float, str]]:
    """Return where each session after the first begins, and its name."""
    return [
        (float(s.first_step), f"session {s.index}") for s in source.run.sessions if s.index > 0 and s.first_step >= 0
    ]


def tiles(source: Source, rank: int) -> list[Tile]:
    """Return the numbers at the head of the page, of the whole run."""
    if not len(source.steps):
        return []
    skipped = source.values("skipped", rank)
    n_skipped, n = int(np.nansum(skipped)), int(np.isfinite(source.values("time", rank)).sum())
    scale = latest(source.values("loss_scale", rank))
    underflow = source.values("underflow_ratio", rank)[-1000:]
    headroom = latest(source.values("headroom_bits", rank))
    seconds = source.values("step_seconds", rank)[-1000:]
    overhead = source.values("overhead_seconds", rank)[-1000:]
    cost = _median(overhead) / _median(seconds) if _median(seconds) > 0 else math.nan
    return [
        Tile("Steps", f"{n:,}", f"the last is {int(source.steps[-1]):,}"),
        Tile("Skipped", f"{n_skipped:,}", f"{percent(n_skipped / n)} of all steps" if n else ""),
        Tile("Loss scale", power(scale), "what the newest gradients are multiplied by"),
        Tile("Underflow", percent(_median(underflow)), "flushed to zero, median of the last 1,000 steps"),
        Tile("Headroom", headroom_text(headroom), "doublings of the scale left before overflow"),
        Tile("Step time", f"{number(_median(seconds) * 1e3, 3)} ms", f"of it {percent(cost)} is ampscope"),
    ]


def headroom_text(bits: float) -> str:
    """Return headroom in words."""
    if math.isnan(bits):
        return "unknown"
    return "no limit" if math.isinf(bits) else f"{bits:.1f} bits"


def latest(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Return the newest value that was recorded, NaN if none was."""
    known = np.flatnonzero(~np.isnan(values))
    return float(values[known[-1]]) if len(known) else math.nan


def _median(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan
