"""What a simulated scaler wastes, and the setting of a small grid that wastes least."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ampscope.analysis.formats import FP16
from ampscope.analysis.overflow import Limits
from ampscope.analysis.policy import Recorded, Settings, Simulation, simulate
from ampscope.analysis.shares import already, flushed
from ampscope.analysis.tally import tally
from ampscope.analysis.window import EXPONENTS

if TYPE_CHECKING:
    from ampscope.run.run import Run

Array = np.ndarray[Any, Any]

NEIGHBOURS = 50
"""Steps before and after one that must bear a scale for it to count as safe there."""
HISTOGRAMS = 256
"""Steps whose histograms are read, spread evenly."""
INIT_SCALES = tuple(2.0**k for k in range(0, 25, 2))
INTERVALS = (20, 50, 100, 200, 500, 1000, 2000, 5000)
"""The grid searched for the best setting."""


class Cost:
    """What steps at a scale cost: 1 if skipped, else the share of gradient elements flushed that a safe scale keeps."""

    def __init__(self, run: Run, found: Limits) -> None:
        self._share = np.zeros(len(EXPONENTS))
        rows = run.histogram_rows()
        if found.format is FP16 and len(rows):
            rows = rows[np.unique(np.linspace(0, len(rows) - 1, HISTOGRAMS).astype(np.int64))]
            t = tally(run, rows, run.ranks[:1], found.limit)
            total = max(
                float((t.elements - t.nan - sum(t.infinite.values(), np.zeros(len(t.layers), np.int64))).sum()), 1.0
            )
            for i, j in enumerate(EXPONENTS):
                self._share[i] = (flushed(t, FP16, 2.0**j).value + already(t, FP16, 2.0**j)[0]).sum() / total
        self._safe = self._at(_least(np.where(found.limit > 0, found.limit, np.inf)) / 2)

    def _at(self, scale: Array) -> Array:
        """Return the share flushed at a scale, or at the next smaller power of two."""
        with np.errstate(divide="ignore"):
            k = np.floor(np.log2(scale))
        k = np.where(np.isfinite(k), k, np.where(scale > 1, EXPONENTS[-1], EXPONENTS[0]))
        return np.asarray(self._share[np.clip(k.astype(np.int64), EXPONENTS[0], EXPONENTS[-1]) - EXPONENTS[0]])

    def of(self, out: Simulation) -> Array:
        """Return the cost of each step of a simulation, float64 [T]."""
        return np.where(out.skipped, 1.0, np.maximum(self._at(out.loss_scale) - self._safe, 0.0))


def _least(limit: Array) -> Array:
    """Return the least limit among each step's neighbours."""
    width = 2 * NEIGHBOURS + 1
    padded = np.concatenate([np.full(NEIGHBOURS, np.inf), limit, np.full(NEIGHBOURS, np.inf)])
    out = np.full(len(limit), np.inf)
    reach = 1
    while 2 * reach <= width:  # minima of 1, 2, 4, … steps, then two that overlap
        padded = np.minimum(padded[:-reach], padded[reach:])
        reach *= 2
    rest = width - reach
    out = np.minimum(padded[: len(limit)], padded[rest : rest + len(limit)])
    return np.asarray(out)


def search_best(
    limit: Array, record: Recorded, cost: Cost, own: Settings, override: dict[str, Any]
) -> tuple[Settings, Simulation, float]:
    """Try initial scales, then growth intervals at the best of them.

    Of equals the one nearest to the setting at hand wins.
    """
    out = simulate(limit, record, override)
    best, best_out, least = own, out, float(cost.of(out).sum())
    for name, values in (("init_scale", INIT_SCALES), ("growth_interval", INTERVALS)):
        base, now = best, math.log2(getattr(best, name))
        for value in sorted(values, key=lambda v: (abs(math.log2(v) - now), v)):
            one: dict[str, Any] = {name: value}
            tried = replace(base, **one)
            out = simulate(limit, record, asdict(tried))
            wasted = float(cost.of(out).sum())
            if wasted < least - 1e-9:
                best, best_out, least = tried, out, wasted
    return best, best_out, least
