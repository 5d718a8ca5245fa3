"""The CPU kernels: compiled by numba, kept in its cache on disk, run without the interpreter lock.

Each reads memory by address (int64) and adds to rows laid out as `rows.py` says. One pass: a block of 4096 elements is
read once; its exponents stay in L1, as bytes and as bit planes, and are counted a few bins at a time, which needs neither
branches nor scattered increments. FP64, and what is left of a tensor after whole groups of 64, goes element by element.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from ampscope.probe.stats.jit import jit
from ampscope.probe.stats.rows import EXACT, HISTOGRAM, LOW_BITS, NAN, NEG_INF, POS_INF, TOP, ZEROS
from ampscope.probe.stats.vector import (
    BITS,
    GROUP,
    KNOWN,
    LANES,
    MARKS,
    MOST_GROUPS,
    ROUND,
    SLICED,
    count,
    count_sliced,
    keep_marked,
    lowest_bit,
    pointer,
    split,
)  # fmt: skip

BLOCK = MOST_GROUPS * GROUP
"""Elements of one block."""
SMALL, LARGE = np.float32(2.0**-40).view(np.int32), np.float32(2.0**56).view(np.int32)
"""Bit patterns of the largest magnitude in a block: between them squares may be added in FP32. Beyond, sums overflow; below,
what squares of smaller elements lose to FP32's least number is more than one part in 2^30 of the block's sum."""

_ONE = np.uint64(1)
_MAGNITUDE, _MANTISSA, _INF = np.uint32(0x7FFFFFFF), np.uint32(0x7FFFFF), np.uint32(0x7F800000)


@jit(fastmath={"reassoc", "contract"})
def _special32(bits: Any, row: Any) -> Any:
    """Count NaN and inf of a block that holds some, take the other sums without them; return the sum of squares."""
    squares = 0.0
    low, top = np.uint32(0), np.uint32(0)
    nan, inf, negative = np.int32(0), np.int32(0), np.int32(0)
    for i in range(len(bits)):
        magnitude = bits[i] & _MAGNITUDE
        finite = np.uint32(magnitude) if magnitude < _INF else np.uint32(0)
        nan += np.int32(magnitude > _INF)
        inf += np.int32(magnitude == _INF)
        negative += np.int32(bits[i] == np.uint32(0xFF800000))
        low |= finite
        top = max(top, finite)
        x = np.float64(np.uint32(finite).view(np.float32))
        squares += x * x
    row[NAN] += nan
    row[POS_INF] += inf - negative
    row[NEG_INF] += negative
    row[LOW_BITS] |= np.int64(low & _MANTISSA)
    row[TOP] = max(row[TOP], np.int64(top))
    return squares


@jit(fastmath={"reassoc", "contract"})
def _squares32(values: Any) -> Any:
    """Return the sum of squares in FP64."""
    squares = 0.0
    for i in range(len(values)):
        x = np.float64(values[i])
        squares += x * x
    return squares


@jit()
def _scalar32(bits: Any, row: Any, blanks: Any) -> Any:
    """Count up to 64 elements, note the zeros in blanks[0]; return the sum of squares."""
    squares = 0.0
    low, top, blank = np.uint32(0), np.uint32(0), np.uint64(0)
    for i in range(len(bits)):
        magnitude = np.uint32(bits[i] & _MAGNITUDE)
        if magnitude == 0:
            row[ZEROS] += 1
            blank |= _ONE << np.uint64(i)
            continue
        if magnitude >= _INF:
            row[NAN] += magnitude > _INF
            row[POS_INF] += bits[i] == _INF
            row[NEG_INF] += bits[i] == np.uint32(0xFF800000)
            continue
        exponent = np.int64(magnitude >> np.uint32(23))
        row[HISTOGRAM + exponent] += 1
        if exponent and (magnitude & _MANTISSA) == 0:
            row[EXACT + exponent] += 1
        low |= magnitude
        top = max(top, magnitude)
        x = np.float64(np.uint32(magnitude).view(np.float32))
        squares += x * x
    row[LOW_BITS] |= np.int64(low & _MANTISSA)
    row[TOP] = max(row[TOP], np.int64(top))
    blanks[0] = blank
    return squares


@jit()
def _count_keys(keys: Any, marks: Any, spare: Any, groups: Any, first: Any, last: Any, marked: Any, row: Any) -> None:
    """Count the exponents first … last among `keys`, and those of the `marked` ones."""
    key_address, row_address = keys.ctypes.data, row.ctypes.data
    if first + (last - first + LANES) // LANES * LANES > 256:
        first -= first % LANES  # `count` works in fours and must not go past bin 255
    for k in range(first, last + 1, LANES):
        count(key_address, groups, k, row_address + 8 * HISTOGRAM)
    if marked > 4 * groups:
        keep_marked(key_address, marks.ctypes.data, groups, spare.ctypes.data)
        for k in range(first, last + 1, LANES):
            count(spare.ctypes.data, groups, k, row_address + 8 * EXACT)
    elif marked:
        for g in range(groups):
            word = marks[g]
            while word:
                row[EXACT + np.int64(keys[g * GROUP + np.int64(lowest_bit(word))])] += 1
                word &= word - _ONE


@jit()
def _block32(address: Any, groups: Any, row: Any, blanks: Any, keys: Any, planes: Any, spare: Any, found: Any) -> Any:
    """Count whole groups of 64 FP32 elements; return the sum of squares."""
    plane_address, row_address = planes.ctypes.data, row.ctypes.data
    squares = split(address, groups, keys.ctypes.data, plane_address, blanks.ctypes.data, found.ctypes.data)
    row[ZEROS] += found[3]
    row[HISTOGRAM] += found[4]
    first, last = found[2] + 1, found[1] >> 23
    special = last == 255
    if special:
        last = 254
        squares = _special32(numba.carray(pointer(address), (groups * GROUP,), np.uint32), row)
    else:
        row[LOW_BITS] |= found[0] & np.int64(_MANTISSA)
        row[TOP] = max(row[TOP], found[1])
        if found[1] and not SMALL <= found[1] < LARGE:
            squares = _squares32(numba.carray(pointer(address), (groups * GROUP,), np.float32))
    kept = row[HISTOGRAM]
    if SLICED and not special and (last | (LANES - 1)) - (first - first % LANES) < 1 << BITS:
        rounds = (groups + ROUND - 1) // ROUND
        planes[KNOWN, groups : rounds * ROUND] = 0
        for k in range(first - first % LANES, last + 1, LANES):
            count_sliced(plane_address, rounds, k, row_address + 8 * HISTOGRAM, row_address + 8 * EXACT)
    else:
        _count_keys(keys, planes[MARKS], spare, groups, first, last, found[5], row)
    row[HISTOGRAM], row[EXACT] = kept, 0
    row[HISTOGRAM + 255] = 0
    row[EXACT + 255] = 0
    return squares


@jit()
def chunk32(address: Any, n: Any, row: Any, blanks: Any, keys: Any, planes: Any, spare: Any, found: Any) -> Any:
    """Count n FP32 elements, note the zeros as bits of `blanks`; return the sum of squares."""
    squares = 0.0
    whole = n // GROUP
    done = 0
    while done < whole:
        groups = min(MOST_GROUPS, whole - done)
        here = address + done * (4 * GROUP)
        squares += _block32(here, groups, row, blanks[done:], keys, planes, spare, found)
        done += groups
    if n > whole * GROUP:
        rest = numba.carray(pointer(address + whole * (4 * GROUP)), (n - whole * GROUP,), np.uint32)
        squares += _scalar32(rest, row, blanks[whole:])
    return squares


@jit()
def chunk64(address: Any, n: Any, row: Any, blanks: Any, largest: Any) -> Any:
    """Count n FP64 elements, note the zeros as bits of `blanks`; return the sum of squares.

    Exponents clamp to FP32's range; a clamped element is no exact power. The mantissa is cut to 23 bits, the last
    of them set if more follow.
    """
    bits = numba.carray(pointer(address), (n,), np.uint64)
    values = numba.carray(pointer(address), (n,), np.float64)
    squares, top, low = 0.0, 0.0, np.int64(0)
    blanks[: (n + GROUP - 1) // GROUP] = 0
    for i in range(n):
        magnitude = np.int64(bits[i] & np.uint64(0x7FFFFFFFFFFFFFFF))
        if magnitude == 0:
            row[ZEROS] += 1
            blanks[i // GROUP] |= _ONE << np.uint64(i % GROUP)
            continue
        raw, fraction = magnitude >> 52, magnitude & 0xFFFFFFFFFFFFF
        if raw == 0x7FF:
            row[NAN] += fraction != 0
            row[POS_INF] += fraction == 0 and values[i] > 0
            row[NEG_INF] += fraction == 0 and values[i] < 0
            continue
        exponent = raw - 1023 + 127
        if fraction == 0 and 1 <= exponent <= 254:
            row[EXACT + exponent] += 1
        row[HISTOGRAM + (0 if exponent < 0 else 254 if exponent > 254 else exponent)] += 1
        low |= (fraction >> 29) | np.int64((fraction & 0x1FFFFFFF) != 0)
        squares += values[i] * values[i]
        top = max(top, abs(values[i]))
    row[LOW_BITS] |= low
    largest[0] = max(largest[0], top)
    return squares
