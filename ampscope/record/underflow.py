"""The free estimate of the share flushed to zero in FP16, with bounds. docs/underflow.md says what each rests on."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

COLUMNS = ("zeros", "low_octave", "low_bits")
"""Columns of the log the estimate rests on."""


def estimate(columns: dict[str, Array], numel: Array) -> tuple[Array, Array, Array]:
    """Return (estimate, low, high): share of elements flushed to zero at the scale used, float64 like `columns["zeros"]`.

    Args:
        columns: compact columns of the log (`ampscope.record.derive.compact`), [..., L].
        numel: elements a layer, [L].
    """
    n = np.maximum(numel, 1)
    zeros = columns["zeros"]
    # Gradient density is nearly uniform in the lowest octaves: the one above the subnormal grid predicts what lies below 2^-25.
    extrapolated = columns["low_octave"] * 2.0**-11
    half = (columns["low_bits"] & 0x1FFF) == 0
    low = np.where(half, np.minimum(extrapolated, zeros), 0) / n
    high = np.where(half, zeros, 0) / n
    return low, low, high
