"""The free estimate of the share flushed to zero in FP16, with bounds. docs/underflow.md says what each rests on, and how right it is.

Zeros of a gradient have two causes. *Natural* ones are zero in FP32 too: an input feature that is zero for the whole batch empties a
column, a dead unit empties a row (and the column of the layer that reads it), rows of a table that were not looked up are empty.
*Flushed* ones were rounded away, in the gradient itself or in the flow on its way back. Where something was flushed, survivors crowd on
the lowest step of FP16's grid, 2^-24; how many of them do (the *crowd*) judges every kind of zero, each by its own measure.
The constants were fitted on 34 small models and checked on others (benchmarks/underflow_heldout.py). What earlier steps tell: history.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ampscope.record.context import Context
from ampscope.record.step import MEASURED

__all__ = ["COLUMNS", "Context", "estimate"]

Array = np.ndarray[Any, Any]
Found = tuple[Array, Array, Array]
"""(estimate, low, high)."""

COLUMNS = (
    "state", "zeros", "nan", "pos_inf", "neg_inf", "low_bits", "lowest", "below_grid", "median_bin", "zero_rows", "zero_cols",
)  # fmt: skip
"""Columns of the log the estimate rests on."""

HALF_BITS = 0x1FFF
"""Mantissa bits that FP16 has not: all clear in a gradient that passed through it."""
OFF_GRID, OFF_GRID_MEANS = 0.1, 0.75
"""Share of the smallest survivors that lie below 2^-24, from which a gradient did not pass through FP16 (a mean over ranks: half do)."""
NONE = -40.0
"""Median exponent of a gradient without survivors."""
FREE = -5.0
"""Median exponent taken for a neighbour that there is not, or that is not on the grid: far from it."""
DEAD_SCALE = 2.0**20
"""Where every gradient is empty: below this scale they were flushed (no loss is that small at a larger one), above it the loss is dead."""
CELLS = 1 << 14
"""Elements of the [T, L] tables worked on at a time: they stay in the processor's cache."""


