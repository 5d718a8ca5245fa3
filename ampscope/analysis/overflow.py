"""Which loss scales each recorded step would have borne: what `replay` and the window of `what_if` rest on.

The record holds each step's outcome at one scale, and the largest gradient of the parameters. What a step would do at
another scale follows from three rules (docs/what-if.md): a step that was finite is finite at every smaller scale; a
step that overflowed because of the scale overflows at every larger one; between, it overflows where the largest
gradient, times the scale, leaves the format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ampscope.analysis.formats import BF16, FP16, Format
from ampscope.record.step import MEASURED

if TYPE_CHECKING:
    from ampscope.record.step import Event
    from ampscope.run.run import Run

Array = np.ndarray[Any, Any]

PLAUSIBLE = 2.0**6
"""An overflow is put down to the scale where the gradients known of that time come within this factor of the format's
limit: inside the backward pass, values were seen up to some tens of times as large as the largest parameter gradient,
not thousands.
"""
FP32_OVERFLOW = float((2 - 2.0**-24) * 2.0**127)
ROWS = 2048
"""Steps whose layer columns are read at a time."""
LOOKED_AT = 32
"""Steps looked at for the format."""
FINE = 2.0**-12
"""Above this, FP16 has all its bits; far below, its subnormals have as few as BF16."""


@dataclass(frozen=True)
class Limits:
    """Arrays are [T], over the run's steps."""

    recorded_scale: Array
    skipped: Array
    """bool: what the recorded scaler did."""
    largest: Array
    """Largest finite |g| of any layer (unscaled); NaN where it was not measured and no neighbour was, or nothing was
    finite.
    """
    limit: Array
    """Smallest loss scale at which the step overflows: 0 where every scale does, inf where none does."""
    by_scale: Array
    """bool: it was skipped, and a smaller scale would have carried it."""
    hopeless: Array
    """bool: it was skipped, and would be at any scale (NaN or inf in data, forward pass or a derivative)."""
    gain: float
    """How many times the largest value inside backward exceeds the largest parameter gradient, as the recorded
    overflows tell; 1 if there were none.
    """
    format: Format | None
    """The format gradients went through; None is FP32."""
    unknown: int
    """Skipped steps without any finite step near them to judge by."""


def limits(run: Run) -> Limits:
    """Work out which scales each step would have borne."""
    ranks = run.ranks if run.metadata.get("gradients") == "sharded" else run.ranks[:1]
    scale, skipped = run.scalar("loss_scale"), run.scalar("skipped") > 0
    form = born_in(run)
    beyond = FP32_OVERFLOW if form is None else form.overflow
    top = _largest(run, ranks, scale)
    finite = ~skipped & np.isfinite(top)
    near = np.fmax(_fill(top, finite), _fill(top[::-1], finite[::-1])[::-1])
    largest = np.where(~skipped & np.isnan(top), near, top)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        edge = beyond / scale
        hopeless, unknown = _hopeless(run, skipped, edge, np.fmax(near, top))
        by_scale = skipped & ~hopeless
        gain = _gain(by_scale, edge, largest, finite)
        reach = beyond / (gain * largest)
        limit = np.where(np.isnan(reach), np.inf, np.maximum(reach, np.nextafter(scale, np.inf)))
        needed = np.fmax(near, top) * gain
        limit[by_scale] = np.fmin(scale, beyond / needed)[by_scale]
        limit[by_scale & unknown] = _lowest_of_chain(scale, skipped)[by_scale & unknown]
    limit[hopeless] = 0.0
    return Limits(scale, skipped, largest, limit, by_scale, hopeless, gain, form, int((skipped & unknown).sum()))


