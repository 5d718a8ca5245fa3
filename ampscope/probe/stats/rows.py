"""What the backends share: the layout of their results, and how any gradient becomes one dense, real tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ampscope.record.step import BINS, MEASURED, LayerStats

Ints = np.ndarray[Any, np.dtype[np.int64]]
Reals = np.ndarray[Any, np.dtype[np.float64]]

ZEROS, NAN, POS_INF, NEG_INF, LOW_BITS, ZERO_ROWS, ZERO_COLS, TOP = range(8)
"""Columns of an integer row. TOP is a backend's own (largest magnitude as a bit pattern)."""
HISTOGRAM = 8
EXACT = HISTOGRAM + BINS
WIDTH = EXACT + BINS
"""int64 columns of a row: eight numbers, the histogram, the exact powers of two."""
MAX, SQUARES = range(2)
"""float64 columns of a row."""


class Plain(NamedTuple):
    """A gradient as one real strided tensor that is dense in memory, and what that leaves out.

    `tensor` is contiguous up to the order of dimensions behind the first. `height` x `width` is its [shape[0], rest]
    view, height 0 where all-zero rows and columns are not to be counted. `note` is None where the counts of `tensor`
    are those of the gradient.
    """

    tensor: torch.Tensor
    height: int
    width: int
    note: Note | None


class Note(NamedTuple):
    """How the counts of a `Plain` tensor become those of the gradient."""

    missing: int = 0
    """Further elements that are zero (of a sparse gradient)."""
    missing_rows: int = 0
    """Further rows that are zero."""
    repeat: int = 1
    """Each element stands for so many (of an expanded gradient)."""
    repeat_rows: int = 1
    repeat_cols: int = 1
    rows: int = -1
    """All-zero rows and columns where they are known without counting, else -1."""
    cols: int = -1


def plain(grad: torch.Tensor) -> Plain:
    """Return any gradient as a dense real tensor; complex elements become two reals, a sharded tensor its local part.

    FP16, BF16 and FP8 stay as they are. Copies only what is not dense in memory; a sparse gradient is coalesced.
    """
    if _is_ordinary(grad):  # no operation that a dispatch mode of the user's would see
        return _view(grad, grad.dim() >= 2, None)
    t = getattr(grad, "_local_tensor", grad).detach()
    note: Note | None = None
    lines = t.dim() >= 2
    if t.layout is not torch.strided:
        t, note, lines = _stored(t)
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
        if note is not None:
            note = note._replace(missing=2 * note.missing, cols=2 * note.cols if note.cols > 0 else note.cols)
    if t.is_neg():
        t = t.resolve_neg()
    if note is None and not t.is_contiguous() and 0 in t.stride():
        t, note = _unexpanded(t)
    if not is_dense(t):
        t = t.contiguous()
    return _view(t, lines, note)


def _view(t: torch.Tensor, lines: bool, note: Note | None) -> Plain:
    height = t.shape[0] if lines and t.dim() >= 2 and t.numel() else 0
    return Plain(t, height, t.numel() // height if height else 0, note)


def _is_ordinary(t: torch.Tensor) -> bool:
    plain_type = type(t) is torch.Tensor and t.layout is torch.strided and not t.requires_grad
    return plain_type and not t.is_complex() and not t.is_neg() and is_dense(t)


def is_dense(t: torch.Tensor) -> bool:
    """Whether `t` fills its memory and its first dimension is the outermost (contiguous, channels-last)."""
    if t.is_contiguous():
        return True
    if t.dim() not in (4, 5) or t.stride(0) < max(t.stride()):
        return False
    return t.is_contiguous(memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d)


def _stored(t: torch.Tensor) -> tuple[torch.Tensor, Note, bool]:
    """Return what a sparse tensor stores, and whether rows and columns can be counted (first dimension sparse)."""
    if t.layout is torch.sparse_coo:
        t = t.coalesce()
        values, lines = t.values(), t.sparse_dim() == 1 and t.dim() >= 2
    elif t.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        values, lines = t.values(), False
    else:
        values, lines = t.to_dense(), t.dim() >= 2
        return values, Note(), lines
    note = Note(t.numel() - values.numel())
    if lines and values.numel() == 0 and t.numel():
        note = note._replace(rows=t.shape[0], cols=t.numel() // t.shape[0])
    elif lines:
        note = note._replace(missing_rows=t.shape[0] - values.shape[0])
    return values, note, lines


def _unexpanded(t: torch.Tensor) -> tuple[torch.Tensor, Note]:
    """Drop the repetitions of an expanded tensor: count once, multiply later."""
    row = col = 1
    for d, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if stride == 0 and size > 1:
            t = t.narrow(d, 0, 1)
            if d == 0:
                row *= size
            else:
                col *= size
    return t, Note(repeat=row * col, repeat_rows=row, repeat_cols=col)


def amend(ints: Ints, reals: Reals, notes: Iterable[tuple[int, Note]]) -> None:
    """Turn counts of `Plain` tensors into those of the gradients, in place."""
    for i, note in notes:
        row = ints[i]
        kept = row[LOW_BITS], row[ZERO_ROWS], row[ZERO_COLS]
        row *= note.repeat
        row[LOW_BITS], row[ZERO_ROWS], row[ZERO_COLS] = kept
        row[ZEROS] += note.missing
        reals[i, SQUARES] *= note.repeat
        if note.missing and np.isnan(reals[i, MAX]):
            reals[i, MAX] = 0.0
        if kept[1] >= 0:
            row[ZERO_ROWS] = kept[1] * note.repeat_rows + note.missing_rows
            row[ZERO_COLS] = kept[2] * note.repeat_cols
        elif note.rows >= 0:
            row[ZERO_ROWS], row[ZERO_COLS] = note.rows, note.cols


def gather(n: int, parts: Iterable[tuple[Sequence[int], Ints, Reals]]) -> tuple[Ints, Reals]:
    """Put (positions, rows) together: int64 [n, WIDTH] and float64 [n, 2] in the order of the positions 0 to n - 1."""
    found = list(parts)
    if len(found) == 1 and list(found[0][0]) == list(range(n)):
        return found[0][1], found[0][2]
    ints, reals = np.zeros((n, WIDTH), np.int64), np.zeros((n, 2))
    for positions, some, other in found:
        ints[positions], reals[positions] = some, other
    return ints, reals


def to_stats(ints: Ints, reals: Reals) -> LayerStats:
    """Return the statistics in [n, WIDTH] integers and [n, 2] floats; histograms are views of them."""
    numbers = ints[:, :HISTOGRAM].T.copy()  # looked at many times, and rows are 4 KB apart
    return LayerStats(**fields(numbers, reals), exponents=ints[:, HISTOGRAM:EXACT], exact=ints[:, EXACT:WIDTH])


def fields(numbers: Ints, reals: Reals) -> dict[str, Any]:
    """Return the fields of statistics, but for the histograms, from int64 [HISTOGRAM, n] and float64 [n, 2]."""
    most, squares = reals.T.copy()
    return {
        "state": np.full(len(reals), MEASURED, np.uint8),
        "zeros": numbers[ZEROS],
        "nan": numbers[NAN],
        "pos_inf": numbers[POS_INF],
        "neg_inf": numbers[NEG_INF],
        "max_abs": most,
        "sum_squares": squares,
        "low_bits": numbers[LOW_BITS].astype(np.uint32),
        "zero_rows": numbers[ZERO_ROWS],
        "zero_cols": numbers[ZERO_COLS],
    }
