"""Summaries of long runs that grow with them: any zoom is answered from a few thousand numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .decimate import POINTS, pick

Array = np.ndarray[Any, Any]

BLOCK = 32
"""Rows of the smallest summary: small enough that a window too long to be read from the log itself still has some 60 of
them, large enough that a million rows of 64 layers shrink to 16 MB a metric."""
FACTOR = 8


class LinePyramid:
    """Rows that may be drawn of one growing line: of each block the first least, first greatest and first non-finite."""

    def __init__(self) -> None:
        self.levels: list[Array] = []
        """Level k: int64 [blocks, 3], rows or -1; a block of level k has BLOCK * FACTOR^k rows."""

    def extend(self, values: Array, settled: int) -> None:
        """Take in the blocks that lie wholly within the first `settled` rows and are not in yet. Cost: the new rows."""
        size, level = BLOCK, 0
        while True:
            if level == len(self.levels):
                self.levels.append(np.zeros((0, 3), np.int64))
            have = len(self.levels[level])
            want = settled // size
            if want > have:
                fresh = self._raw(values, have, want) if level == 0 else self._merge(values, level, have, want)
                self.levels[level] = np.concatenate([self.levels[level], fresh])
            if want < FACTOR:
                return
            size, level = size * FACTOR, level + 1

    @staticmethod
    def _raw(values: Array, have: int, want: int) -> Array:
        part = values[have * BLOCK : want * BLOCK].reshape(-1, BLOCK)
        finite = np.isfinite(part)
        base = np.arange(have, want, dtype=np.int64) * BLOCK
        some, gap = finite.any(1), ~finite.all(1)
        low = np.where(some, base + np.where(finite, part, np.inf).argmin(1), -1)
        high = np.where(some, base + np.where(finite, part, -np.inf).argmax(1), -1)
        return np.stack([low, high, np.where(gap, base + (~finite).argmax(1), -1)], 1)

    def _merge(self, values: Array, level: int, have: int, want: int) -> Array:
        below = self.levels[level - 1][have * FACTOR : want * FACTOR].reshape(-1, FACTOR, 3)
        at = np.arange(len(below))
        out = np.full((len(below), 3), -1, np.int64)
        for k, (worst, choose) in enumerate(((np.inf, np.argmin), (-np.inf, np.argmax))):
            rows = below[:, :, k]
            seen = np.where(rows >= 0, values[np.maximum(rows, 0)], worst)
            out[:, k] = rows[at, choose(seen, 1)]
            out[:, k] = np.where((rows >= 0).any(1), out[:, k], -1)
        gaps = below[:, :, 2]
        out[:, 2] = gaps[at, (gaps >= 0).argmax(1)]
        return out

    def pick(self, values: Array, start: int, stop: int, points: int = POINTS) -> Array:
        """Return the rows to draw of rows [start, stop): see `decimate.pick`. Every extreme of the window is among them."""
        n = stop - start
        level = -1
        while level + 1 < len(self.levels) and BLOCK * FACTOR ** (level + 1) * points <= n:
            level += 1
        if level < 0 or not len(self.levels[level]):
            return start + pick(values[start:stop], points)
        size = BLOCK * FACTOR**level
        first, last = -(-start // size), min(stop // size, len(self.levels[level]))
        if last <= first:
            return start + pick(values[start:stop], points)
        inside = self.levels[level][first:last].ravel()
        ends = np.arange(first + 1, last + 1, dtype=np.int64) * size - 1
        rows = np.concatenate(
            [[start], np.arange(start, first * size), inside[inside >= 0], ends, np.arange(last * size, stop)]
        )
        rows = np.unique(rows)
        return np.asarray(rows[pick(values[rows], points)], np.int64)


@dataclass
class TablePyramid:
    """Least and greatest value a block of rows and layer, of one metric (for flags: the bits that were set).

    Rows are taken in order; those beyond the last full block are left for later.
    """

    low: list[Array] = field(default_factory=list)
    high: list[Array] = field(default_factory=list)

    def extend(self, values: Array) -> None:
        """Take in [n, L] further rows; n must be a multiple of `BLOCK`."""
        if len(values):
            starts = np.arange(0, len(values), BLOCK)
            self.low.append(reduce_rows(values, starts, least=True))
            self.high.append(reduce_rows(values, starts, least=False))

    @property
    def rows(self) -> int:
        """Rows taken in."""
        return BLOCK * sum(map(len, self.high))

    def table(self, least: bool) -> Array:
        """Return [blocks, L]."""
        parts = self.low if least else self.high
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]
        return parts[0] if parts else np.zeros((0, 0), np.float32)


def reduce_rows(values: Array, starts: Array, least: bool) -> Array:
    """Return the least or greatest value of each run of rows that begins at one of `starts`.

    Args:
        values: [n, L]; floats may be NaN (no value), unsigned integers are bits to be joined.

    Returns:
        [len(starts), L]; NaN where a run holds no value.
    """
    if not len(starts):
        return values[:0]
    if values.dtype.kind == "u":
        return np.asarray(np.bitwise_or.reduceat(values, starts, axis=0))
    reduce = np.fmin if least else np.fmax  # unlike minimum and maximum these pass over NaN
    return np.asarray(reduce.reduceat(values, starts, axis=0))


class HistogramSummary:
    """Histograms of all layers added up over blocks of steps; blocks are joined in pairs when they become too many."""

    MOST = 1600
    """Blocks kept at most; at 200 layers and 40 used binades they take 50 MB."""

    def __init__(self, n_layers: int, bins: int = 256) -> None:
        self._n_layers, self._bins = n_layers, bins
        self._first, self._last = bins, 0
        self._sums = np.zeros((0, n_layers, 0), np.int64)
        self._steps = np.zeros((0, 3), np.int64)
        self.each = 1
        """Histograms a block holds at most."""
        self.taken = 0
        """Histograms taken in."""

    def extend(self, steps: Array, counts: Array) -> None:
        """Take in histograms: steps int64 [n], counts int64 [n, L, bins]."""
        if not len(steps):
            return
        used = np.flatnonzero(counts.any((0, 1)))
        if len(used):
            self._widen(min(self._first, int(used[0])), max(self._last, int(used[-1]) + 1))
        counts = counts[:, :, self._first : self._last]
        open_ = len(self._steps) and int(self._steps[-1, 2]) < self.each
        at = 0
        if open_:
            at = min(self.each - int(self._steps[-1, 2]), len(steps))
            self._sums[-1] += counts[:at].sum(0)
            self._steps[-1, 1:] = steps[at - 1], self._steps[-1, 2] + at
        if at < len(steps):
            starts = np.arange(at, len(steps), self.each)
            sums = np.add.reduceat(counts[at:], starts - at, axis=0)
            ends = np.append(starts[1:], len(steps))
            rows = np.stack([steps[starts], steps[ends - 1], ends - starts], 1)
            self._sums = np.concatenate([self._sums, sums])
            self._steps = np.concatenate([self._steps, rows])
        self.taken += len(steps)
        while len(self._steps) > self.MOST:
            self._halve()

    def _widen(self, first: int, last: int) -> None:
        if self._last <= self._first:
            self._sums = np.zeros((len(self._steps), self._n_layers, last - first), np.int64)
        elif (first, last) != (self._first, self._last):
            wide = ((0, 0), (0, 0), (self._first - first, last - self._last))
            self._sums = np.pad(self._sums, wide)
        self._first, self._last = first, last

    def _halve(self) -> None:
        even = len(self._steps) // 2 * 2
        pairs = self._steps[:even].reshape(-1, 2, 3)
        joined = np.stack([pairs[:, 0, 0], pairs[:, 1, 1], pairs[:, :, 2].sum(1)], 1)
        sums = self._sums[:even].reshape(-1, 2, *self._sums.shape[1:]).sum(1)
        self._steps = np.concatenate([joined, self._steps[even:]])
        self._sums = np.concatenate([sums, self._sums[even:]])
        self.each *= 2

    def of(self, layer: int, low: float, high: float) -> tuple[Array, Array, Array]:
        """Return (first steps [B], histograms in each [B], counts int64 [B, bins]) of one layer's blocks that touch [low, high]."""
        mine = (self._steps[:, 1] >= low) & (self._steps[:, 0] <= high)
        counts = np.zeros((int(mine.sum()), self._bins), np.int64)
        if self._last > self._first:
            counts[:, self._first : self._last] = self._sums[mine, layer]
        return self._steps[mine, 0], self._steps[mine, 2], counts
