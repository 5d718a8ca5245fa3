"""Fewer points for the same picture: min, max and last of each bucket, so that no spike is lost."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

POINTS = 2000
"""Points sent for a line: more than a screen has columns, few enough for SVG."""


def bucket_edges(n: int, buckets: int) -> Array:
    """Return int64 [b + 1] row numbers that cut `n` rows into `b = min(n, buckets)` runs of nearly equal length."""
    b = max(1, min(n, buckets))
    return (np.arange(b + 1, dtype=np.int64) * n) // b


def extremes(values: Array, edges: Array) -> tuple[Array, Array]:
    """Return the rows of the smallest and the largest finite value of each bucket.

    Args:
        values: float [n], may hold NaN and inf.
        edges: int64 [b + 1], increasing, last one = n.

    Returns:
        two int64 [b]; -1 where a bucket holds no finite value.
    """
    finite = np.isfinite(values)
    starts = edges[:-1]
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    bucket = np.repeat(np.arange(len(starts)), np.diff(edges))
    return first_hit(finite & (values == low[bucket]), starts), first_hit(finite & (values == high[bucket]), starts)


def first_hit(hit: Array, starts: Array) -> Array:
    """Return the row of the first hit of each bucket, -1 where there is none."""
    n = len(hit)
    rows = np.minimum.reduceat(np.where(hit, np.arange(n), n), starts)
    return np.where(rows < n, rows, -1)


def pick(values: Array, points: int = POINTS) -> Array:
    """Return the rows to draw of a line: all if there are few, else min, max and last of each bucket.

    The first row is always among them; where a bucket holds no finite value its last row stands for it, so that a gap
    stays a gap.

    Args:
        values: float [n].
        points: about how many rows to keep.

    Returns:
        int64 [m], increasing, without repeats, m <= max(points, 4).
    """
    n = len(values)
    if n <= points:
        return np.arange(n, dtype=np.int64)
    edges = bucket_edges(n, max(1, points // 4))
    low, high = extremes(values, edges)
    gap = first_hit(~np.isfinite(values), edges[:-1])
    rows = np.unique(np.concatenate([[0], low, high, gap, edges[1:] - 1]))
    return np.asarray(rows[rows >= 0], np.int64)


def window(steps: Array, low: float | None, high: float | None) -> slice:
    """Return the rows whose step lies in [low, high], with one row more on either side so that lines reach the edge.

    Args:
        steps: int64 [n], increasing.
        low, high: ends of the range; None for no end.
    """
    start = 0 if low is None else max(0, int(np.searchsorted(steps, low, "left")) - 1)
    stop = len(steps) if high is None else min(len(steps), int(np.searchsorted(steps, high, "right")) + 1)
    return slice(min(start, stop), stop)
