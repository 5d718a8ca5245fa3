"""The recorded histograms of a run, added up so that any scale and format can be asked of them at once.

With the loss scale S = m * 2^e of a step (1 <= m < 2), g_s / 2^e = g * m. So histograms of steps whose scales share m
add up after a shift by e, and `|g| * target <= limit` reads `|g| * m <= limit * m / target` in the sum. Scales of a
GradScaler with factors 2 and 0.5 all share one m, and one table holds the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ampscope.record.step import BINS, MEASURED

if TYPE_CHECKING:
    from ampscope.run.run import Run

Array = np.ndarray[Any, Any]

BIAS = 127
SHIFT = 150
"""Exponents of a loss scale reach from -149 to 127; bins are moved by up to that much."""
WIDTH = BINS + 2 * SHIFT
LOST = ("underflow_ratio", "underflow_ratio_low", "underflow_ratio_high")
ROWS_AT_ONCE = 1 << 23
"""Histogram bins read at a time (64 MB)."""


@dataclass(frozen=True, slots=True)
class Count:
    """Elements a layer, float64 [L]: best value, and bounds that hold the truth.

    All three are equal where the count is exact.
    """

    value: Array
    low: Array
    high: Array

    def __add__(self, other: Count) -> Count:
        return Count(self.value + other.value, self.low + other.low, self.high + other.high)


class Table:
    """A histogram of u = |g| * m, a layer: bin i counts 2^k <= u < 2^(k+1) with k = i - BIAS - SHIFT."""

    def __init__(self, n_layers: int) -> None:
        self.counts = np.zeros((n_layers, WIDTH), np.int64)
        self.exact = np.zeros((n_layers, WIDTH), np.int64)
        self.tiny = np.zeros((n_layers, WIDTH), np.int64)
        """FP32 subnormals, whose binade is not known: bin i counts 0 < u < 2^(k+1)."""
        self._below: tuple[Array, Array] | None = None
        self._has_tiny = False

    def add(self, counts: Array, exact: Array, exponent: int) -> None:
        """Add histograms [L, 256] of g_s at a scale m * 2^exponent."""
        first = SHIFT - int(np.clip(exponent, -SHIFT, SHIFT))
        self.counts[:, first + 1 : first + BINS] += counts[:, 1:]
        self.exact[:, first + 1 : first + BINS] += exact[:, 1:]
        self.tiny[:, first] += counts[:, 0]
        self._has_tiny |= bool(counts[:, 0].any())
        self._below = None

    def at_most(self, limit: float) -> Count:
        """Count elements 0 < u <= limit.

        Within a binade density is taken as uniform; at a power of two the count is exact.
        """
        return self._count(limit, inclusive=True)

    def under(self, limit: float) -> Count:
        """Count elements 0 < u < limit, in the same way."""
        return self._count(limit, inclusive=False)

    def _count(self, limit: float, inclusive: bool) -> Count:
        significand, power = math.frexp(limit)
        at = int(np.clip(power - 1 + BIAS + SHIFT, 0, WIDTH - 1))
        part = 2 * significand - 1
        if self._below is None:
            self._below = _before(self.counts), _before(self.tiny)
        counts, tiny = self._below
        sure = counts[:, at].astype(np.float64)
        if inclusive or part > 0:
            sure += self.exact[:, at]
        inside = (self.counts[:, at] - self.exact[:, at]).astype(np.float64) if part > 0 else np.zeros(len(sure))
        if not self._has_tiny:
            return Count(sure + part * inside, sure, sure + inside)
        # FP32 subnormals of a scale whose 2^(k+1) is at most the limit are sure; of the others the share limit /
        # 2^(k+1) is guessed.
        sure += tiny[:, at]
        later = self.tiny[:, at:]
        guessed = (later * np.minimum(limit / 2.0 ** (np.arange(at, WIDTH) - BIAS - SHIFT + 1.0), 1.0)).sum(1)
        return Count(sure + part * inside + guessed, sure, sure + inside + later.sum(1))

    @property
    def total(self) -> Array:
        """Elements, int64 [L]: non-zero and finite."""
        return np.asarray(self.counts.sum(1) + self.tiny.sum(1))


def _before(counts: Array) -> Array:
    """Return, for each bin, the elements in the bins before it."""
    return np.asarray(np.cumsum(counts, 1) - counts)


@dataclass(frozen=True)
class Tally:
    """What `what_if` needs of a run. Arrays over layers are [L], over distinct loss scales [G]."""

    layers: tuple[str, ...]
    steps: Array
    """int64 [H]: the steps added up."""
    tables: dict[float, Table]
    """m → histogram."""
    scales: Array
    """float64 [G], ascending."""
    elements: Array
    zeros: Array
    nan: Array
    infinite: dict[tuple[float, float], Array]
    """(scale they came at, smallest scale at which they may have come) → inf elements, int64 [L]; the second is 0 for
    any scale.
    """
    lost: Array
    """float64 [3, G, L]: elements flushed by FP16 before they were recorded: estimate, low, high."""
    largest: Array
    """float64 [L]: largest finite |g|; NaN if none is finite."""


def tally(run: Run, rows: Array, ranks: list[int], limit: Array) -> Tally:
    """Add up the histograms of some steps.

    Args:
        run: the run.
        rows: positions in `run.steps`, ascending; those at which the loss scale is 0 or not finite are left out.
        ranks: the ranks to add up: several only where gradients are sharded.
        limit: [T], the smallest scale at which a step overflows (`ampscope.analysis.overflow`).
    """
    layers = run.layers
    n = len(layers)
    scale = run.scalar("loss_scale", ranks[0])
    rows = rows[np.isfinite(scale[rows]) & (scale[rows] > 0)]
    scales = np.unique(scale[rows])

    def none() -> Array:
        return np.zeros(n, np.int64)

    names = tuple(layer.name for layer in layers)
    lost = np.zeros((3, len(scales), n))
    out = Tally(names, run.steps[rows], {}, scales, none(), none(), none(), {}, lost, np.full(n, np.nan))
    at_once = max(1, ROWS_AT_ONCE // max(n * BINS, 1))
    for rank in ranks:
        for start in range(0, len(rows), at_once):
            _add(out, run, rows[start : start + at_once], scale, limit, rank)
    return out


def _add(out: Tally, run: Run, rows: Array, scale: Array, limit: Array, rank: int) -> None:
    columns = run.columns(("state", "zeros", "nan", "pos_inf", "neg_inf", "max_abs"), rank, rows)
    counts, exact = run.histograms(rows, rank), run.histograms(rows, rank, exact=True)
    on = columns["state"] == MEASURED
    infinite = (columns["pos_inf"].astype(np.int64) + columns["neg_inf"]) * on
    elements = (columns["zeros"].astype(np.int64) + columns["nan"]) * on + infinite + counts.sum(-1)
    shares = list(run.several(LOST, rank, rows).values())
    out.elements[:] += elements.sum(0)
    out.zeros[:] += (columns["zeros"] * on).sum(0, dtype=np.int64)
    out.nan[:] += (columns["nan"] * on).sum(0, dtype=np.int64)
    top = np.where(on, columns["max_abs"].astype(np.float64), np.nan) / scale[rows][:, None]
    out.largest[:] = np.fmax(out.largest, np.fmax.reduce(top, axis=0))
    for s in np.unique(scale[rows]):
        mine = scale[rows] == s
        g = int(np.searchsorted(out.scales, s))
        significand, power = math.frexp(s)
        table = out.tables.setdefault(2 * significand, Table(len(out.layers)))
        table.add(counts.sum(0, where=mine[:, None, None]), exact.sum(0, where=mine[:, None, None]), power - 1)
        for i, share in enumerate(shares):
            out.lost[i, g] += np.nan_to_num(share[mine].astype(np.float64) * elements[mine]).sum(0)
    for i in np.flatnonzero(infinite.any(1)).tolist():
        reach = float(min(limit[rows[i]], scale[rows[i]]))
        key = (float(scale[rows[i]]), 2.0 ** math.floor(math.log2(reach)) if reach > 0 else 0.0)
        out.infinite[key] = out.infinite.get(key, 0) + infinite[i]
