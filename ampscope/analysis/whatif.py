"""What another loss scale or number format would have done to the recorded gradients.

docs/what-if.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ampscope.analysis.formats import find
from ampscope.analysis.overflow import limits
from ampscope.analysis.shares import already, flushed, overflowing, subnormal
from ampscope.analysis.tally import Tally, tally
from ampscope.analysis.window import judge, power, windows
from ampscope.errors import AmpscopeError

if TYPE_CHECKING:
    from ampscope.run.run import Run

Array = np.ndarray[Any, Any]

ASSUMPTIONS = (
    "The same gradients are asked of another scale or format: training is taken to have gone as it was recorded.",
    "Elements that were zero in the record stay zero. Those that FP16 had flushed before cannot be told from natural "
    "zeros one by one; already_flushed_ratio estimates their share and bounds it.",
    "NaN and inf elements have no place in a histogram. An inf counts as overflow at the scale it came at and above, "
    "and as possible overflow down to where other steps were finite; one that no scale avoids (data, forward pass) is "
    "left out of the windows.",
)


@dataclass(frozen=True)
class WhatIf:
    """Shares of elements a layer, at one scale in one format. Arrays are float64 [L], one entry a layer, unless said.

    A share is NaN where a layer has no histogram among the steps. `_low` and `_high` are bounds that hold the count one
    would make on the gradients themselves, cast to the format at that scale.
    """

    format: str
    scale: float
    layers: tuple[str, ...]
    steps: Array
    """int64 [H]: the steps whose histograms were added up."""
    exact: bool
    """Whether `flushed` is a count, not interpolated: always at a power-of-two multiple of each recorded scale."""
    elements: Array
    """int64: elements seen over the steps."""
    flushed: Array
    """Elements that are non-zero in the record and zero after the cast; whole numbers where `exact`."""
    zeros: Array
    """Elements that are zero after the cast: already zero ones and `flushed`."""
    underflow_ratio: Array
    """`flushed` / `elements`; equal to both bounds where `exact`."""
    underflow_ratio_low: Array
    underflow_ratio_high: Array
    subnormal_ratio_low: Array
    """Non-zero and below the smallest normal after the cast: they survive with fewer bits."""
    subnormal_ratio_high: Array
    overflow_ratio_low: Array
    """Beyond the largest finite value after the cast."""
    overflow_ratio_high: Array
    already_zero_ratio: Array
    """Zero in the record already: natural zeros, and what FP16 had flushed by then."""
    already_flushed_ratio: Array
    """Of those, estimated: flushed by FP16 on the way into the record, and zero at this scale and format too.

    Comes on top of `underflow_ratio`.
    """
    already_flushed_ratio_low: Array
    already_flushed_ratio_high: Array
    nonfinite_ratio: Array
    """NaN or inf in the record."""
    share: float
    """What counts as too much underflow in the fields below."""
    scale_low: Array
    """Smallest power of two at which a layer loses at most `share` (recorded and already flushed together); inf if none
    does.
    """
    scale_high: Array
    """Largest power of two at which a layer does not overflow in any of the steps; 0 if none."""
    window: tuple[float, float] | None
    """Smallest and largest power of two that suits every layer, over all recorded maxima; None if no one scale does."""
    misfits: tuple[str, ...]
    """Layers for which no scale is good: those without a window of their own, or else those that keep the others'
    windows from meeting.
    """
    advice: tuple[str, ...]
    """What to do, a sentence each."""
    assumptions: tuple[str, ...]

    @property
    def zero_ratio(self) -> Array:
        """`zeros` / `elements`: zero after the cast, for whatever reason."""
        return self.already_zero_ratio + self.underflow_ratio

    def __str__(self) -> str:
        """Return a few lines for people: the worst layers, the window, the advice."""
        lines = [f"{self.format} at loss scale {power(self.scale)}, over {len(self.steps)} steps:"]
        lost = np.nan_to_num(self.underflow_ratio + self.already_flushed_ratio)
        over = np.nan_to_num(self.overflow_ratio_high)
        worst = np.argsort(-(lost + over), kind="stable")[:8]
        width = max((len(self.layers[i]) for i in worst), default=0)
        lines += [f"  {self.layers[i]:{width}}  flushed {lost[i]:.2%}, overflowing {over[i]:.2%}" for i in worst]
        if self.window:
            lines.append(f"good for every layer: {power(self.window[0])} to {power(self.window[1])}")
        return "\n".join([*lines, *self.advice])


def what_if(
    run: Run, format: object = "fp16", scale: float = 2.0**12, steps: Any = None, *, share: float = 0.01
) -> WhatIf:
    """Ask a recorded run what another format and loss scale would have done to its gradients.

    Args:
        run: a run with histograms (`watch(..., exponents_every=N)` keeps one every N steps).
        format: "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", or torch's name or dtype of one.
        scale: loss scale, positive. `flushed` is exact where it is a power of two (and so were the recorded ones).
        steps: step numbers to add up: one, several, a range, or a slice of step numbers. None: all that have histograms.
        share: the underflow, as a share of a layer's elements, that is still good (0..1).

    Returns:
        Shares a layer, the window of good scales, and advice.

    Raises:
        AmpscopeError: an unknown format, a scale or share out of range, a run or steps without histograms.
    """
    return evaluate(collect(run, steps), format, scale, share)


@dataclass(frozen=True)
class Collected:
    """A run's histograms added up (`collect`), to be asked several times (`evaluate`)."""

    tally: Tally
    largest: float
    """Largest finite |g| over every recorded step, histograms or not."""
    overflowed: float
    """Smallest loss scale at which a step overflowed because of the scale; inf if none did."""


