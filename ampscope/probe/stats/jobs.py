"""A job for a team of threads: tensors cut into chunks, which the threads take in turn, and what becomes of their counts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from ampscope.probe.stats.jit import STAMP, c_function, jit
from ampscope.probe.stats.kernels import BLOCK, chunk32, chunk64
from ampscope.probe.stats.lines import CHUNK, empty_lines, join_notes, note
from ampscope.probe.stats.rows import (
    EXACT,
    HISTOGRAM,
    LOW_BITS,
    MAX,
    NAN,
    NEG_INF,
    POS_INF,
    SQUARES,
    TOP,
    WIDTH,
    ZERO_COLS,
    ZERO_ROWS,
    ZEROS,
)
from ampscope.probe.stats.vector import GROUP, MOST_GROUPS, PLANES, pointer, take


@jit()
def table(sizes: Any, shapes: Any) -> Any:
    """Return the chunks of tensors, [m, 3]: tensor, first element, elements.

    A chunk of a matrix (`shapes`, [n, 2]: height, width; height 0 where there is none) is whole rows, or a piece of one row
    where that is longer than CHUNK. All int64: a tensor may have more than 2^31 elements.
    """
    m = 0
    for t in range(len(sizes)):
        line, step = _chunking(sizes[t], shapes[t, 0], shapes[t, 1])
        m += sizes[t] // line * ((line + step - 1) // step) if line else 0
    chunks = np.empty((m, 3), np.int64)
    k = 0
    for t in range(len(sizes)):
        line, step = _chunking(sizes[t], shapes[t, 0], shapes[t, 1])
        for start in range(0, sizes[t] if line else 0, max(line, 1)):
            for begin in range(start, start + line, step):
                chunks[k, 0] = t
                chunks[k, 1] = begin
                chunks[k, 2] = min(step, start + line - begin)
                k += 1
    return chunks


@jit()
def _chunking(size: Any, height: Any, width: Any) -> Any:
    """Return (line, step): each `line` elements are cut into chunks of `step`."""
    if height == 0:
        return size, CHUNK
    if width > CHUNK:
        return width, CHUNK
    return size, CHUNK // width * width


@jit()
def _work(
    counter: Any, chunks: Any, addresses: Any, shapes: Any, wide: Any, out: Any, largest: Any, seen: Any, starts: Any,
    sums: Any,
) -> None:  # fmt: skip
    """Take chunks in turn until none is left; for the arguments see `Job`."""
    keys, spare = np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.uint8)
    planes, found = np.empty((PLANES, MOST_GROUPS), np.uint64), np.empty(6, np.int64)
    blanks = np.empty(CHUNK // GROUP + 2, np.uint64)
    while True:
        k = take(counter)
        if k >= len(chunks):
            return
        t, begin, n = chunks[k, 0], chunks[k, 1], chunks[k, 2]
        zeros = out[t, ZEROS]
        if wide[t]:
            sums[k] = chunk64(addresses[t] + begin * 8, n, out[t], blanks, largest[t])
        else:
            sums[k] = chunk32(addresses[t] + begin * 4, n, out[t], blanks, keys, planes, spare, found)
        if shapes[t, 0]:
            notes = seen[starts[t] : starts[t + 1]]
            out[t, ZERO_ROWS] += note(begin, n, out[t, ZEROS] - zeros, shapes[t, 1], blanks, notes)


class Job(NamedTuple):
    """What a team works on, for n tensors in m chunks and `team` threads; `header` ties it together for `member`."""

    header: np.ndarray[Any, np.dtype[np.int64]]
    """Threads that have begun, chunks taken, team, n, m, words of a thread's `seen`; then the arrays' addresses."""
    chunks: np.ndarray[Any, np.dtype[np.int64]]
    """[m, 3], what `table` returned."""
    addresses: np.ndarray[Any, np.dtype[np.int64]]
    """[n], where each tensor is."""
    shapes: np.ndarray[Any, np.dtype[np.int64]]
    """[n, 2], height and width of a matrix."""
    wide: np.ndarray[Any, np.dtype[np.bool_]]
    """[n], whether the elements are FP64."""
    out: np.ndarray[Any, np.dtype[np.int64]]
    """[team, n, WIDTH], the threads' rows."""
    largest: np.ndarray[Any, np.dtype[np.float64]]
    """[team, n, 1], the threads' largest magnitudes of FP64 tensors."""
    seen: np.ndarray[Any, np.dtype[np.uint64]]
    """[team, words], the threads' notes on columns and rows; see `lines.py`."""
    starts: np.ndarray[Any, np.dtype[np.int64]]
    """[n + 1], where in a thread's notes those on each tensor begin."""
    sums: np.ndarray[Any, np.dtype[np.float64]]
    """[m], a sum of squares a chunk, so that the total does not depend on which thread took what."""


_HEADER = 6


def make_job(team: int, chunks: Any, addresses: Any, shapes: Any, wide: Any, starts: Any, out: Any = None) -> Job:
    """Return a job of which nothing is done. `out`: memory for the rows, all zero, if there is some."""
    n, m, words = len(addresses), len(chunks), int(starts[-1])
    arrays = (
        chunks, addresses, shapes, wide, np.zeros((team, n, WIDTH), np.int64) if out is None else out, np.zeros((team, n, 1)),
        np.zeros((team, words), np.uint64), starts, np.zeros(m),
    )  # fmt: skip
    return Job(np.array([0, 0, team, n, m, words, *(a.ctypes.data for a in arrays)]), *arrays)


