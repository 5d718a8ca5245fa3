"""What a layer's earlier steps say of its zeros: the share that is natural, learned where it was plain, and how far it wanders.

A step with tight bounds tells how many zeros are natural: all that were not flushed. That is so at a loss scale at which nothing flushes, and
where a probe counted. Later steps lean on it as far as it is steadier than their own evidence. Their bounds stay their own, and only become
wider where the history contradicts them. `REFERENCES` of the same stream before a step count: the rows whose histograms were kept or that a
probe looked at. So any row of a log can be read with few others, and sums of integers are exact however the rows are cut: what is derived
while training and what is read later agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ampscope.record.step import MEASURED

Array = np.ndarray[Any, Any]
Found = tuple[Array, Array, Array]
"""(estimate, low, high)."""

REFERENCES = 16
"""Rows that count, at most: the last ones."""
TIGHT = 0.02
"""Width of the bounds up to which a step tells the natural share."""
PRIOR, PRIOR_WEIGHT = 0.15, 2.0
"""How far the share at one step is taken to be from another's (standard deviation), and how many steps that belief is worth."""
FLOOR = 0.01
"""The same, at least."""
CONTRADICTION, SURE = 2.0, 3
"""Standard deviations beyond a bound, and references, from which the history is believed to contradict it."""
PROBED = "probe/k"
"""The observed value that a probe leaves at its step."""
ONE = 1 << 20
"""Fixed point: the share 1."""


class History:
    """Natural shares at the last references of a stream. Rows go in once, in order; the layers stay the same."""

    def __init__(self) -> None:
        self._known = np.zeros((0, 0), np.int64)
        """int64 [R, L]: whether the reference told the layer's share (0 or 1)."""
        self._share = np.zeros((0, 0), np.int64)

    def judge(
        self, own: Found, columns: dict[str, Array], numel: Array, reference: Array, probed: Array | None = None
    ) -> Found:
        """Return (estimate, low, high), float32 [T, L], of the steps' own and of what the references before each say.

        Args:
            own: what each step says by itself, [T, L].
            columns: of the log, [T, L].
            numel: elements a layer, [L].
            reference: bool [T], which rows are references; to later ones, never to themselves.
            probed: elements that a probe counted as flushed, [T, L]; NaN where none did.
        """
        n = np.maximum(numel, 1)
        zeros = columns["zeros"] / n
        before, which = np.cumsum(reference) - reference, np.flatnonzero(reference)
        sound = _sound({name: columns[name][which] for name in ("state", "nan", "pos_inf", "neg_inf")})
        best, low, high = (x[which] for x in own)
        counted = None if probed is None else probed[which] / n
        tight, natural = _natural((best, low, high), zeros[which], sound, counted)
        old = len(self._known)
        known = np.concatenate([self._known, tight]) if old else tight
        share = np.concatenate([self._share, natural]) if old else natural
        stop = before + old
        start = np.maximum(stop - REFERENCES, 0)
        sums = [_sums(x, start, stop) for x in (known, share, share * share)]
        self._known, self._share = known[-REFERENCES:], share[-REFERENCES:]
        return _joined(own, zeros, *sums) if sums[0].any() else own


def _sound(columns: dict[str, Array]) -> Array:
    """Return where there was a gradient, and all of it finite."""
    bad = columns["nan"].astype(np.int64) + columns["pos_inf"] + columns["neg_inf"]
    return np.asarray((columns["state"] == MEASURED) & (bad == 0))


def _natural(own: Found, zeros: Array, sound: Array, probed: Array | None) -> tuple[Array, Array]:
    """Return where the natural share is known (0 or 1), and that share in fixed point; int64 [R, L]."""
    lost, tight = own[0], sound & (own[2] - own[1] <= TIGHT)
    if probed is not None:
        counted = sound & ~np.isnan(probed)
        lost, tight = np.where(counted, probed, lost), tight | counted
    share = np.rint(np.clip(zeros - lost, 0, 1).astype(np.float64) * ONE)
    return tight.astype(np.int64), np.where(tight, share, 0).astype(np.int64)


def _sums(values: Array, start: Array, stop: Array) -> Array:
    total = np.zeros((len(values) + 1, values.shape[1]), np.int64)
    np.cumsum(values, 0, out=total[1:])
    return np.asarray(total[stop] - total[start])


def _joined(own: Found, zeros: Array, count: Array, total: Array, squares: Array) -> Found:
    """Weigh both by their variances; the bounds count as four standard deviations."""
    best, low, high = own
    n = np.maximum(count, 1)
    mean = total / n
    variance = np.maximum(squares / n - mean * mean, 0) / ONE**2
    mean = mean / ONE
    doubt = (PRIOR_WEIGHT * PRIOR**2 + count * variance) / np.maximum(PRIOR_WEIGHT + count - 1, 1) + FLOOR**2
    told, far = np.clip(zeros - mean, 0, zeros), CONTRADICTION * np.sqrt(doubt)
    sure = count >= SURE
    above, below = sure & (told - far > high), sure & (told + far < low)
    width = np.where(high - low > TIGHT, ((high - low) / 4).astype(np.float64) ** 2, 0)
    low, high = np.where(below, told, low), np.where(above, told, high)
    trust = np.where(count > 0, width / (width + doubt), 0)
    best = np.clip(best + trust * (np.clip(told, low, high) - best), low, high)
    return best.astype(np.float32), low.astype(np.float32), high.astype(np.float32)
