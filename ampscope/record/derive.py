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


def flushed_below(exponents: Array, exact: Array, shift: Array | int, limit: int = -25) -> Array:
    """Count elements with |g_s| * 2^shift <= 2^limit (they become zero under round-to-nearest-even where 2^limit is half the smallest subnormal).

    Args:
        exponents, exact: int64 [L, BINS] histogram and exact powers.
        shift: power of two the elements are multiplied by.
        limit: exponent of the flush limit; -25 for FP16.

    Returns:
        int64 [L].
    """
    edge = int(np.clip(BIAS + limit - int(shift), -1, BINS - 2))
    if edge < 0:
        return np.zeros(exponents.shape[:-1], np.int64)
    below = exponents[..., :edge].sum(-1)
    return np.asarray(below + (exact[..., edge] if edge > 0 else 0), np.int64)


def compact(stats: LayerStats, loss_scale: float) -> dict[str, Array]:
    """Return the per-layer columns the log keeps of one step's statistics, [L] each (histograms excepted)."""
    e = stats.exponents
    total = e.sum(-1)
    below_half = np.cumsum(e, -1)
    median = (below_half >= (total[:, None] + 1) // 2).argmax(-1)
    if loss_scale > 0 and np.isfinite(loss_scale):
        # Judged at the power of two at or below the scale: g <= 2^-25 means g_s <= 2^-25 * S.
        unscaled = flushed_below(e, stats.exact, -int(np.floor(np.log2(loss_scale))))
    else:
        unscaled = np.zeros(len(e), np.int64)
    return {
        "state": stats.state,
        "zeros": stats.zeros,
        "nan": stats.nan,
        "pos_inf": stats.pos_inf,
        "neg_inf": stats.neg_inf,
        "subnormal": e[:, :NORMAL].sum(-1),
        "low_octave": e[:, NORMAL],
        "lowest": e[:, : SMALLEST + 1].sum(-1),
        "below_grid": e[:, :SMALLEST].sum(-1),
        "below_unscaled": unscaled,
        "max_abs": np.minimum(stats.max_abs, np.finfo(np.float32).max).astype(np.float32),
        "sum_squares": stats.sum_squares,
        "low_bits": stats.low_bits,
        "zero_rows": stats.zero_rows.astype(np.int32),
        "zero_cols": stats.zero_cols.astype(np.int32),
        "median_bin": np.where(total > 0, median, 0).astype(np.uint8),
    }


def totals(columns: dict[str, Array], numel: Array, loss_scale: float, flushed: Array) -> dict[str, float]:
    """Return the run-wide scalars of one step from its compact columns and the flushed share a layer; NaN where nothing was measured."""
    on = columns["state"] == MEASURED
    nan = float("nan")
    if not on.any():
        return dict.fromkeys(("grad_norm", "headroom_bits", "zero_ratio", "nonfinite_layers", "underflow_ratio"), nan)
    elements = max(int(numel[on].sum()), 1)
    infinite = columns["pos_inf"] + columns["neg_inf"]
    bad = (columns["nan"] + infinite)[on] > 0
    largest = columns["max_abs"][on].astype(np.float64)
    largest = np.where(infinite[on] > 0, np.inf, largest)
    largest = largest[~np.isnan(largest)]
    lost = flushed[on] * numel[on]
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return {
            "grad_norm": float(np.sqrt(columns["sum_squares"][on].sum()) / np.float64(loss_scale)),
            "headroom_bits": float(np.log2(FP16_MAX / largest.max())) if len(largest) else nan,
            "zero_ratio": float(columns["zeros"][on].sum() / elements),
            "nonfinite_layers": float(bad.sum()),
            "underflow_ratio": float(lost.sum() / elements),
        }
