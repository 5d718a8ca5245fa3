"""Statistics by torch operations: any device, no synchronisation, several passes. The reference of the fast backends' speed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ampscope.probe.stats import rows
from ampscope.record.step import BINS


def measure(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [n, WIDTH] int64 and [n, 2] float64 (float32 where the device has no float64) rows on the tensors' device."""
    device = tensors[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64
    ints = torch.zeros((len(tensors), rows.WIDTH), dtype=torch.int64, device=device)
    floats = torch.zeros((len(tensors), 2), dtype=wide, device=device)
    with torch.no_grad():
        for i, grad in enumerate(tensors):
            _one(grad, ints[i], floats[i], wide)
    return ints, floats


def _one(grad: torch.Tensor, ints: torch.Tensor, floats: torch.Tensor, wide: torch.dtype) -> None:
    x, missing = rows.plain(grad)
    n = x.numel()
    ints[rows.ZEROS] = missing
    ints[rows.ZERO_ROWS : rows.ZERO_COLS + 1] = -1
    if n == 0:
        floats[rows.MAX] = 0.0 if missing else float("nan")
        return
    double = x.dtype is torch.float64
    if double:
        bits = x.view(torch.int64) & 0x7FFF_FFFF_FFFF_FFFF
        raw = bits >> 52
        fraction = bits & 0xF_FFFF_FFFF_FFFF
        mantissa = (fraction >> 29) | ((fraction & 0x1FFF_FFFF) != 0)
        exponent = (raw - 1023 + 127).clamp(0, BINS - 2)
        special = raw == 0x7FF
        clamped = (raw - 1023 + 127 < 1) | (raw - 1023 + 127 > BINS - 2)
    else:
        bits = x.view(torch.int32) & 0x7FFF_FFFF
        exponent = (bits >> 23).long()
        fraction = mantissa = bits & 0x7F_FFFF
        special = exponent == BINS - 1
        clamped = exponent == 0
    zero = bits == 0
    nan = special & (fraction != 0)
    inf = special & (fraction == 0)
    ints[rows.ZEROS] += zero.sum()
    ints[rows.NAN] = nan.sum()
    ints[rows.POS_INF] = (inf & (x > 0)).sum()
    ints[rows.NEG_INF] = (inf & (x < 0)).sum()
    counted = ~(zero | special)
    where = torch.where(counted, exponent, BINS - 1).reshape(-1)
    histogram = torch.zeros(BINS, dtype=torch.int64, device=x.device)
    histogram.scatter_add_(0, where, torch.ones_like(where))
    histogram[BINS - 1] = 0
    ints[rows.HISTOGRAM : rows.EXACT] = histogram
    power = torch.where(counted & (fraction == 0) & ~clamped, exponent, BINS - 1).reshape(-1)
    histogram = torch.zeros(BINS, dtype=torch.int64, device=x.device)
    histogram.scatter_add_(0, power, torch.ones_like(power))
    histogram[BINS - 1] = 0
    ints[rows.EXACT :] = histogram
    ints[rows.LOW_BITS] = _or(torch.where(counted, mantissa, torch.zeros_like(mantissa)).reshape(-1))
    finite = torch.where(special, torch.zeros_like(x), x).to(wide)
    largest = finite.abs().amax()
    floats[rows.MAX] = torch.where(special.all() & (missing == 0), torch.full_like(largest, float("nan")), largest)
    floats[rows.SQUARES] = finite.square().sum()
    _empty_lines(grad, zero, ints)


def _empty_lines(grad: torch.Tensor, zero: torch.Tensor, ints: torch.Tensor) -> None:
    """Count all-zero rows and columns of the [shape[0], rest] view (dense gradients of two or more dimensions)."""
    if grad.layout is torch.strided and not grad.is_complex() and zero.dim() >= 2 and zero.shape[0]:
        flat = zero.reshape(zero.shape[0], -1)
        ints[rows.ZERO_ROWS] = flat.all(1).sum()
        ints[rows.ZERO_COLS] = flat.all(0).sum()


def _or(values: torch.Tensor) -> torch.Tensor:
    """Return the OR of all elements by halving (torch has no such reduction)."""
    values = values.long()
    while values.numel() > 1:
        half = values.numel() // 2
        folded = values[:half] | values[half : 2 * half]
        values = folded if values.numel() % 2 == 0 else torch.cat([folded, values[-1:]])
    return values[0]
