"""The layout the backends share: one row of integers and one of floats a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ampscope.record.step import BINS, MEASURED, LayerStats

ZEROS, NAN, POS_INF, NEG_INF, LOW_BITS, ZERO_ROWS, ZERO_COLS = range(7)
HISTOGRAM = 8
EXACT = HISTOGRAM + BINS
WIDTH = EXACT + BINS
"""int64 columns of a row."""
MAX, SQUARES = range(2)
"""float64 columns of a row."""


def to_stats(ints: np.ndarray[Any, np.dtype[np.int64]], floats: np.ndarray[Any, np.dtype[np.float64]]) -> LayerStats:
    """Return the statistics in [n, WIDTH] integers and [n, 2] floats."""
    n = len(ints)
    return LayerStats(
        state=np.full(n, MEASURED, np.uint8),
        zeros=ints[:, ZEROS].copy(),
        nan=ints[:, NAN].copy(),
        pos_inf=ints[:, POS_INF].copy(),
        neg_inf=ints[:, NEG_INF].copy(),
        max_abs=floats[:, MAX].copy(),
        sum_squares=floats[:, SQUARES].copy(),
        low_bits=ints[:, LOW_BITS].astype(np.uint32),
        zero_rows=ints[:, ZERO_ROWS].copy(),
        zero_cols=ints[:, ZERO_COLS].copy(),
        exponents=ints[:, HISTOGRAM:EXACT].copy(),
        exact=ints[:, EXACT:WIDTH].copy(),
    )


def plain(grad: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a strided real tensor with the elements of `grad`, and how many further elements are zero (of a sparse one).

    Complex elements become two reals, a sharded tensor its local part, half precision FP32 (exactly).
    """
    t = grad.detach()
    t = getattr(t, "_local_tensor", t)
    missing = 0
    if t.is_sparse:
        dense = t.numel()
        t = t.coalesce().values()
        missing = dense - t.numel()
    elif t.layout is not torch.strided:
        dense = t.numel()
        t = t.values()
        missing = dense - t.numel()
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
        missing *= 2
    if t.is_neg():
        t = t.resolve_neg()
    if t.dtype not in (torch.float32, torch.float64):
        t = t.float()
    return t, missing
