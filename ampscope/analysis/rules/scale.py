"""Rules on the loss scale's course."""

from __future__ import annotations

import numpy as np

from ampscope.analysis.finding import Finding
from ampscope.analysis.rules import births
from ampscope.analysis.rules.births import blamed, innocence, numbers, place
from ampscope.analysis.rules.context import Facts, count, finding, listing, modules, power, span

FP32_NORMAL, INVERSE_IS_INF = 2.0**-126, 2.0**-128
"""Below the first, 1/scale nears FP32's end; from the second on it is inf, and finite gradients become inf or NaN after the check."""
RUNAWAY_GROWTHS = 8
"""Growths over zero gradients from which it is no accident: 256-fold without one sign of a gradient."""
RUNAWAY_SCALE = 2.0**24
"""A scale that no ordinary gradient allows: 2^24 times FP16's smallest subnormal is 1."""
STUCK_SKIPS, SAME = 5, 0.99
"""Skips in a row at one scale from which a floor is meant; each skip of a plain GradScaler halves it, so that two would do."""
LARGE_SKIPS = 3
"""Skips with a finite loss on the way to a scale below 1: fewer could come from a scale that was set there by hand."""


def below_normal(f: Facts) -> Finding | None:
    """The scale fell so far that its inverse damages the weights."""
    low = (f.scale < FP32_NORMAL) & (f.scale >= 0)
    if not f.enabled or not low.any():
        return None
    least = float(f.scale[low].min())
    applied = f.at((f.scale <= INVERSE_IS_INF) & ~f.skipped)
    lost = (
        f"""At step {listing(applied)} the step was applied although 1/scale is inf in FP32: finite gradients pass the check, become inf
        or NaN when they are multiplied by it, and go into the weights."""
        if applied
        else "At 2^-128 the inverse is inf, and the next good step would destroy the weights."
    )
    return finding(
        "scale-below-fp32-normal-weights-lost",
        "error",
        f"The loss scale fell to {power(least)}, where it destroys the weights",
        "optimizer",
        op="unscale_",
        steps=span(f.at(low)),
        evidence=f"""{count(int(f.skipped.sum()), "step")} of {f.n} were skipped and each halved the scale, down to {power(least)}; FP32's
            smallest normal number is 2^-126. {lost}""",
        numbers={"least_scale": least, "skipped_steps": int(f.skipped.sum()), "steps_applied": len(applied)},
        remedy="""Stop training after a number of skips in a row, and find what makes every step non-finite; then restart from a
            checkpoint with a new GradScaler. A scale below 1 is the time to look, not 2^-126.""",
    )


def runaway(f: Facts) -> Finding | None:
    """Gradients are zero, nothing overflows, the scale grows without limit."""
    zero = (f.scalar("grad_norm") == 0) & ~f.skipped
    if not f.enabled or not zero.any():
        return None
    rises = int((np.diff(f.scale)[zero[:-1]] > 0).sum())
    top = float(f.scale[zero].max())
    if top <= RUNAWAY_SCALE or rises < RUNAWAY_GROWTHS:
        return None
    steps = f.at(zero)
    after = [s for s in f.skipped_steps if s > steps[0]]
    tail = f"When gradients came back, {count(len(after), 'step')} had to be skipped." if after else ""
    loss = f.loss[zero]
    return finding(
        "scale-runaway-zero-grads",
        "warning",
        "Every gradient is zero, and the loss scale grows without limit",
        "none",
        op="-",
        steps=span(steps),
        evidence=f"""At {count(len(steps), "step")} every gradient was exactly zero, so that nothing could overflow, and the scale grew
            {rises} times, to {power(top)}. The loss was {float(np.nanmedian(loss)):.3g} there. What is zero at such a scale is zero in
            FP32 too: this is a dead loss, no underflow. {tail}""",
        numbers={
            "zero_gradient_steps": len(steps),
            "growths": rises,
            "largest_scale": top,
            "skipped_after": len(after),
        },
        remedy="""Find out why the loss has no gradient (an empty mask, a detached tensor, a constant target) and skip such batches;
            cap the scale: if scaler.get_scale() > 2.0**24: scaler.update(2.0**24).""",
    )


def constant_scale(f: Facts) -> Finding | None:
    """Every step is skipped, the scale pinned by a floor or by hand."""
    if not f.enabled or not f.unfinished_skips:
        return None
    block = f.blocks[-1]
    last = float(f.scale[-1])
    held = 0
    while (
        held < len(block)
        and f.scale[block.last - held] >= SAME * last > 0
        and f.scale[block.last - held] <= last / SAME
    ):
        held += 1
    if held < STUCK_SKIPS:
        return None
    steps = f.at(np.isin(np.arange(f.n), block.positions))
    roots = [e for e in f.roots if e.step >= steps[0]] or f.roots
    e = roots[0] if roots else None
    culprit = f.culprits.get(steps[0])
    cause = f"The cause: {e.op} in {place(e)} ({e.where}). {innocence(e)}" if e else ""
    return finding(
        "all-steps-skipped-constant-scale",
        "error",
        f"No step has been applied since step {steps[0]}, while the scale stays at {power(last)}",
        e.phase if e else culprit.phase if culprit else "none",
        layers=blamed(roots) if e else modules(culprit.layers) if culprit else (),
        op=e.op if e else "",
        where=e.where if e else "",
        steps=span(steps),
        evidence=f"""The last {len(steps)} steps were all skipped, {held} of them at the same scale of {power(last)}: a floor, or
            update(new_scale), holds it up, so that its curve looks healthy while the model stands still. {cause}""",
        numbers={
            "skipped_in_a_row": len(steps),
            "at_this_scale": held,
            "loss_scale": last,
            **(numbers(roots) if e else {}),
        },
        remedy="""Fix the cause: a lower scale does not cure it and a floor only hides it. Raise an alarm on skips in a row, not on the
            scale's value.""",
    )


