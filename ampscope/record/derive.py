"""Derived layer metrics: pure NumPy functions on counts. Arrays are [..., L]; formulas are those of design.md §3 (docs/underflow.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ampscope.record.step import BINS, MEASURED, LayerStats

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
    below = _Below(stats.exponents)
    if loss_scale > 0 and np.isfinite(loss_scale):
        # Judged at the power of two at or below the scale: g <= 2^-25 means g_s <= 2^-25 * S.
        edge = int(np.clip(BIAS - 25 + int(np.floor(np.log2(loss_scale))), -1, BINS - 2))
        unscaled = below(edge) + stats.exact[:, edge] if edge > 0 else below(edge)
    else:
        unscaled = below(0)
    return {
        "state": stats.state,
        "zeros": stats.zeros,
        "nan": stats.nan,
        "pos_inf": stats.pos_inf,
        "neg_inf": stats.neg_inf,
        "subnormal": below(NORMAL),
        "low_octave": stats.exponents[:, NORMAL].copy(),
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
    """Counts of elements below a bin, of [L, BINS] histograms: one pass over the bins that are used."""

    def __init__(self, exponents: Array) -> None:
        used = np.flatnonzero(np.bitwise_or.reduce(exponents, axis=0)) if len(exponents) else np.zeros(0, np.int64)
        self._first, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
        self._sums = np.cumsum(exponents[:, self._first : end], axis=1)

    def __call__(self, edge: int) -> Array:
        """Return int64 [L], elements in bins below `edge`."""
        at = min(edge - self._first, self._sums.shape[1])
        return self._sums[:, at - 1].copy() if at > 0 else np.zeros(len(self._sums), np.int64)

    def median(self) -> Array:
        """Return uint8 [L], the bin of the median element (the lower one of two), 0 where there is none."""
        total = self._sums[:, -1:]
        found = (self._sums >= (total + 1) // 2).argmax(1) + self._first
        return np.where(total[:, 0] > 0, found, 0).astype(np.uint8)


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
