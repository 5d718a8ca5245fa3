"""All-zero rows and columns of matrices in memory, compiled by numba.

A row or column is left at its first non-zero element, so this is seldom a whole pass.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from ampscope.probe.stats.jit import jit
from ampscope.probe.stats.rows import ZERO_COLS, ZERO_ROWS, ZEROS
from ampscope.probe.stats.vector import pointer, take

STRIP = 64
"""Elements of a row, or rows, looked at between two decisions."""


@jit()
def _zero_rows(bits: Any, magnitude: Any) -> Any:
    height, width = bits.shape
    empty = 0
    for i in range(height):
        seen = bits[i, 0] & magnitude
        j = 1
        while not seen and j < width:
            end = min(j + STRIP, width)
            for k in range(j, end):
                seen |= bits[i, k] & magnitude
            j = end
        empty += not seen
    return empty


@jit()
def _zero_cols(bits: Any, magnitude: Any) -> Any:
    """Narrow the columns down: all of them over strips of rows while many are left, then one by one."""
    height, width = bits.shape
    seen = np.zeros(width, bits.dtype)
    left = width
    i = 0
    step = 4
    while i < height and left * 8 > width:
        end = min(i + step, height)
        for r in range(i, end):
            for j in range(width):
                seen[j] |= bits[r, j] & magnitude
        left = 0
        for j in range(width):
            left += not seen[j]
        i = end
        step = STRIP
    if i == height or left == 0:
        return left
    columns = np.empty(left, np.int64)
    n = 0
    for j in range(width):
        if not seen[j]:
            columns[n] = j
            n += 1
    while i < height and n:
        k = 0
        while k < n:
            if bits[i, columns[k]] & magnitude:
                n -= 1
                columns[k] = columns[n]
            else:
                k += 1
        i += 1
    return n


@jit()
def lines(counter: Any, todo: Any, addresses: Any, sizes: Any, shapes: Any, wide: Any, out: Any) -> None:
    """Take tensors in turn and count their all-zero rows and columns.

    Args:
        counter: address of the int64 that says which entry of `todo` is next.
        todo: int64 [m], tensors with shapes[t, 0] > 0.
        addresses: as for `kernels.work`.
        sizes: the same.
        shapes: int64 [n, 2], height and width.
        wide: as for `kernels.work`.
        out: int64 [n, WIDTH], which holds the tensors' zeros already.

    """
    while True:
        k = take(counter)
        if k >= len(todo):
            return
        t = todo[k]
        height, width = shapes[t, 0], shapes[t, 1]
        zeros = out[t, ZEROS]
        rows, cols = 0, 0
        if zeros == sizes[t]:
            rows, cols = height, width
        elif wide[t]:
            bits = numba.carray(pointer(addresses[t]), (height, width), np.uint64)
            if zeros >= width:
                rows = _zero_rows(bits, np.uint64(0x7FFFFFFFFFFFFFFF))
            if zeros >= height:
                cols = _zero_cols(bits, np.uint64(0x7FFFFFFFFFFFFFFF))
        else:
            short = numba.carray(pointer(addresses[t]), (height, width), np.uint32)
            if zeros >= width:
                rows = _zero_rows(short, np.uint32(0x7FFFFFFF))
            if zeros >= height:
                cols = _zero_cols(short, np.uint32(0x7FFFFFFF))
        out[t, ZERO_ROWS] = rows
        out[t, ZERO_COLS] = cols
