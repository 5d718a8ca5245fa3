"""The free estimate of the share flushed to zero in FP16, with bounds. docs/underflow.md says what each rests on, and how right it is.

Zeros of a weight's gradient have two causes. *Natural* ones are zero in FP32 too: an input feature that is zero for the whole batch
empties a column, a dead unit empties a row (and the column of the next layer that reads it), rows of a table that were not looked up
are empty. *Flushed* ones are rounded away, in the gradient itself or in the flow on its way back; what survives beside them then lies
close above FP16's grid. So: take off the natural part, and judge the rest by how near the survivors are to the grid; of an empty
gradient, by how near those of the layer before it (in backward order) were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ampscope.record.step import MEASURED, Layer

Array = np.ndarray[Any, Any]

COLUMNS = (
    "state", "zeros", "nan", "pos_inf", "neg_inf", "low_bits", "lowest", "median_bin", "zero_rows", "zero_cols",
)  # fmt: skip
"""Columns of the log the estimate rests on."""

NEAR, FAR = -19.0, -15.0
"""log2 of the survivors' median: at or below NEAR, zeros beside them were flushed; from FAR on, they are natural. FP16's grid is 2^-24."""
EMPTY_NEAR, EMPTY_SURE, EMPTY_FAR = -20.0, -21.0, -16.0
"""The same for an empty gradient, of the survivors in the layer before it."""
CROWDED = 0.1
"""Share of survivors on the grid's lowest step from which structure proves nothing: a flushed flow empties rows and columns too."""
DEAD_SCALE = 2.0**20
"""Where every gradient is empty: below this scale they were flushed (no loss is that small at a larger one), above it the loss is dead."""


@dataclass(frozen=True)
class Context:
    """What the estimate knows of the layers: their place in backward, who reads their output, which are tables."""

    order: Array
    """int64 [L]: layer indices in backward order."""
    reader: Array
    """int64 [L]: the weight that reads this layer's output (its columns are this layer's rows), or -1."""
    matrix: Array
    """bool [L]: two or more dimensions."""
    table: Array
    """bool [L]: rows are looked up (embeddings): an empty row was not."""
    rows: Array
    """int64 [L]: shape[0], or 1."""
    numel: Array
    summed: bool = False
    """Gradients are averaged over ranks, so that their mantissa bits tell nothing."""

    @classmethod
    def of(
        cls,
        layers: Sequence[Layer],
        backward_order: Sequence[str] = (),
        tables: Sequence[str] = (),
        summed: bool = False,
    ) -> Context:
        """Describe layers. Without a known backward order, registration order is turned round."""
        index = {layer.name: i for i, layer in enumerate(layers)}
        known = [index[n] for n in backward_order if n in index]
        rest = [i for i in reversed(range(len(layers))) if i not in set(known)]
        order = known + rest
        reader = np.full(len(layers), -1, np.int64)
        latest: dict[int, int] = {}
        for i in order:
            shape = layers[i].shape
            if shape:
                reader[i] = latest.get(shape[0], -1)
            if len(shape) >= 2:
                latest[shape[1]] = i
        shapes = [layer.shape for layer in layers]
        return cls(
            np.array(order, np.int64), reader, np.array([len(s) >= 2 for s in shapes], bool),
            np.array([layer.name in set(tables) for layer in layers], bool),
            np.array([s[0] if len(s) >= 2 else 1 for s in shapes], np.int64), np.array([layer.numel for layer in layers], np.int64), summed,
        )  # fmt: skip


def estimate(
    columns: dict[str, Array],
    context: Context,
    scale: Array | float = 1.0,
    loss: Array | float = 1.0,
    micro_steps: Array | float = 1.0,
) -> tuple[Array, Array, Array]:
    """Return (estimate, low, high): share of elements flushed to zero at the scale used, float64, in the columns' shape.

    Args:
        columns: `COLUMNS` of the log, [L] or [T, L].
        context: of the same L layers.
        scale, loss, micro_steps: of the step, scalar or [T].
    """
    flat = np.asarray(columns["zeros"]).ndim == 1
    c = {k: np.atleast_2d(columns[k]) for k in COLUMNS}
    steps = len(c["zeros"])
    if not len(context.numel):
        empty_result = np.zeros(c["zeros"].shape)
        return (empty_result[0],) * 3 if flat else (empty_result,) * 3
    per_step = [
        np.broadcast_to(np.atleast_1d(np.asarray(v, np.float64)), (steps,))[:, None] for v in (scale, loss, micro_steps)
    ]
    out = _estimate(c, context, *per_step)
    return (out[0][0], out[1][0], out[2][0]) if flat else out


