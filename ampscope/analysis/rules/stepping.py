"""Rules on how an optimizer, and its learning-rate schedule, are stepped."""

from __future__ import annotations

import numpy as np

from ampscope.analysis.finding import Finding, Severity
from ampscope.analysis.rules.context import Facts, count, listing, power
from ampscope.analysis.rules.loop import loop

ADVANCED_SHARE, ADVANCED_COUNT = 0.05, 3
"""design.md §7: more than 5 % of the run's steps, and at least 3."""
PER_STEP = 0.3
"""Share of the good steps after which the learning rate moved, from which the schedule is one a step rather than one an epoch."""

TRUE_SIZE = 1.01
"""Size of a gradient beside its true one up to which it does not carry the scale: FP32 rounding, and clipping makes it smaller."""


def divided_by_hand(f: Facts) -> bool:
    """Whether the loop divides gradients by the loss scale itself before `optimizer.step()`: they are no larger than true gradients then.

    Known from the first steps, in which a few gradients right before the step are compared with what backward had left.
    """
    if not f.observed("outside_step/scaled").any():
        return False
    for ratio in f.observed_like("grads_resized/").values():
        times = ratio * f.scale
        times = times[np.isfinite(times)]
        if len(times) and np.median(times) <= TRUE_SIZE:
            return True
    return False


def outside(f: Facts) -> Finding | None:
    """`optimizer.step()` called beside the scaler, or on gradients that still carry the scale."""
    raw, unscaled, beside = (f.observed(f"outside_step/{k}") > 0 for k in ("scaled", "unscaled", "beside"))
    where = f.usage("outside_step").where
    if beside.any():
        return _stepped_directly(
            f.at(beside | unscaled | raw),
            "beside scaler.step() in the same step",
            "Every update is applied twice, and nothing keeps inf and NaN out of the weights: the check is in scaler.step().",
            where,
        )
    if unscaled.any():
        bad = f.skipped & unscaled
        if f.skipped.any() and not bad.any():
            return None  # the loop looks for inf itself, and leaves the step out
        return _stepped_directly(
            f.at(unscaled | raw),
            "after scaler.unscale_(), in place of scaler.step()",
            f"""The check for inf and NaN is in scaler.step(): {
                f"at step {listing(f.at(bad))} such gradients went into the weights."
                if bad.any()
                else "nothing keeps them out of the weights."
            }""",
            where,
            severity="error" if bad.any() else "warning",
        )
    if not raw.any() or divided_by_hand(f):
        return None
    steps = f.at(raw)
    typical = float(np.nanmedian(f.scale[raw]))
    raised = f.raised("No inf checks were recorded prior to update", "update")
    tail = f'update() then raised "{raised.data.get("text")}"' if raised is not None else ""
    return loop(
        "optimizer-step-without-unscale",
        "optimizer.step() runs on gradients that are still multiplied by the loss scale",
        f"""At step {listing(steps)} the loss went through scaler.scale(), but the optimizer was stepped directly: its gradients were
            {power(typical)} times too large. {tail}""",
        "Replace optimizer.step() by scaler.step(optimizer), and call scaler.update() at the end of the iteration.",
        steps,
        "step",
        where=where,
        numbers={"steps": len(steps), "loss_scale": typical},
    )


def _stepped_directly(
    steps: list[int], how: str, consequence: str, where: str, *, severity: Severity = "error"
) -> Finding:
    return loop(
        "optimizer-step-outside-scaler",
        f"optimizer.step() is called {how}",
        f"At step {listing(steps)} an optimizer was stepped directly, {how}. {consequence}",
        "Call scaler.step(optimizer) alone, which unscales, checks and steps; never optimizer.step() itself.",
        steps,
        "step",
        severity=severity,
        where=where,
        numbers={"steps": len(steps)},
    )


def scheduler(f: Facts) -> Finding | None:
    """The learning-rate scheduler moved on although the optimizer did not."""
    lr = f.scalar("lr")
    if f.n < 3 or not f.skipped.any():
        return None
    moved = np.concatenate([np.diff(lr) != 0, [False]]) & np.isfinite(lr)
    good = ~f.skipped & (np.arange(f.n) < f.n - 1)
    hit = moved & f.skipped
    if not hit.any() or (good.any() and moved[good].mean() < PER_STEP):
        return None
    steps, share = f.at(hit), hit.sum() / f.n
    serious = hit.sum() >= ADVANCED_COUNT and share > ADVANCED_SHARE
    return loop(
        "scheduler-advanced-on-skipped-step",
        f"The learning-rate scheduler advanced on {count(len(steps), 'skipped step')}",
        f"""At step {listing(steps)} the optimizer's step was skipped and the learning rate moved on all the same: {len(steps)} of {f.n} steps
            ({share:.1%}). The schedule ends that many steps too early.""",
        """Advance it only after a real step: before = scaler.get_scale(); scaler.step(optimizer); scaler.update();
            if scaler.get_scale() >= before: scheduler.step().""",
        steps,
        "scheduler.step",
        severity="warning" if serious else "info",
        numbers={"steps": len(steps), "share": float(share)},
    )
