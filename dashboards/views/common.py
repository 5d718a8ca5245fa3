"""What several views need: series with their non-finite values kept apart, numbers as text, marks of events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..decimate import bucket_edges

Array = np.ndarray[Any, Any]

MARKS = 300
"""Marks of non-finite values kept a series: more could not be told apart on a screen."""


@dataclass(frozen=True)
class Range:
    """Steps a viewer zoomed to; None for no end."""

    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, pair: Sequence[Any] | None) -> Range:
        """Return the range of a pair from a browser; anything else is the whole run."""
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(v, (int, float)) for v in pair):
            return cls()
        low, high = float(pair[0]), float(pair[1])
        return cls(low, high) if math.isfinite(low) and math.isfinite(high) and low < high else cls()

    @property
    def pair(self) -> list[float] | None:
        """[low, high], or None for the whole run."""
        return None if self.low is None or self.high is None else [self.low, self.high]


@dataclass(frozen=True)
class Curve:
    """A line to draw: `x` int64 [n], `y` float64 [n] (NaN: a gap); where the value was not finite `bad_x`, and what it was."""

    x: Array
    y: Array
    bad_x: Array
    bad_kind: list[str]


def curve(x: Array, y: Array, nan_is_bad: bool = False) -> Curve:
    """Return a curve.

    Args:
        x: steps, [n].
        y: values, [n].
        nan_is_bad: whether NaN is a value that was seen (a loss) rather than "not recorded".
    """
    bad = np.isinf(y) | (np.isnan(y) & nan_is_bad & bool(np.isfinite(y).any() or np.isinf(y).any()))
    rows = np.flatnonzero(bad)
    if len(rows) > MARKS:
        rows = rows[np.unique(np.concatenate([bucket_edges(len(rows), MARKS)[:-1], [len(rows) - 1]]))]
    kinds = ["nan" if np.isnan(y[r]) else "+inf" if y[r] > 0 else "-inf" for r in rows.tolist()]
    return Curve(x, np.where(np.isfinite(y), y, np.nan), x[rows], kinds)


def power(value: float) -> str:
    """Return a loss scale as people say it: "2^16" for a power of two, else its significant digits."""
    if math.isfinite(value) and value > 0 and math.log2(value).is_integer():
        return f"2^{int(math.log2(value))}"
    return number(value)


def number(value: float, digits: int = 4) -> str:
    """Return significant digits; integers with thousands separated."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "−inf"
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def percent(share: float) -> str:
    """Return a share as a percentage with two significant digits; what is not zero is never shown as zero."""
    if not math.isfinite(share):
        return "unknown"
    value = 100 * share
    if value == 0:
        return "0 %"
    if value < 0.01:
        return "below 0.01 %"
    return f"{value:.0f} %" if value >= 99.5 else f"{value:.2g} %"


def duration(seconds: float) -> str:
    """Return a span of time in words: "3 s", "5 min", "2 h", "4 days"."""
    if not math.isfinite(seconds):
        return "an unknown time"
    if 0 < seconds < 1:
        return f"{seconds:.2g} s"
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (129_600, 3600, "h")):
        if seconds < limit:
            return f"{max(0, round(seconds / unit))} {name}"
    return f"{round(seconds / 86_400)} days"


def size(count: float) -> str:
    """Return bytes as "1.2 GiB"."""
    if not math.isfinite(count):
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
