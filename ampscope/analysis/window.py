"""Which loss scales suit every layer, and what to do where none does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ampscope.analysis.formats import BF16, FP16, Format
from ampscope.analysis.shares import already, flushed
from ampscope.analysis.tally import Tally

Array = np.ndarray[Any, Any]

EXPONENTS = range(-40, 128)
"""Powers of two tried as loss scales; a GradScaler's scale ends at 2^127."""


def windows(t: Tally, form: Format, share: float) -> tuple[Array, Array]:
    """Return (smallest, largest good scale) a layer: powers of two [L]; NaN where nothing but zeros was measured.

    The smallest is the first at which at most `share` of the finite elements is flushed (inf if there is none), the
    largest the last at which nothing overflows (0 if there is none).
    """
    finite = t.elements - t.nan - sum(t.infinite.values(), np.zeros(len(t.layers), np.int64))
    n = np.maximum(finite, 1)
    low, high, first_inf = np.full(len(n), np.inf), np.zeros(len(n)), np.full(len(n), np.inf)
    for (at, reach), count in t.infinite.items():
        first_inf = np.where((count > 0) & (reach > 0), np.minimum(first_inf, at), first_inf)
    top = np.nan_to_num(t.largest)
    for scale in (2.0**j for j in EXPONENTS):
        lost = (flushed(t, form, scale).value + already(t, form, scale)[0]) / n
        low = np.where((lost <= share) & np.isinf(low), scale, low)
        fits = ~form.overflows(top * scale)
        if form.overflow <= FP16.overflow:
            fits &= scale < first_inf
        high = np.where(fits, scale, high)
    known = sum((table.total for table in t.tables.values()), np.zeros(len(n), np.int64)) > 0
    return np.where(known, low, np.nan), np.where(known, high, np.nan)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The window of scales that suit every layer, if there is one; else which layers are in its way, and what to do."""

    window: tuple[float, float] | None
    misfits: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


def judge(t: Tally, form: Format, share: float, low: Array, high: Array, largest: float, overflowed: float) -> Verdict:
    """Join the layers' windows.

    Args:
        t: the histograms.
        form: the format asked for.
        share: the underflow that is still good.
        low: each layer's smallest good scale (`windows`).
        high: each layer's largest.
        largest: largest finite |g| over all recorded steps, those without histograms too.
        overflowed: smallest scale at which a step overflowed because of the scale.
    """
    names, known = t.layers, ~np.isnan(low)
    if not known.any():
        return Verdict(
            None,
            (),
            ("No finite gradient other than zero was recorded in these steps: nothing can be said about scales.",),
        )
    alone = np.flatnonzero(known & (low > high))
    if len(alone):
        return Verdict(None, tuple(names[i] for i in alone), _apart(t, form, share, low, high, alone))
    tops = [2.0**j for j in EXPONENTS if not form.overflows(largest * 2.0**j)]
    if form.overflow <= FP16.overflow:
        tops = [s for s in tops if s < overflowed]
    cap = min(float(high[known].min()), max(tops, default=0.0))
    floor = float(low[known].max())
    if floor <= cap:
        return Verdict((floor, cap))
    needy = [names[i] for i in np.flatnonzero(known & (low > cap))]
    big = [names[i] for i in np.flatnonzero(known & (high < floor))]
    who = f"{_list(big)} {'overflows' if len(big) == 1 else 'overflow'}" if big else "a recorded step overflows"
    text = (
        f"No one loss scale fits all layers: {_list(needy)} {'needs' if len(needy) == 1 else 'need'} at least "
        f"{power(floor)}, and {who} above {power(cap)}. Give them scales of their own (multiply the gradient inside the "
        "model and divide it again), or run them in FP32 or BF16."
    )
    return Verdict(None, tuple(needy), (text,))


def _apart(t: Tally, form: Format, share: float, low: Array, high: Array, which: Array) -> tuple[str, ...]:
    """Return advice for layers whose own range is too wide for the format."""
    names, worst = [t.layers[i] for i in which], which[0]
    need = f"needs {power(low[worst])}" if np.isfinite(low[worst]) else "would need more than any scale"
    top = f"overflows above {power(high[worst])}" if high[worst] > 0 else "overflows at every scale"
    out = [
        f"No scale suits {_list(names)} in {form.name}: {names[0]} {need} to lose no more than {share:.2g} of its elements "
        f"and {top}. Run {'it' if len(names) == 1 else 'them'} in FP32 (torch.autocast(..., enabled=False) around the "
        "module, inputs as .float())."
    ]
    if form is not BF16:
        lost = flushed(t, BF16, 1.0).value[which] / np.maximum(t.elements[which], 1)
        if (lost <= share).all() and not BF16.overflows(np.nan_to_num(t.largest[which])).any():
            out.append(f"BF16 holds {'its' if len(names) == 1 else 'their'} whole range without a scaler.")
    return tuple(out)


def _list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def power(x: float) -> str:
    """Return a loss scale as text: 2^k where it is a power of two."""
    if not (0 < x < math.inf):
        return f"{x:g}"
    significand, exponent = math.frexp(x)
    return f"2^{exponent - 1}" if significand == 0.5 else f"{x:g}"