@jit()
def member(job: Any) -> None:
    """Do a part of the job whose header is at the address `job`: take a place among its threads if one is left."""
    header = numba.carray(pointer(job), (_HEADER + 9,), np.int64)
    me = take(job)
    team, n, m, words = header[2], header[3], header[4], header[5]
    if me >= team:
        return
    at = header[_HEADER:]
    _work(
        job + 8,
        numba.carray(pointer(at[0]), (m, 3), np.int64),
        numba.carray(pointer(at[1]), (n,), np.int64),
        numba.carray(pointer(at[2]), (n, 2), np.int64),
        numba.carray(pointer(at[3]), (n,), np.bool_),
        numba.carray(pointer(at[4] + me * n * WIDTH * 8), (n, WIDTH), np.int64),
        numba.carray(pointer(at[5] + me * n * 8), (n, 1), np.float64),
        numba.carray(pointer(at[6] + me * words * 8), (words,), np.uint64),
        numba.carray(pointer(at[7]), (n + 1,), np.int64),
        numba.carray(pointer(at[8]), (m,), np.float64),
    )


def member_address() -> int:
    """Return the address of `member` as a C function of a pointer, compiled now or read from the cache."""
    stamp = STAMP

    def run_member(job: Any) -> None:
        if stamp == stamp:
            member(job)

    return int(c_function(types.void(types.int64), run_member).address)


@jit()
def join(out: Any, seen: Any, starts: Any, shapes: Any) -> None:
    """Add the other threads' rows and notes to the first one's."""
    for t in range(out.shape[1]):
        row, notes = out[0, t], seen[0, starts[t] : starts[t + 1]]
        for w in range(1, len(out)):
            other = out[w, t]
            low, top = row[LOW_BITS] | other[LOW_BITS], max(row[TOP], other[TOP])
            for k in range(len(row)):
                row[k] += other[k]
            row[LOW_BITS], row[TOP] = low, top
            join_notes(shapes[t, 1], notes, seen[w, starts[t] : starts[t + 1]])


@jit()
def take_out(out: Any, sizes: Any) -> Any:
    """Return (first, length, exponents, exact, numbers) of the joined rows [team, n, WIDTH] of FP32 tensors, and leave zeros there.

    The first four are the fields of `Bins`, the other numbers are int64 [HISTOGRAM, n].
    """
    n = out.shape[1]
    first, length = np.zeros(n, np.int64), np.zeros(n, np.int64)
    numbers = np.empty((HISTOGRAM, n), np.int64)
    for t in range(n):
        row = out[0, t]
        left = sizes[t] - row[ZEROS] - row[NAN] - row[POS_INF] - row[NEG_INF]
        if left > 0:  # down from the bin of the largest, until every element is found
            b = row[TOP] >> 23
            length[t] = b + 1
            while left > row[HISTOGRAM + b] and b > 0:
                left -= row[HISTOGRAM + b]
                b -= 1
            first[t] = b
            length[t] -= b
        for c in range(HISTOGRAM):
            numbers[c, t] = row[c]
    total = length.sum()
    exponents, exact = np.empty(total, np.int64), np.empty(total, np.int64)
    at = 0
    for t in range(n):
        for b in range(first[t], first[t] + length[t]):
            exponents[at] = out[0, t, HISTOGRAM + b]
            exact[at] = out[0, t, EXACT + b]
            at += 1
        for w in range(out.shape[0]):
            row = out[w, t]
            for c in range(HISTOGRAM):
                row[c] = 0
            for b in range(first[t], first[t] + length[t]):
                row[HISTOGRAM + b] = 0
                row[EXACT + b] = 0
    return first, length, exponents, exact, numbers


@jit()
def finish(
    out: Any,
    reals: Any,
    largest: Any,
    seen: Any,
    starts: Any,
    sums: Any,
    chunks: Any,
    shapes: Any,
    sizes: Any,
    wide: Any,
) -> None:
    """Fill `reals` [n, 2] and the columns of rows and columns from what the threads left."""
    for k in range(len(chunks)):
        reals[chunks[k, 0], SQUARES] += sums[k]
    for t in range(len(out)):
        top = np.uint32(out[t, TOP])
        if out[t, NAN] + out[t, POS_INF] + out[t, NEG_INF] == sizes[t]:
            reals[t, MAX] = np.nan
        elif wide[t]:
            for w in range(len(largest)):
                reals[t, MAX] = max(reals[t, MAX], largest[w, t, 0])
        elif top < np.uint32(0x800000):
            # Not by way of an FP32 number: the processor may flush it.
            reals[t, MAX] = np.float64(out[t, TOP]) * 2.0**-149
        else:
            reals[t, MAX] = np.float64(top.view(np.float32))
        if shapes[t, 0]:
            rows, cols = empty_lines(shapes[t, 0], shapes[t, 1], seen[starts[t] : starts[t + 1]])
            out[t, ZERO_ROWS] += rows
            out[t, ZERO_COLS] = cols
        else:
            out[t, ZERO_ROWS] = -1
            out[t, ZERO_COLS] = -1
