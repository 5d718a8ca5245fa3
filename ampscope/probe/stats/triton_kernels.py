"""The CUDA kernel: one launch over all tensors of one dtype on one device, through a table of addresses.

A program does one task of a table: either it counts a chunk of a tensor, or it looks which of some rows or columns are
all zero, and leaves them at the first non-zero element in each. Tests run it on CPU, in Triton's interpreter.
"""

# Triton reads annotations itself and takes none but its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048
"""Elements of a chunk looked at together."""
LINES = 32
"""Rows or columns looked at together."""
ACROSS = 64
"""Elements of each of them looked at together."""
WARPS = 8
FLOAT32, FLOAT16, BFLOAT16, FLOAT64 = range(4)
"""Kinds of elements."""
COUNT, ROWS, COLS = range(3)
"""Kinds of tasks."""
ADDRESS, SIZE, WIDTH = range(3)
"""Columns of the table of tensors."""
PAIRS = 8
"""Column of a result row where 512 pairs of bins begin, as in `torch_ops`; the columns before are those of `rows`."""


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _load(base, offsets, mask, KIND: tl.constexpr):
    """Return elements as FP32 bit patterns (FP64 ones for FP64), 0 where masked."""
    if KIND == 0:
        bits = tl.load(base.to(tl.pointer_type(tl.int32)) + offsets, mask=mask, other=0)
    elif KIND == 1:
        half = tl.load(base.to(tl.pointer_type(tl.float16)) + offsets, mask=mask, other=0.0)
        bits = half.to(tl.float32).to(tl.int32, bitcast=True)
    elif KIND == 2:
        bits = tl.load(base.to(tl.pointer_type(tl.int16)) + offsets, mask=mask, other=0).to(tl.int32) << 16
    else:
        bits = tl.load(base.to(tl.pointer_type(tl.int64)) + offsets, mask=mask, other=0)
    return bits


@triton.jit
def _count(base, begin, end, row, total, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Count elements begin … end into `row`; store the sum of squares at `total`."""
    counts = tl.zeros([512], tl.int32)
    squares = tl.zeros([BLOCK], tl.float64)
    positive = tl.zeros([BLOCK], tl.int32)
    if KIND == 3:
        low = tl.zeros([BLOCK], tl.int64)
        top = tl.zeros([BLOCK], tl.int64)
    else:
        low = tl.zeros([BLOCK], tl.int32)
        top = tl.zeros([BLOCK], tl.int32)
    at = begin
    while at < end:
        offsets = at + tl.arange(0, BLOCK)
        bits = _load(base, offsets, offsets < end, KIND)
        if KIND == 3:
            magnitude = bits & 0x7FFFFFFFFFFFFFFF
            raw = magnitude >> 52
            fraction = magnitude & 0xFFFFFFFFFFFFF
            special = raw == 0x7FF
            exponent = raw - 896
            inside = (exponent >= 1) & (exponent <= 254)
            exponent = tl.where(special, 255, tl.minimum(tl.maximum(exponent, 0), 254))
            bare = ((fraction == 0) & (inside | special)) | (magnitude == 0)
            mantissa = (fraction >> 29) | ((fraction & 0x1FFFFFFF) != 0).to(tl.int64)
            positive += (special & (fraction == 0) & (bits > 0)).to(tl.int32)
            x = tl.where(special, 0, magnitude).to(tl.float64, bitcast=True)
        else:
            magnitude = bits & 0x7FFFFFFF
            mantissa = magnitude & 0x7FFFFF
            exponent = magnitude >> 23
            special = exponent == 255
            bare = mantissa == 0
            positive += (bits == 0x7F800000).to(tl.int32)
            x = tl.where(special, 0, magnitude).to(tl.float32, bitcast=True).to(tl.float64)
        key = (exponent * 2 + bare.to(exponent.dtype)).to(tl.int32)
        counts += tl.histogram(key, 512)
        low |= tl.where(special, 0, mantissa)
        top = tl.maximum(top, tl.where(special, 0, magnitude))
        squares += x * x
        at += BLOCK
    bins = tl.arange(0, 512)
    counts -= tl.where(bins == 1, (at - end).to(tl.int32), 0)  # what was masked counted as zeros
    tl.atomic_add(row + 8 + bins, counts.to(tl.int64), mask=counts > 0, sem="relaxed")
    tl.atomic_add(row + 2, tl.sum(positive, 0).to(tl.int64), sem="relaxed")
    tl.atomic_or(row + 4, tl.reduce(low, 0, _or).to(tl.int64), sem="relaxed")
    tl.atomic_max(row + 7, tl.max(top, 0).to(tl.int64), sem="relaxed")
    tl.store(total, tl.sum(squares, 0))


@triton.jit
def _lines(
    base, first, last, length, stride, step, cell,
    KIND: tl.constexpr, LINES: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Add to `cell` how many of the lines first … last are all zero; `stride` between lines, `step` along one."""
    empty = length * 0
    while first < last:
        line = first + tl.arange(0, LINES)
        seen = (line >= last).to(tl.int32)
        at = length * 0
        left = at + 1
        while (at < length) & (left > 0):
            across = at + tl.arange(0, ACROSS)
            mask = (line < last)[:, None] & (across < length)[None, :]
            bits = _load(base, line[:, None] * stride + across[None, :] * step, mask, KIND)
            found = (bits << 1) != 0  # without the sign
            seen = tl.maximum(seen, tl.max(found.to(tl.int32), 1))
            left = (LINES - tl.sum(seen, 0)).to(tl.int64)
            at += ACROSS
        empty += left
        first += LINES
    tl.atomic_add(cell, empty, sem="relaxed")


@triton.jit
def measure(
    tensors, tasks, out, sums,
    KIND: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LINES: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Do task number program_id.

    Args:
        tensors: int64 [n, 3], address, elements, width of the matrix.
        tasks: int64 [m, 4], kind, tensor, first element or line, the one after the last.
        out: int64 [n, WIDTH], result rows, zero before.
        sums: float64 [m], sums of squares.
        KIND: of the elements.
        WIDTH: of a result row.
        BLOCK: elements looked at together.
        LINES: rows or columns looked at together.
        ACROSS: elements of each of them looked at together.

    """
    task = tl.program_id(0).to(tl.int64)
    what = tl.load(tasks + task * 4)
    tensor = tl.load(tasks + task * 4 + 1)
    first = tl.load(tasks + task * 4 + 2)
    last = tl.load(tasks + task * 4 + 3)
    base = tl.load(tensors + tensor * 3)
    row = out + tensor * WIDTH
    if what == 0:
        _count(base, first, last, row, sums + task, KIND, BLOCK)
    else:
        width = tl.load(tensors + tensor * 3 + 2)
        height = tl.load(tensors + tensor * 3 + 1) // width
        if what == 1:
            _lines(base, first, last, width, width, width * 0 + 1, row + 5, KIND, LINES, ACROSS)
        else:
            _lines(base, first, last, height, width * 0 + 1, width, row + 6, KIND, LINES, ACROSS)