def collect(run: Run, steps: Any = None) -> Collected:
    """Read what `evaluate` needs. It takes one pass over the histograms; asking for other scales afterwards takes none.

    Args:
        run: the run.
        steps: as in `what_if`.

    Raises:
        AmpscopeError: there is no histogram.
    """
    ranks = run.ranks if run.metadata.get("gradients") == "sharded" else run.ranks[:1]
    rows = np.unique(np.concatenate([run.histogram_rows(r) for r in ranks]))
    if not len(rows):
        raise AmpscopeError(
            f"run {run.name!r} holds no histograms yet; watch(..., exponents_every=N) keeps one every N steps"
        )
    chosen = rows[_selected(run.steps[rows], steps)]
    if not len(chosen):
        have = run.steps[rows]
        raise AmpscopeError(
            f"none of those steps of run {run.name!r} has a histogram; {len(have)} from {have[0]} to {have[-1]} have one"
        )
    found = limits(run)
    picked = np.arange(len(run.steps)) if steps is None else np.flatnonzero(_selected(run.steps, steps))
    top = found.largest[picked]
    over = found.recorded_scale[picked][found.by_scale[picked]]
    return Collected(
        tally(run, chosen, ranks, found.limit),
        float(np.nanmax(top, initial=0.0)),
        float(over.min(initial=math.inf)),
    )


def _selected(have: Array, steps: Any) -> Array:
    if steps is None:
        return np.ones(len(have), bool)
    if isinstance(steps, slice):
        steps = range(*steps.indices(int(have[-1]) + 1))
    wanted = np.asarray(list(steps) if isinstance(steps, Iterable) else [steps])
    if len(wanted) and wanted.dtype.kind not in "iu":
        raise AmpscopeError(f"what_if(): steps must be step numbers, not {steps!r}")
    return np.isin(have, wanted)


def evaluate(collected: Collected, format: object = "fp16", scale: float = 2.0**12, share: float = 0.01) -> WhatIf:
    """Answer `what_if` from histograms that were collected before.

    Raises:
        AmpscopeError: an unknown format, a scale or share out of range.
    """
    form = find(format)
    if not (isinstance(scale, (int, float, np.number)) and 0 < scale < math.inf):
        raise AmpscopeError(f"what_if(): scale must be a positive number, not {scale!r}")
    if not 0 <= share <= 1:
        raise AmpscopeError(f"what_if(): share must lie between 0 and 1, not {share!r}")
    t, scale = collected.tally, float(scale)
    gone, weak, over = flushed(t, form, scale), subnormal(t, form, scale), overflowing(t, form, scale)
    lost = already(t, form, scale)
    with np.errstate(invalid="ignore"):
        n = np.where(t.elements > 0, t.elements, np.nan).astype(np.float64)
        infinite = sum(t.infinite.values(), np.zeros(len(t.layers), np.int64))
        low, high = windows(t, form, share)
        verdict = judge(t, form, share, low, high, collected.largest, collected.overflowed)
        return WhatIf(
            format=form.name,
            scale=scale,
            layers=t.layers,
            steps=t.steps,
            exact=bool((gone.low == gone.high).all()),
            elements=t.elements.copy(),
            flushed=gone.value,
            zeros=t.zeros + gone.value,
            underflow_ratio=gone.value / n,
            underflow_ratio_low=gone.low / n,
            underflow_ratio_high=gone.high / n,
            subnormal_ratio_low=weak.low / n,
            subnormal_ratio_high=weak.high / n,
            overflow_ratio_low=over.low / n,
            overflow_ratio_high=over.high / n,
            already_zero_ratio=t.zeros / n,
            already_flushed_ratio=lost[0] / n,
            already_flushed_ratio_low=lost[1] / n,
            already_flushed_ratio_high=lost[2] / n,
            nonfinite_ratio=(t.nan + infinite) / n,
            share=share,
            scale_low=low,
            scale_high=high,
            window=verdict.window,
            misfits=verdict.misfits,
            advice=verdict.advice,
            assumptions=ASSUMPTIONS,
        )
