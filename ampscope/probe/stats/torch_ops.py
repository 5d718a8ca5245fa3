"""Statistics by torch operations: any device, no synchronisation, several passes over slices of bounded size.

Small tensors of one shape are stacked, so that a model of hundreds of them does not take thousands of operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ampscope.probe.stats import rows
from ampscope.record.step import BINS

SLICE = 1 << 20
"""Elements looked at together; bounds the memory taken beside a huge layer (about 40 bytes an element of a slice)."""
SMALL = 1 << 16
"""Elements up to which tensors of one shape are stacked."""
_PAIRS = 2 * BINS
"""A pair of bins for each exponent: odd ones count elements without mantissa. Zeros, NaN, inf are bins 1, 510, 511."""


def measure(plains: Sequence[rows.Plain]) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Return int64 [n, WIDTH] and float64 [n, 2] rows (float32 where there is no float64) on the tensors' device.

    In front of them stands which of `plains` each row belongs to.
    """
    positions: list[int] = []
    ints, reals = [], []
    with torch.no_grad():
        for group in _groups(plains):
            positions += group
            first = plains[group[0]]
            matrix = (
                torch.stack([_flat(plains[i].tensor) for i in group]) if len(group) > 1 else _flat(first.tensor)[None]
            )
            row, real = _count(matrix)
            if first.height:
                _lines(matrix.view(len(group), first.height, first.width), row)
            else:
                row[:, rows.ZERO_ROWS : rows.ZERO_COLS + 1] = -1
            ints.append(row)
            reals.append(real)
    return positions, torch.cat(ints), torch.cat(reals)


def _groups(plains: Sequence[rows.Plain]) -> Iterator[list[int]]:
    """Yield positions of tensors to be looked at together."""
    alike: dict[tuple[torch.dtype, int, int], list[int]] = {}
    for i, p in enumerate(plains):
        if p.tensor.numel() > SMALL:
            yield [i]
        else:
            alike.setdefault((p.tensor.dtype, p.tensor.numel(), p.height), []).append(i)
    for (_, numel, _), members in alike.items():
        some = max(1, SLICE // max(numel, 1))
        for k in range(0, len(members), some):
            yield members[k : k + some]


def _flat(t: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of memory."""
    return t.as_strided((t.numel(),), (1,))


def _count(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the tensors [n, numel]."""
    n, numel = matrix.shape
    device = matrix.device
    ints = torch.zeros((n, rows.WIDTH), dtype=torch.int64, device=device)
    reals = torch.zeros((n, 2), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    pairs = torch.zeros(n * _PAIRS, dtype=torch.int64, device=device)
    starts = torch.arange(0, n * _PAIRS, _PAIRS, device=device)[:, None]
    for begin in range(0, numel, max(1, SLICE // n)):
        part = matrix[:, begin : begin + max(1, SLICE // n)]
        if part.dtype not in (torch.float32, torch.float64):
            part = part.float()
        key, mantissa, special = _keys64(part) if part.dtype is torch.float64 else _keys32(part)
        index = (key + starts).view(-1)
        if device.type == "cpu":
            pairs += torch.bincount(index, minlength=n * _PAIRS)
        else:  # where it would synchronise
            pairs.scatter_add_(0, index, torch.ones_like(index))
        ints[:, rows.POS_INF] += (part == float("inf")).sum(1)
        ints[:, rows.LOW_BITS] |= _or(mantissa.masked_fill(special, 0)).long()
        finite = part.masked_fill(special, 0).to(reals.dtype)
        reals[:, rows.MAX] = torch.maximum(reals[:, rows.MAX], finite.abs().amax(1))
        reals[:, rows.SQUARES] += finite.square().sum(1)
    pairs = pairs.view(n, _PAIRS)
    ints[:, rows.ZEROS] = pairs[:, 1]
    ints[:, rows.NAN] = pairs[:, -2]
    ints[:, rows.NEG_INF] = pairs[:, -1] - ints[:, rows.POS_INF]
    ints[:, rows.HISTOGRAM] = pairs[:, 0]
    ints[:, rows.HISTOGRAM + 1 : rows.EXACT - 1] = pairs[:, 2:-2:2] + pairs[:, 3:-2:2]
    ints[:, rows.EXACT + 1 : rows.WIDTH - 1] = pairs[:, 3:-2:2]
    reals[:, rows.MAX].masked_fill_(pairs[:, -2:].sum(1) == numel, float("nan"))
    return ints, reals


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
    """Return the OR of each row [n, numel] by halving (torch has no such reduction)."""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        folded = values[:, :half] | values[:, half : 2 * half]
        values = folded if values.shape[1] % 2 == 0 else torch.cat([folded, values[:, -1:]], 1)
    return values[:, 0]


def _lines(stack: torch.Tensor, ints: torch.Tensor) -> None:
    """Count all-zero rows and columns of the matrices [n, height, width]."""
    n, height, width = stack.shape
    used = torch.zeros((n, width), dtype=torch.bool, device=stack.device)
    some = max(1, SLICE // (n * width))
    for begin in range(0, height, some):
        nonzero = stack[:, begin : begin + some] != 0
        ints[:, rows.ZERO_ROWS] += (~nonzero.any(2)).sum(1)
        used |= nonzero.any(1)
    ints[:, rows.ZERO_COLS] = (~used).sum(1)