def _estimate(
    c: dict[str, Array], k: Context, scale: Array, loss: Array, micro_steps: Array
) -> tuple[Array, Array, Array]:
    n = np.maximum(k.numel, 1).astype(np.float64)
    measured = c["state"] == MEASURED
    share = np.where(measured, c["zeros"], 0) / n
    survivors = np.maximum(n - c["zeros"] - c["nan"] - c["pos_inf"] - c["neg_inf"], 0) * measured
    empty = measured & (survivors == 0) & (c["zeros"] > 0)
    median = np.where(survivors > 0, c["median_bin"].astype(np.float64) - 127, -40.0)
    crowd = c["lowest"] / np.maximum(survivors, 1)
    before = _before(median, survivors > 0, k.order)
    silent = ~((survivors > 0).any(1, keepdims=True)) & measured

    zero_columns = np.where(k.matrix, np.maximum(c["zero_cols"], 0) / np.maximum(n / k.rows, 1), 0.0)
    zero_rows = np.where(k.matrix, np.maximum(c["zero_rows"], 0) / np.maximum(k.rows, 1), 0.0)
    read = np.where(k.reader >= 0, np.take(zero_columns, np.maximum(k.reader, 0), axis=1), 0.0)
    rows = np.where(k.table, zero_rows, np.minimum(zero_rows, read))
    natural = np.where(k.matrix, 1 - (1 - np.where(k.table, 0.0, zero_columns)) * (1 - rows), np.minimum(share, read))
    natural = np.where(empty, 0.0, np.minimum(natural, share))
    rest = share - natural

    dead = (loss == 0) | (scale >= DEAD_SCALE)
    near = _ramp(median, NEAR, FAR)
    near = np.where(empty, _ramp(before, EMPTY_NEAR, EMPTY_FAR), near)
    near = np.where(silent, np.where(dead, 0.0, 1.0), near)
    born_half = ((c["low_bits"] & 0x1FFF) == 0) | ((micro_steps > 1) | k.summed) & k.matrix & ~k.table
    half = measured & (born_half | empty)
    # Where density is even near zero, half as many elements round to 0 as to the lowest step of the grid.
    scattered = np.minimum(c["lowest"] * 0.5 / n, rest)
    best = np.where(half, np.maximum(near * rest, scattered), 0.0)

    few = 1.0 / n
    sure_low = rest * np.where(k.table, 0.5, 0.6) * np.where(crowd > 0.005, 1.0, 0.2)
    sure_high = np.where(crowd > CROWDED, share, np.minimum(share, rest + 0.1 * natural + few))
    table_high = np.minimum(share, rest + 0.3 * natural * (crowd > 0.3) + 5 * few)
    sure_high = np.where(k.table, table_high, sure_high)
    calm_high = np.minimum(share, scattered * 6 + 3 * few + 0.03 * rest)
    low = np.where(near >= 1, sure_low, np.where(near <= 0, np.minimum(scattered * 0.5, rest), 0.0))
    high = np.where(near >= 1, sure_high, np.where(near <= 0, calm_high, share))
    uncertain = empty & (before <= EMPTY_FAR)
    low = np.where(uncertain, np.where((before <= EMPTY_SURE) & ~k.table, 0.8 * share, 0.0), low)
    high = np.where(uncertain | silent, share, high)
    low = np.where(silent, 0.0, low)
    low, high = np.where(half, low, 0.0), np.where(half, high, 0.0)
    return np.clip(best, low, high), low, high


def _ramp(x: Array, near: float, far: float) -> Array:
    """Return 1 up to `near`, 0 from `far` on, a straight line between."""
    return np.clip((far - x) / (far - near), 0.0, 1.0)


def _before(median: Array, alive: Array, order: Array) -> Array:
    """Return, for each layer, the survivors' median in the nearest layer before it in backward order that has any; -5 where none has."""
    values, living = median[:, order], alive[:, order]
    place = np.where(living, np.arange(len(order)), -1)
    last = np.maximum.accumulate(place, axis=1)
    last = np.concatenate([np.full((len(values), 1), -1), last[:, :-1]], axis=1)
    found = np.where(last >= 0, np.take_along_axis(values, np.maximum(last, 0), axis=1), -5.0)
    out = np.empty_like(found)
    out[:, order] = found
    return out