def estimate(
    columns: dict[str, Array],
    context: Context,
    scale: Array | float = 1.0,
    loss: Array | float = 1.0,
    micro_steps: Array | float = 1.0,
) -> Found:
    """Return (estimate, low, high): share of elements flushed to zero at the scale used, float32, in the columns' shape.

    Each step is judged by itself. low <= estimate <= high, and high is at most the share of zeros (but for rounding).

    Args:
        columns: `COLUMNS` of the log, [L] or [T, L].
        context: of the same L layers.
        scale, loss, micro_steps: of the step, scalar or [T].
    """
    shape = np.asarray(columns["zeros"]).shape
    table = {name: np.atleast_2d(columns[name]) for name in COLUMNS}
    steps, layers = table["zeros"].shape
    out = tuple(np.zeros((steps, layers), np.float32) for _ in range(3))
    per_step = [np.broadcast_to(np.atleast_1d(np.asarray(v, np.float64)), (steps,)) for v in (scale, loss, micro_steps)]
    at_once = max(1, CELLS // max(layers, 1))
    for start in range(0, steps if layers else 0, at_once):
        rows = slice(start, start + at_once)
        if table["zeros"][rows].any():
            found = _estimate(
                _Seen.of({k: v[rows] for k, v in table.items()}, context, *(v[rows, None] for v in per_step)), context
            )
            for whole, part in zip(out, found, strict=True):
                whole[rows] = part
    return out[0].reshape(shape), out[1].reshape(shape), out[2].reshape(shape)


@dataclass(frozen=True)
class _Seen:
    """What the counts say of each gradient; float32 or bool [T, L]. Shares are of its elements."""

    measured: Array
    alive: Array
    """Has survivors: finite elements that are not zero."""
    empty: Array
    """Zeros only."""
    silent: Array
    """bool [T, 1]: no gradient of the step has a survivor."""
    dead: Array
    """bool [T, 1]: if so, by itself and not flushed."""
    zeros: Array
    lowest: Array
    """Survivors on the lowest step of the grid."""
    one: Array
    """Share of one element."""
    on_grid: Array
    """Passed through FP16 last."""
    near_grid: Array
    """Does not lie off the grid: in FP32, but computed from a flow that may have been flushed."""
    crowd: Array
    """Share of the survivors on the lowest step; 0 where the gradient is off the grid."""
    median: Array
    """Exponent of the survivors' median."""
    zero_rows: Array
    zero_cols: Array
    """Shares of the rows and columns that are all zero."""

    @classmethod
    def of(cls, c: dict[str, Array], k: Context, scale: Array, loss: Array, micro_steps: Array) -> _Seen:
        f = {name: c[name].astype(np.float32) for name in COLUMNS if name not in ("state", "low_bits")}
        n = np.maximum(k.numel, 1).astype(np.float32)
        measured = c["state"] == MEASURED
        zeros = np.where(measured, c["zeros"], 0)
        left = np.maximum(k.numel - zeros - c["nan"] - c["pos_inf"] - c["neg_inf"], 0) * measured
        alive = left > 0
        silent = ~alive.any(1, keepdims=True)
        near_grid = f["below_grid"] <= (OFF_GRID_MEANS if k.summed else OFF_GRID) * f["lowest"]
        # Sums over micro-batches and means over ranks have more mantissa bits than FP16.
        added = ((micro_steps > 1) | k.summed) & k.matrix & ~k.table
        on_grid = alive & near_grid & (((c["low_bits"] & HALF_BITS) == 0) | added)
        survivors = np.maximum(left, 1).astype(np.float32)
        # A sum of m micro-batches that are alike has steps of m * 2^-24. Density even, half a gradient lies below its median.
        typical = np.minimum(0.5 * micro_steps * 2.0 ** (103 - f["median_bin"]), 1)
        crowd = np.where(
            (micro_steps > 1) & alive, np.maximum(f["lowest"] / survivors, typical), f["lowest"] / survivors
        )
        crowd = crowd.astype(np.float32)
        lines = alive & k.matrix
        return cls(
            measured, alive, measured & ~alive & (zeros > 0), silent, (loss == 0) | (scale >= DEAD_SCALE),
            zeros / n, crowd * survivors / n * alive, np.broadcast_to(1 / n, measured.shape), on_grid, near_grid, np.where(near_grid, crowd, 0),
            np.where(alive, f["median_bin"] - 127, NONE).astype(np.float32),
            np.where(lines, np.maximum(f["zero_rows"], 0) / np.maximum(k.rows, 1), 0).astype(np.float32),
            np.where(lines, np.maximum(f["zero_cols"], 0) / np.maximum(n / k.rows, 1), 0).astype(np.float32),
        )  # fmt: skip


def _estimate(s: _Seen, k: Context) -> Found:
    flow = np.where(s.on_grid, s.crowd, 0)
    explained = np.minimum(s.zero_rows, _at(s.zero_cols, k.reader))
    out = _on_grid(s, k, flow, explained)
    out = _choose(s.alive & ~s.on_grid, _off_grid(s, k, flow), out)
    out = _choose(s.empty, _empty(s, k, flow), out)
    high = np.minimum(out[2], s.zeros)
    low = np.minimum(out[1], high)
    best = np.clip(out[0], low, high)
    # float32 rounds: bounds are widened by one step of it, so that the exact share lies inside.
    low, high = np.nextafter(low, np.float32(-1)), np.minimum(np.nextafter(high, np.float32(2)), 1)
    nothing = ~s.measured | (s.zeros == 0)
    return np.where(nothing, 0, best), np.where(nothing, 0, np.maximum(low, 0)), np.where(nothing, 0, high)


def _choose(where: Array, these: Found, others: Found) -> Found:
    return (
        np.where(where, these[0], others[0]),
        np.where(where, these[1], others[1]),
        np.where(where, these[2], others[2]),
    )


def _on_grid(s: _Seen, k: Context, flow: Array, explained: Array) -> Found:
    """A gradient that passed through FP16 and has survivors: its zeros by kind, each with its own share flushed."""
    owned = (k.owner >= 0) & ~k.matrix
    # Kinds of zeros, as shares: columns, rows that the reader's empty columns explain, other rows, and scattered ones.
    cols = np.where(k.table, 0, s.zero_cols)
    rows = np.where(k.table, s.zero_rows, explained) * (1 - cols)
    bare = np.where(k.table, 0, s.zero_rows - explained) * (1 - cols)
    # A vector's zeros are the empty rows of its module's matrix; without one, the empty columns of its reader.
    lines = np.minimum(s.zeros, np.where(owned, _at(s.zero_rows, k.owner), _at(s.zero_cols, k.reader)))
    known = np.where(owned, np.minimum(lines, _at(explained, k.owner)), lines)
    rows, bare = np.where(k.matrix, rows, known), np.where(k.matrix, bare, lines - known)
    lined = rows + bare + cols
    fit = np.minimum(1, s.zeros / np.maximum(lined, 1e-30))
    cols, rows, bare, lined = cols * fit, rows * fit, bare * fit, lined * fit
    scattered = np.maximum(s.zeros - lined, 0)

    crowd = np.where(owned, np.maximum(flow, _at(flow, k.owner)), flow)
    # Density is nearly even close to zero: half as many elements round to 0 as to the lowest step, of a vector a few more.
    fits = scattered <= 2 * s.lowest + 2.5 * s.one
    expected = np.maximum(
        np.maximum(0.55, 4 * crowd - 0.65) * s.lowest + _ramp(crowd, 0.3, 0.8) * scattered, 0.5 * s.lowest
    )
    best = np.where(fits, scattered, np.minimum(scattered, expected))
    best += rows * _ramp(crowd, 0.2, 0.9) * np.where(k.table, 0.25, 0.6)
    best += (
        bare * np.where(k.adrift, _ramp(crowd, 0.03, 0.3), _ramp(crowd, 0.008, 0.04))
        + cols * _ramp(crowd, 0.08, 0.5) * 0.8
    )

    sure = np.where(
        fits & (s.lowest > 0), scattered * np.where((lined <= 0) & k.matrix, 0.8, np.where(crowd > 0.05, 0.3, 0)), 0
    )
    low = np.maximum(sure, np.minimum(scattered, 0.15 * s.lowest) - s.one) - np.where(k.matrix, 0, 0.5 * s.one)
    lost = np.where(k.adrift, np.where(crowd > 0.4, 0.3, 0), np.where(crowd > 0.2, 0.6, np.where(crowd > 0.05, 0.3, 0)))
    low = np.maximum(low, 0) + bare * lost * np.where(k.matrix, 1, 0.7)
    low += (rows + cols) * np.where((crowd > 0.6) & ~k.table, 0.1, 0)

    high = np.where((crowd < 0.3) & ~fits, np.minimum(scattered, 2.2 * s.lowest + 4 * s.one), scattered) + s.one
    high += (
        rows * np.where(crowd < 0.1, 0.05, 1)
        + bare * np.where(crowd < 0.004, 0.02, 1)
        + cols * np.where(crowd < 0.01, 0.05, 1)
    )
    return best, low, high


def _off_grid(s: _Seen, k: Context, flow: Array) -> Found:
    """A gradient computed in FP32: its zeros are natural, unless the flow it was computed from came from near the grid."""
    before = _nearest(flow, s.on_grid, k.order, 0)
    own = np.where(s.near_grid, s.crowd, 0)
    best = s.zeros * _ramp(np.maximum(before, own), 0.1, 0.3) * np.where(k.table, 0.25, 1)
    in_doubt = (before > 0.02) | (own > 0.02)
    return best, np.zeros_like(best), np.where(in_doubt, s.zeros, np.minimum(s.zeros, 3 * s.one))


def _empty(s: _Seen, k: Context, flow: Array) -> Found:
    """An empty gradient is judged by its nearest neighbours in backward order that are not.

    A flow flushed upstream empties everything behind it. Where something behind is alive, the flow went by another way, and this
    layer's own is natural unless both neighbours are near the grid. Else it died on the way here: flushed, if it was near.
    """
    median = np.where(s.near_grid, s.median, FREE)
    before = _nearest(median, s.alive, k.order, FREE)
    behind = _nearest(median, s.alive, k.order[::-1], FREE)
    bypassed = _nearest(s.alive, s.alive, k.order[::-1], False)
    smaller = np.minimum(before, behind)

    died = np.where(bypassed, _ramp(-smaller, 22.5, 24.5), _ramp(-before, 18, 21) * np.where(k.bottleneck, 0.3, 1))
    died = np.where(s.silent, np.where(s.dead, 0, 0.9), died)
    idle = _at(s.zero_cols, k.reader) * (1 - _ramp(_at(flow, k.reader), 0.2, 0.9))
    part = np.where(k.table, 0.4, 1 - idle)
    sure = ~s.silent & ~bypassed & (before <= -21) & ~k.table & ~k.bottleneck
    calm = ~s.silent & np.where(bypassed, smaller >= -20, before >= -17)
    return died * part * s.zeros, np.where(sure, 0.7 * part * s.zeros, 0), np.where(calm, s.one, s.zeros)


def _ramp(x: Array, a: float, b: float) -> Array:
    """Return 0 up to a, 1 from b on, a straight line between."""
    return np.asarray(np.clip((x - np.float32(a)) * np.float32(1 / (b - a)), 0, 1))


def _at(values: Array, index: Array) -> Array:
    """Return the values of other layers, 0 where there is none."""
    return np.asarray(np.where(index >= 0, np.take(values, np.maximum(index, 0), axis=1), np.float32(0)))


def _nearest(values: Array, where: Array, order: Array, otherwise: float) -> Array:
    """Return, for each layer, the value of the nearest layer before it in `order` at which `where` holds."""
    place = np.where(where[:, order], np.arange(len(order)), -1)
    last = np.full_like(place, -1)
    np.maximum.accumulate(place[:, :-1], axis=1, out=last[:, 1:])
    found = np.where(last >= 0, np.take_along_axis(values[:, order], np.maximum(last, 0), axis=1), otherwise)
    out = np.empty(values.shape, values.dtype)
    out[:, order] = found
    return out
