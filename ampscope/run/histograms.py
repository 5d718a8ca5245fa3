"""Trimmed histograms of a batch → full ones, without a loop over rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ampscope.record.step import BINS

Array = np.ndarray[Any, Any]
INDEX = ("hist_layer", "hist_first", "hist_length")
VALUES = {"exponents": "hist_counts", "exact": "hist_exact"}


def spread(batch: pa.RecordBatch, which: str, rows: Array, n_layers: int, layer: int | None = None) -> Array:
    """Return full histograms of some rows of a batch.

    Args:
        batch: with the columns `INDEX` and `VALUES[which]`.
        which: "exponents" or "exact".
        rows: int64 [n], positions in the batch, ascending.
        n_layers: layers of the stream.
        layer: that layer alone.

    Returns:
        int64 [n, n_layers, BINS], or [n, BINS] for one layer.
    """
    shape = (len(rows), n_layers, BINS) if layer is None else (len(rows), BINS)
    out = np.zeros(shape, np.int64)
    flat = out.reshape(-1)
    owner = batch.column("hist_layer")
    layers, first, length = (_values(batch, name) for name in INDEX)
    values = _values(batch, VALUES[which])
    begin = np.cumsum(length) - length
    offsets = owner.offsets.to_numpy(zero_copy_only=False)
    place = np.full(batch.num_rows, -1, np.int64)
    place[rows] = np.arange(len(rows))
    row = np.repeat(place, np.diff(offsets))
    if not len(layers) == len(first) == len(length) == len(row):
        return out
    good = (row >= 0) & (layers >= 0) & (layers < n_layers) & (first + length <= BINS) & (begin + length <= len(values))
    if layer is not None:
        good &= layers == layer
    chosen = np.flatnonzero(good)
    base = row[chosen] if layer is not None else row[chosen] * n_layers + layers[chosen]
    width = length[chosen]
    inside = np.arange(int(width.sum())) - np.repeat(np.cumsum(width) - width, width)
    flat[np.repeat(base * BINS + first[chosen], width) + inside] = values[np.repeat(begin[chosen], width) + inside]
    return out


def _values(batch: pa.RecordBatch, name: str) -> Array:
    column = batch.column(name)
    offsets = column.offsets.to_numpy(zero_copy_only=False)
    values = column.values.to_numpy(zero_copy_only=False)[int(offsets[0]) : int(offsets[-1])]
    return np.asarray(values, np.int64)