def too_large(f: Facts) -> Finding | None:
    """Overflow persists until the scale is under 1: the loss itself is too large."""
    below = f.scale < 1.0
    finite = f.skipped & ~f.loss_bad
    if not f.enabled or not below.any() or f.inputs or finite.sum() < LARGE_SKIPS:
        return None
    if (f.skipped & f.loss_bad).sum() > finite.sum() or not finite[: int(np.flatnonzero(below)[0]) + 1].any():
        return None
    roots = [e for e in f.roots if e.phase == "backward"]
    if any(births.classify(e, births.scale_at(f, e.step)) for e in roots):
        return None  # a derivative is infinite: no size of the loss cures that
    skips = f.at(finite)
    fronts = [str(f.culprits[s].data["front"]) for s in skips if s in f.culprits and f.culprits[s].data.get("front")]
    e = roots[0] if roots else None
    losses = f.loss[np.isfinite(f.loss)]
    typical, least = float(np.median(losses)) if len(losses) else float("nan"), float(f.scale.min())
    state = "the run ends while it still skips" if f.unfinished_skips else "from then on training runs"
    return finding(
        "loss-too-large-scale-below-one",
        "error",
        f"The loss is too large: only a loss scale below 1 fits ({power(least)})",
        "backward",
        layers=modules(fronts),
        op=e.op if e else "",
        where=e.where if e else "",
        steps=span(skips),
        evidence=f"""{count(len(skips), "step")} with a finite loss (about {typical:.3g}) were skipped, from scale {power(f.scale[0])} down to
            {power(least)}; {state}. The first layer that overflows in backward order is {fronts[0] if fronts else "not known"}: no fault of
            its own, that is where the loss's gradient arrives.""",
        numbers={"skipped_steps": len(skips), "loss": typical, "first_scale": float(f.scale[0]), "least_scale": least},
        remedy="""Make the loss smaller: reduction="mean" instead of "sum", or divide it by the number of tokens or by its weight. The usual
            scale then fits. A lower learning rate changes nothing here.""",
    )


def warmup(f: Facts) -> Finding | None:
    """The first steps are skipped while the scale finds its level, then training runs."""
    blocks = [b for b in f.blocks if b.at_start and b.loss_finite]
    if not f.enabled or not blocks or f.unfinished_skips:
        return None
    first = blocks[0]
    good = f.n - int(f.skipped.sum())
    if good < 1:
        return None
    calibrated = sum(len(b) for b in blocks)
    later = int(f.skipped.sum()) - calibrated
    probes = sum(len(b) for b in f.blocks if b.after_growth and not b.at_start)
    more = (
        f"Later {count(later, 'step')} were skipped, {probes} of them right after the scale was doubled."
        if later
        else ""
    )
    begin, end = int(f.steps[first.first]), int(f.steps[first.last])
    which = f"Step {begin}" if begin == end else f"Steps {begin} to {end}"
    return finding(
        "warmup-calibration",
        "info",
        f"The loss scale found its level after {count(calibrated, 'skipped step')}",
        "backward",
        steps=span(f.at(np.isin(np.arange(f.n), [i for b in blocks for i in b.positions]))),
        evidence=f"""{which} overflowed at a scale of {power(f.scale[first.first])} and below, with a finite loss; from step
            {int(f.steps[first.last + 1])} on, at {power(f.scale[first.last + 1])}, training runs. {more}""",
        numbers={
            "skipped_steps": calibrated,
            "first_scale": float(f.scale[first.first]),
            "settled_scale": float(f.scale[first.last + 1]),
        },
        remedy=f"""Nothing: GradScaler finds its scale that way.
            GradScaler(init_scale={float(f.scale[first.last + 1]):g}) would save these steps.""",
    )


def ranks(f: Facts) -> Finding | None:
    """Ranks disagree on the loss scale or on skipping."""
    found = f.run.ranks
    if len(found) < 2:
        return None
    scales = np.stack([f.scalar("loss_scale", rank=r) for r in found])
    skips = np.stack([f.scalar("skipped", rank=r) for r in found])
    both = np.isfinite(scales).all(0) & np.isfinite(skips).all(0)
    differ = both & ((scales != scales[0]).any(0) | (skips != skips[0]).any(0))
    if not differ.any():
        return None
    steps = f.at(differ)
    at = int(np.flatnonzero(differ)[0])
    each = ", ".join(
        f"rank {r}: {power(scales[i, at])}, {'skipped' if skips[i, at] > 0 else 'stepped'}"
        for i, r in enumerate(found[:4])
    )
    return finding(
        "scales-differ-across-ranks",
        "error",
        "Ranks disagree on the loss scale or on skipping",
        "usage",
        op="update",
        steps=span(steps),
        evidence=f"""Ranks differ at {len(steps)} of {f.n} steps, first at step {steps[0]} ({each}). Parameters that were equal drift apart
            from then on.""",
        numbers={
            "steps": len(steps),
            "ranks": len(found),
            "loss_scales": scales[:8, at].tolist(),
            "skipped": skips[:8, at].tolist(),
        },
        remedy="""Average gradients over ranks (DDP) before unscale_, so that all see the same inf; use ShardedGradScaler with FSDP; load
            the same scaler state on every rank.""",
    )
