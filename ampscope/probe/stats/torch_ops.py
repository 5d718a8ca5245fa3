"""Statistics by torch operations: any device, no synchronisation, several passes over slices of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ampscope.probe.stats import rows
from ampscope.record.step import BINS

SLICE = 1 << 22
"""Elements looked at together; bounds the memory a huge layer takes beside itself (about 40 bytes an element of a slice)."""
_PAIRS = 2 * BINS
"""A pair of bins for each exponent: odd ones count elements without mantissa. Zeros, NaN and inf are bins 1, 510 and 511."""


def measure(plains: Sequence[rows.Plain]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [n, WIDTH] int64 and [n, 2] float64 (float32 where the device has no float64) rows on the tensors' device."""
    device = plains[0].tensor.device
    wide = torch.float32 if device.type == "mps" else torch.float64
    ints = torch.zeros((len(plains), rows.WIDTH), dtype=torch.int64, device=device)
    reals = torch.zeros((len(plains), 2), dtype=wide, device=device)
    with torch.no_grad():
        for i, p in enumerate(plains):
            _count(p.tensor, ints[i], reals[i])
            if p.height:
                _lines(p, ints[i])
            else:
                ints[i, rows.ZERO_ROWS : rows.ZERO_COLS + 1] = -1
    return ints, reals


def _slices(t: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of a dense tensor in the order of memory, as FP32 or FP64."""
    flat = t.as_strided((t.numel(),), (1,))
    for begin in range(0, t.numel(), SLICE):
        part = flat[begin : begin + SLICE]
        yield part if part.dtype in (torch.float32, torch.float64) else part.float()


def _count(t: torch.Tensor, ints: torch.Tensor, reals: torch.Tensor) -> None:
    if t.numel() == 0:
        reals[rows.MAX] = float("nan")
        return
    pairs = torch.zeros(_PAIRS, dtype=torch.int64, device=t.device)
    for part in _slices(t):
        key, mantissa, special = _keys64(part) if part.dtype is torch.float64 else _keys32(part)
        key = key.long()
        pairs.scatter_add_(0, key, torch.ones_like(key))
        ints[rows.POS_INF] += (part == float("inf")).sum()
        ints[rows.LOW_BITS] |= _or(mantissa.masked_fill(special, 0)).long()
        finite = part.masked_fill(special, 0).to(reals.dtype)
        reals[rows.MAX] = torch.maximum(reals[rows.MAX], finite.abs().amax())
        reals[rows.SQUARES] += finite.square().sum()
    ints[rows.ZEROS] = pairs[1]
    ints[rows.NAN] = pairs[_PAIRS - 2]
    ints[rows.NEG_INF] = pairs[_PAIRS - 1] - ints[rows.POS_INF]
    ints[rows.HISTOGRAM] = pairs[0]
    ints[rows.HISTOGRAM + 1 : rows.EXACT - 1] = pairs[2:-2:2] + pairs[3:-2:2]
    ints[rows.EXACT + 1 : rows.WIDTH - 1] = pairs[3:-2:2]
    reals[rows.MAX].masked_fill_(pairs[-2:].sum() == t.numel(), float("nan"))


def _keys32(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return bin, mantissa, and whether it is NaN or inf, of FP32 elements."""
    magnitude = x.view(torch.int32) & 0x7FFF_FFFF
    mantissa = magnitude & 0x7F_FFFF
    return (magnitude >> 23 << 1) | (mantissa == 0), mantissa, magnitude >= 0x7F80_0000


def _keys64(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the same of FP64 elements, exponents clamped to FP32's range. A clamped element is no exact power."""
    magnitude = x.view(torch.int64) & 0x7FFF_FFFF_FFFF_FFFF
    raw, fraction = magnitude >> 52, magnitude & 0xF_FFFF_FFFF_FFFF
    special = raw == 0x7FF
    exponent = raw - 1023 + 127
    clamped = (exponent < 1) | (exponent > BINS - 2)
    exponent = exponent.clamp(0, BINS - 2).masked_fill(special, BINS - 1)
    bare = ((fraction == 0) & (~clamped | special)) | (magnitude == 0)
    return (exponent << 1) | bare, (fraction >> 29) | ((fraction & 0x1FFF_FFFF) != 0), special


def _or(values: torch.Tensor) -> torch.Tensor:
    """Return the OR of all elements by halving (torch has no such reduction)."""
    while values.numel() > 1:
        half = values.numel() // 2
        folded = values[:half] | values[half : 2 * half]
        values = folded if values.numel() % 2 == 0 else torch.cat([folded, values[-1:]])
    return values[0]


def _lines(p: rows.Plain, ints: torch.Tensor) -> None:
    """Count all-zero rows and columns."""
    matrix = p.tensor.as_strided((p.height, p.width), (p.width, 1))
    used = torch.zeros(p.width, dtype=torch.bool, device=matrix.device)
    for some in matrix.split(max(1, SLICE // p.width)):
        nonzero = some != 0
        ints[rows.ZERO_ROWS] += (~nonzero.any(1)).sum()
        used |= nonzero.any(0)
    ints[rows.ZERO_COLS] = (~used).sum()
