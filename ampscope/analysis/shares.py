"""What a format and scale do to tallied gradients: elements flushed, subnormal, overflowing.

docs/what-if.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ampscope.analysis.formats import FP16, Format
from ampscope.analysis.tally import Count, Table, Tally

Array = np.ndarray[Any, Any]


def _sum(t: Tally, one: Callable[[float, Table], Count]) -> Count:
    zero = np.zeros(len(t.layers))
    total = Count(zero, zero, zero)
    for m, table in t.tables.items():
        total = total + one(m, table)
    return total


def flushed(t: Tally, form: Format, scale: float) -> Count:
    """Count elements that are not zero in the record and are zero after the cast."""
    return _sum(t, lambda m, table: table.at_most(form.flush_limit * m / scale))


def subnormal(t: Tally, form: Format, scale: float) -> Count:
    """Count survivors below the smallest normal.

    The low bound leaves out the binade below it, whose uppermost values round up to it.
    """

    def one(m: float, table: Table) -> Count:
        flushed = table.at_most(form.flush_limit * m / scale)
        under, half = table.under(form.min_normal * m / scale), table.at_most(form.min_normal / 2 * m / scale)
        high = np.maximum(under.high - flushed.low, 0)
        return Count(high, np.minimum(np.maximum(half.low - flushed.high, 0), high), high)

    return _sum(t, one)


def overflowing(t: Tally, form: Format, scale: float) -> Count:
    """Count elements beyond the range: bounds from the binade that holds the limit, tightened by the largest value.

    An inf of the record is sure at its own scale and above, and possible as far down as its step may have overflowed.
    """

    def one(m: float, table: Table) -> Count:
        inside = table.at_most(form.overflow * m / scale)
        total = table.total.astype(np.float64)
        return Count(total - inside.value, total - inside.high, total - inside.low)

    found = _sum(t, one)
    none = ~form.overflows(np.nan_to_num(t.largest) * scale)
    low, high = np.where(none, 0.0, np.maximum(found.low, 1)), np.where(none, 0.0, np.maximum(found.high, 1))
    for (at, reach), count in t.infinite.items():
        low = low + count * (at <= scale and form.overflow <= FP16.overflow)
        high = high + count * (reach <= scale)
    return Count(high, low, high)


def already(t: Tally, form: Format, scale: float) -> Array:
    """Return elements flushed before the record and here too, [3, L]: estimate, low, high.

    They lie below FP16's limit at the recorded scale. Where the limit asked for is no lower all of them flush; where it
    is lower by a factor f, density near zero being uniform, a share f of them does (none at least, all at most).
    """
    factor = (form.flush_limit / scale) / (FP16.flush_limit / t.scales)
    out = np.zeros((3, len(t.layers)))
    out[0] = (t.lost[0] * np.minimum(factor, 1)[:, None]).sum(0)
    out[1] = t.lost[1][factor >= 1].sum(0)
    out[2] = t.lost[2].sum(0)
    return out
