"""The rule on clipping gradients that are still scaled."""

from __future__ import annotations

import numpy as np

from ampscope.analysis.finding import Finding
from ampscope.analysis.rules.context import Array, Facts, power
from ampscope.analysis.rules.loop import loop
from ampscope.analysis.rules.stepping import divided_by_hand

PINNED = 2e-3
"""Relative spread within which a scaled norm counts as pinned: clipping leaves it equal up to FP32 rounding and an epsilon of 1e-6."""
PINNED_STEPS, PINNED_SHARE = 5, 0.5
"""Steps, and share of the steps, at which it must be."""
LEARNED, CHANGED_SHARE = 3, 0.5
"""The first steps, in which changes in place before unscaling are looked for (as many as `probe.usage` learns from), and the share of them
in which there must be one."""
RESIZED = 1e-3
"""Relative change of the largest element from which gradients were changed, by whatever means."""


def clip_scaled(f: Facts) -> Finding | None:
    """Gradients were clipped while still scaled: changed in place before unscaling, and their norm or maximum pinned to one value."""
    first = _changed(f)[:LEARNED]
    if not f.enabled or not len(first) or first.mean() < CHANGED_SHARE or divided_by_hand(f):
        return None
    best: tuple[float, float, str] | None = None
    for kind, values in _scaled_sizes(f):
        pinned = _pinned(values)
        if pinned is not None and (best is None or pinned[1] > best[1]):
            best = (*pinned, kind)
    if best is None:
        return None
    value, share, kind = best
    good = ~f.skipped
    typical = float(np.median(f.scale[good]))
    return loop(
        "clip-before-unscale",
        "Gradients are clipped while they are still multiplied by the loss scale",
        f"""Gradients were changed in place between backward and unscaling, and the {kind} of the scaled gradients was {value:.4g} at
            {share:.0%} of the steps. Divided by the scale ({power(typical)}), that is a limit of {value / typical:.3g}.""",
        "Call scaler.unscale_(optimizer) right before torch.nn.utils.clip_grad_norm_(...), then scaler.step(optimizer).",
        f.at(good),
        "clip_grad_norm_" if "norm" in kind else "clip_grad_value_",
        where=f.usage("grads_changed").where,
        numbers={"limit": value, "share_of_steps": share, "loss_scale": typical, "effective_limit": value / typical},
    )


def _changed(f: Facts) -> Array:
    """Whether gradients were changed between backward and unscaling, bool [n]: by their version counters, or, past `.data`, by their size."""
    out = f.observed("grads_changed_before_unscale") > 0
    for times in f.observed_like("grads_resized/").values():
        out |= np.abs(np.where(np.isfinite(times), times, 1.0) - 1.0) > RESIZED
    return out


def _scaled_sizes(f: Facts) -> list[tuple[str, Array]]:
    """Return the scaled norm, over all layers and over each optimizer's, and the scaled maximum, of every good step read."""
    good = ~f.skipped[f.rows]
    scale = f.scale[f.rows][good]
    squares = np.nan_to_num(f.metric("grad_norm")[good] * scale[:, None]) ** 2
    largest = np.nan_to_num(f.metric("grad_max")[good] * scale[:, None])
    out = [("norm", np.sqrt(squares.sum(1))), ("largest element", largest.max(1, initial=0.0))]
    owners = sorted({x.optimizer for x in f.layers if x.optimizer})
    for owner in owners if len(owners) > 1 else ():
        mine = [i for i, x in enumerate(f.layers) if x.optimizer == owner]
        out.append((f"norm ({owner})", np.sqrt(squares[:, mine].sum(1))))
    return out


def _pinned(values: Array) -> tuple[float, float] | None:
    """Return (value, share) if most values are one and the same."""
    values = values[np.isfinite(values) & (values > 0)]
    if len(values) < PINNED_STEPS:
        return None
    top = float(np.median(values[values >= np.median(values)]))
    near = np.abs(values - top) <= PINNED * top
    return (top, float(near.mean())) if near.mean() >= PINNED_SHARE and near.sum() >= PINNED_STEPS else None