def born_in(run: Run) -> Format | None:
    """Return the format the gradients went through: FP16 or BF16 under autocast, or None for FP32.

    The audit of a step saw which formats products were in. Without one: None where no layer's values lie on the FP16
    grid; sums over micro-batches and ranks leave it, and FP16 is taken for granted there.
    """
    for event in run.events:
        if event.data.get("topic") == "audit" and event.data.get("matmuls"):
            used = {str(k).removeprefix("torch.") for k in event.data["matmuls"]}
            return FP16 if "float16" in used else BF16 if "bfloat16" in used else None
    sampled = np.flatnonzero(np.isfinite(run.scalar("grad_norm")))
    if not len(sampled):
        return FP16
    rows = sampled[np.unique(np.linspace(0, len(sampled) - 1, LOOKED_AT).astype(np.int64))]
    columns = run.columns(("state", "low_bits", "max_abs"), 0, rows)
    top = np.where(columns["state"] == MEASURED, columns["max_abs"], 0)
    bits = columns["low_bits"][top > 0].astype(np.int64)
    if not len(bits):
        return FP16
    wide = columns["low_bits"][top > FINE].astype(np.int64)
    if (bits & 0xFFFF == 0).all() and (wide != 0).any():
        return BF16
    alone = len(run.ranks) == 1 and np.nanmax(run.scalar("micro_steps"), initial=1) <= 1
    return None if alone and not (bits & 0x1FFF == 0).any() else FP16


def _largest(run: Run, ranks: list[int], scale: Array) -> Array:
    """Return the largest finite |g| of each step, over layers and ranks; NaN where nothing was measured or finite."""
    out = np.full(len(scale), np.nan)
    for rank in ranks:
        headroom = run.scalar("headroom_bits", rank)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            top = FP16.max * 2.0**-headroom / scale
        hidden = np.flatnonzero(np.isneginf(headroom))  # an inf hides the finite ones
        for start in range(0, len(hidden), ROWS):
            rows = hidden[start : start + ROWS]
            columns = run.columns(("state", "max_abs"), rank, rows)
            values = np.where(columns["state"] == MEASURED, columns["max_abs"].astype(np.float64), np.nan)
            with np.errstate(divide="ignore", invalid="ignore"):
                top[rows] = np.fmax.reduce(values, axis=1, initial=np.nan) / scale[rows]
        out = np.fmax(out, top)
    return out


def _fill(values: Array, good: Array) -> Array:
    """Return, for each position, the last good value before it or there; NaN if there is none."""
    at = np.where(good, np.arange(len(values)), -1)
    at = np.maximum.accumulate(at) if len(at) else at
    return np.where(at >= 0, values[at], np.nan)


def _hopeless(run: Run, skipped: Array, edge: Array, near: Array) -> tuple[Array, Array]:
    """Return (skipped at any scale, nothing to judge by), bool [T]."""
    loss = run.scalar("loss")
    loss_bad = (run.scalar("micro_steps") > 0) & ~np.isfinite(loss)
    unknown = skipped & ~(near > 0)
    far = skipped & ~unknown & (edge > PLAUSIBLE * near)
    out = skipped & (loss_bad | far)
    chain = np.cumsum(np.diff(skipped.astype(np.int8), prepend=0) != 0)
    traced = [int(np.searchsorted(run.steps, e.step)) for e in run.events if not_the_scale(e)]
    if traced:
        named = {int(chain[i]) for i in traced if i < len(skipped) and skipped[i]}
        out |= skipped & np.isin(chain, list(named))
    return out, unknown & ~out


def not_the_scale(event: Event) -> bool:
    """Whether an event tells of a fault that no scale cures: in data, forward, or a derivative that is bad in FP32 too."""
    if event.kind != "nonfinite" or event.data.get("in_scale") or event.data.get("role") == "hidden":
        return False
    return event.phase in ("data", "forward") or event.data.get("fp32_ok") is False


def _gain(by_scale: Array, edge: Array, largest: Array, finite: Array) -> float:
    """Return how many times too late parameter gradients foretell overflows: the median over ends of chains of skips."""
    ends = np.flatnonzero(by_scale[:-1] & finite[1:])
    factor = edge[ends] / largest[ends + 1]
    factor = factor[np.isfinite(factor) & (factor <= PLAUSIBLE)]
    return max(1.0, float(np.median(factor))) if len(factor) else 1.0


def _lowest_of_chain(scale: Array, skipped: Array) -> Array:
    """Return the smallest scale of the chain of skips each step belongs to."""
    chain = np.cumsum(np.diff(skipped.astype(np.int8), prepend=0) != 0)
    low = np.full(int(chain[-1]) + 1 if len(chain) else 1, math.inf)
    np.minimum.at(low, chain, scale)
    return np.asarray(low[chain])
