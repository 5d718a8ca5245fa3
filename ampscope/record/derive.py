"""Derived layer metrics: pure NumPy functions on counts. Arrays are [..., L]; formulas are those of design.md §3 (docs/underflow.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ampscope.record.step import BINS, MEASURED, Bins, LayerStats

Array = np.ndarray[Any, Any]

BIAS = 127
FP16_MAX = 65504.0
NORMAL = BIAS - 14
"""Histogram bin of FP16's smallest normal, 2^-14."""
SMALLEST = BIAS - 24
"""Histogram bin of FP16's smallest subnormal, 2^-24."""


def compact(stats: LayerStats, loss_scale: float) -> dict[str, Array]:
    """Return the per-layer columns the log keeps of one step's statistics, [L] each (histograms excepted).

    None keeps the histograms alive: rows wait for the next flush.
    """
    below = _Below(stats.bins())
    unscaled = np.zeros(len(stats.state), np.int64)
    if loss_scale > 0 and np.isfinite(loss_scale):
        # Judged at the power of two at or below the scale: g <= 2^-25 means g_s <= 2^-25 * S.
        edge = int(np.clip(BIAS - 25 + int(np.floor(np.log2(loss_scale))), 0, BINS - 2))
        if edge > 0:
            unscaled = below(edge) + below.exactly(edge)
    return {
        "state": stats.state,
        "zeros": stats.zeros,
        "nan": stats.nan,
        "pos_inf": stats.pos_inf,
        "neg_inf": stats.neg_inf,
        "subnormal": below(NORMAL),
        "low_octave": below(NORMAL + 1) - below(NORMAL),
        "lowest": below(SMALLEST + 1),
        "below_grid": below(SMALLEST),
        "below_unscaled": unscaled,
        "max_abs": np.minimum(stats.max_abs, np.finfo(np.float32).max).astype(np.float32),
        "sum_squares": stats.sum_squares,
        "low_bits": stats.low_bits,
        "zero_rows": stats.zero_rows.astype(np.int32),
        "zero_cols": stats.zero_cols.astype(np.int32),
        "median_bin": below.median(),
    }


class _Below:
    """Counts of elements below a bin."""

    def __init__(self, bins: Bins) -> None:
        self._bins = bins
        self._end = np.cumsum(bins.length)
        self._start = self._end - bins.length
        self._sums = np.concatenate([[0], np.cumsum(bins.exponents)])

    def __call__(self, edge: int) -> Array:
        """Return int64 [L], elements in bins below `edge`."""
        upto = self._start + np.minimum(np.maximum(edge - self._bins.first, 0), self._bins.length)
        return np.asarray(self._sums[upto] - self._sums[self._start], np.int64)

    def exactly(self, edge: int) -> Array:
        """Return int64 [L], elements that are exactly the least of bin `edge`."""
        at = edge - self._bins.first
        out = np.zeros(len(at), np.int64)
        there = (at >= 0) & (at < self._bins.length)
        out[there] = self._bins.exact[(self._start + at)[there]]
        return out

    def median(self) -> Array:
        """Return uint8 [L], the bin of the median element (the lower one of two), 0 where there is none."""
        total = self._sums[self._end] - self._sums[self._start]
        found = np.searchsorted(self._sums, self._sums[self._start] + (total + 1) // 2) - 1 - self._start
        return np.where(total > 0, found + self._bins.first, 0).astype(np.uint8)


def totals(columns: dict[str, Array], numel: Array, loss_scale: Array, flushed: Array) -> dict[str, Array]:
    """Return the run-wide scalars of T steps, float64 [T] each; NaN where nothing was measured.

    Args:
        columns: compact columns, [T, L].
        numel: elements of a layer, [L].
        loss_scale: of the step, [T].
        flushed: free estimate of the share flushed, [T, L].
    """
    on = columns["state"] == MEASURED
    nothing = ~on.any(1)
    elements = np.maximum((on * numel).sum(1), 1)
    infinite = (columns["pos_inf"] + columns["neg_inf"]) * on
    largest = np.where(on & ~np.isnan(columns["max_abs"]), columns["max_abs"].astype(np.float64), -1.0)
    largest = np.where(infinite > 0, np.inf, largest).max(1, initial=-1.0)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        found = {
            "grad_norm": np.sqrt((columns["sum_squares"] * on).sum(1)) / loss_scale,
            "headroom_bits": np.where(largest >= 0, np.log2(FP16_MAX / np.maximum(largest, 0)), np.nan),
            "zero_ratio": (columns["zeros"] * on).sum(1) / elements,
            "nonfinite_layers": (on & (columns["nan"] + infinite > 0)).sum(1).astype(np.float64),
            "underflow_ratio": (flushed * on * numel).sum(1) / elements,
        }
    return {name: np.where(nothing, np.nan, values) for name, values in found.items()}
