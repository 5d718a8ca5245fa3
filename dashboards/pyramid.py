"""Summaries of long runs that grow with them: any zoom is answered from a few thousand numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .decimate import POINTS, pick

Array = np.ndarray[Any, Any]

BLOCK = 64
"""Rows of the smallest summary. Small enough that 600 columns of raw rows are read in 0.1 s, large enough that a million
rows of 64 layers shrink to 4 MB a metric."""
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
