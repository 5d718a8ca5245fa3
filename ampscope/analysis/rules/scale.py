"""Rules on the loss scale's course."""

from __future__ import annotations

import numpy as np

from ampscope.analysis.rules.context import Facts, finding, listing, modules, power, span
from ampscope.analysis.finding import Finding

FP32_NORMAL = 2.0**-126
"""Below it 1/scale nears FP32's end; at 2^-128 it is inf and finite gradients become NaN, unseen by the check (GradScaler source)."""
RUNAWAY_GROWTHS = 8
"""Growths in a row over zero gradients from which it is no accident."""
RUNAWAY_SCALE = 2.0**24
"""A scale that no ordinary gradient allows: 2^24 times FP16's smallest subnormal is 1."""
STUCK_SKIPS = 5
"""Skips in a row, at one scale, from which a floor is meant rather than chance."""
WARMUP_SKIPS = 16
"""Skips at the start that halving from 2^16 to 1 can explain."""


def below_normal(f: Facts) -> Finding | None:
    """The scale fell so far that its inverse damages the weights."""
    low = (f.scale < FP32_NORMAL) & (f.scale >= 0) & (f.skipped | (f.scale <= 2.0**-127))
    if not f.enabled or not low.any():
        return None
    steps = [int(s) for s in f.steps[low]]
    applied = [int(s) for s in f.steps[(f.scale <= 2.0**-128) & ~f.skipped]]
    lost = f" Step {listing(applied)} was applied with 1/scale = inf: finite gradients became inf or NaN after the check and went into the weights." if applied else ""
    norms = f.metric("weight_norm")
    dead = np.isinf(norms).any() or (applied and not np.isfinite(f.loss[-1]))
    tail = " The weights are not finite any more." if dead and applied else ""
    return finding(
        "scale-below-fp32-normal-weights-lost", "error", f"The loss scale fell to {power(float(f.scale[low].min()))} and destroys the weights", "optimizer",
        (), "unscale_", "", span(steps),
        f"{int(f.skipped.sum())} of {f.n} steps were skipped and each halved the scale, down to {power(float(f.scale[low].min()))}; FP32's smallest normal number is 2^-126.{lost}{tail}",
        "Stop training after a number of skips in a row; find what makes every step non-finite (see the other findings); restart from a checkpoint with a fresh GradScaler.",
    )  # fmt: skip


def runaway(f: Facts) -> Finding | None:
    """The scale grows without limit over zero gradients."""
    if not f.enabled or f.n < RUNAWAY_GROWTHS:
        return None
    norm = f.run.scalar("grad_norm")
    zero = (norm == 0) & ~f.skipped
    if not zero.any():
        return None
    grown = zero & (f.scale > RUNAWAY_SCALE)
    rises = int((np.diff(f.scale)[zero[:-1]] > 0).sum())
    if not grown.any() or rises < RUNAWAY_GROWTHS:
        return None
    steps = [int(s) for s in f.steps[zero]]
    after = [s for s in f.skipped_steps if s > steps[0]]
    tail = f" When gradients came back, {len(after)} steps were skipped." if after else ""
    return finding(
        "scale-runaway-zero-grads", "warning", "Every gradient is zero and the loss scale grows without limit", "none", (), "-", "", span(steps),
        f"At {len(steps)} steps every gradient was exactly zero, nothing could overflow, and the scale grew {rises} times, to {power(float(f.scale[zero].max()))}. The loss was {np.nanmedian(f.loss[zero]):.3g} there; gradients that are zero at such a scale are zero in FP32 too.{tail}",
        "Find out why the loss has no gradient (an empty mask, a detached tensor, a constant target); skip such batches, and cap the scale with update(min(scale, 2.0**24)).",
    )  # fmt: skip


def constant_scale(f: Facts) -> Finding | None:
    """Every step is skipped at a pinned scale."""
    if not f.enabled or not f.unfinished_skips:
        return None
    run = 0
    while run < f.n and f.skipped[f.n - 1 - run]:
        run += 1
    if run < STUCK_SKIPS:
        return None
    tail = f.scale[f.n - run :]
    if len(np.unique(tail)) > 2 or float(tail[-1]) < 0.6 * float(tail[0]):
        return None
    steps = [int(s) for s in f.steps[f.n - run :]]
    root = next((e for e in f.roots if e.step >= steps[0] - 1), f.roots[0] if f.roots else None)
    from ampscope.analysis.rules.trace import blamed, innocence, place

    cause = f" {root.op} in {place(root)} makes the value ({root.where}).{innocence(root)}" if root else ""
    return finding(
        "all-steps-skipped-constant-scale", "error", f"No step has been applied since step {steps[0]}, while the scale stays at {power(float(tail[-1]))}",
        root.phase if root else ("forward" if f.loss_bad[-1] else "backward"), blamed([root]) if root else modules(f.culprits[steps[0]].layers)[:4] if steps[0] in f.culprits else (),
        root.op if root else "", root.where if root else "", span(steps),
        f"The last {run} steps were all skipped although the scale was held at {power(float(tail[-1]))}, by a floor or by update(new_scale): the curve looks healthy, the model stands still.{cause}",
        "Fix the cause: a lower scale does not cure it, a floor only hides it. Raise an alarm on consecutive skips, not on the scale's value.",
    )  # fmt: skip


def too_large(f: Facts) -> Finding | None:
    """Overflow goes on until the scale is under 1."""
    if not f.enabled:
        return None
    finite_loss = f.skipped & ~f.loss_bad
    below = f.scale < 1.0
    if not below.any() or finite_loss.sum() < 3 or f.inputs:
        return None
    if (f.skipped & f.loss_bad).sum() > finite_loss.sum():
        return None
    start = float(f.scale[0])
    if start < 1.0 and not finite_loss[below].any():
        return None
    skips = [int(s) for s in f.steps[finite_loss]]
    roots = [e for e in f.roots if e.phase == "backward"]
    from ampscope.analysis.rules.trace import classify

    if any(classify(e) in ("backward-nan-finite-forward", "backward-overflow-custom-function", "backward-overflow-norm-eps") for e in roots):
        return None
    fronts = [c.layers[0] for s, c in f.culprits.items() if s in skips and c.layers]
    finite = f.loss[np.isfinite(f.loss)]
    e = roots[0] if roots else None
    state = "training goes on at a scale under 1" if f.settled else "the run ends while still skipping"
    return finding(
        "loss-too-large-scale-below-one", "error", f"The loss is too large: only a scale below 1 fits ({power(float(f.scale.min()))})", "backward",
        modules(fronts)[:6], e.op if e else "", e.where if e else "", span(skips),
        f"{len(skips)} steps with a finite loss (about {np.median(finite) if len(finite) else float('nan'):.3g}) were skipped, from scale {power(start)} down to {power(float(f.scale.min()))}; {state}. "
        f"The first layer that overflows in backward order is {fronts[0] if fronts else 'unknown'}: it is only where the loss's own gradient arrives.",
        "Make the loss smaller: reduction='mean' instead of 'sum', divide by the number of tokens or by the loss weight. Then the usual scale fits; lowering the learning rate changes nothing.",
    )  # fmt: skip


def warmup(f: Facts) -> Finding | None:
    """The first steps calibrate the scale."""
    if not f.enabled or not f.leading or not f.settled or f.leading > WARMUP_SKIPS:
        return None
    later = [s for s in f.skipped_steps if s > int(f.steps[f.leading - 1])]
    if f.loss_bad[: f.leading].any():
        return None
    at = float(f.scale[f.leading]) if f.leading < f.n else float(f.scale[-1])
    more = f" Later, {len(later)} more of {f.n} steps were skipped." if later else ""
    return finding(
        "warmup-calibration", "info", f"The loss scale found its level after {f.leading} skipped steps", "backward", (), "", "", span(f.steps[: f.leading].tolist()),
        f"Steps {int(f.steps[0])} to {int(f.steps[f.leading - 1])} overflowed at {power(float(f.scale[0]))} and above {power(at)}, with a finite loss; from step {int(f.steps[f.leading]) if f.leading < f.n else '?'} on training runs.{more}",
        "Nothing: this is how GradScaler calibrates. GradScaler(init_scale=...) at the settled value saves these steps.",
    )  # fmt: skip


def ranks(f: Facts) -> Finding | None:
    """Ranks disagree."""
    found = f.run.ranks
    if len(found) < 2:
        return None
    scales = np.stack([f.run.scalar("loss_scale", rank=r) for r in found])
    skips = np.stack([f.run.scalar("skipped", rank=r) for r in found])
    both = np.isfinite(scales).all(0)
    differ = both & ((scales != scales[0]).any(0) | (skips != skips[0]).any(0))
    if not differ.any():
        return None
    steps = [int(s) for s in f.steps[differ]]
    at = int(np.flatnonzero(differ)[0])
    text = ", ".join(f"rank {r}: scale {power(float(scales[i, at]))}, {'skipped' if skips[i, at] > 0 else 'stepped'}" for i, r in enumerate(found[:4]))
    return finding(
        "scales-differ-across-ranks", "error", "Ranks disagree on the loss scale or on skipping", "usage", (), "update", "", span(steps),
        f"At {len(steps)} of {f.n} steps ranks differ; first at step {steps[0]}: {text}. Their parameters drift apart from then on.",
        "Let found_inf be reduced over ranks: average gradients (DDP) before unscale_, use ShardedGradScaler with FSDP, and load the same scaler state on every rank.",
    )  # fmt: skip


def one_optimizer(f: Facts) -> Finding | None:
    """One optimizer keeps the shared scale down for the others."""
    flags = f.observed_like("skipped/")
    if len(flags) < 2 or not f.skipped.any():
        return None
    counts = {name: int((v > 0).sum()) for name, v in flags.items()}
    worst = max(counts, key=lambda k: counts[k])
    total = int(f.skipped.sum())
    others = sum(v for k, v in counts.items() if k != worst)
    if counts[worst] < 3 or others > 0.2 * counts[worst] or counts[worst] < 0.8 * total or counts[worst] < 0.2 * f.n:
        return None
    layers = [layer.name for layer in f.run.layers if layer.optimizer == worst]
    from ampscope.analysis.rules.trace import blamed, place

    e = f.roots[0] if f.roots else None
    cause = f" The value is made by {e.op} in {place(e)} ({e.where})." if e else ""
    zero = f.metric("zero_ratio")
    rest = [i for i, layer in enumerate(f.run.layers) if layer.optimizer not in ("", worst)]
    with np.errstate(all="ignore"):
        starved = float(np.nanmedian(zero[-max(len(zero) // 4, 1) :, rest])) if rest else float("nan")
    names = ", ".join(k for k in counts if k != worst)
    return finding(
        "one-optimizer-overflows-shared-scale", "error", f"{worst} overflows and pulls the shared loss scale down for {names}", e.phase if e else ("forward" if f.loss_bad.any() else "backward"),
        tuple(dict.fromkeys([*(blamed([e]) if e else ()), *modules(layers)]))[:8], e.op if e else "", e.where if e else "", span(f.skipped_steps),
        f"{worst} found inf or NaN in {counts[worst]} of {f.n} steps, {names} in {others}. Each time the shared scale was halved, to {power(float(f.scale[-1]))}; at the end {starved:.0%} of the other optimizers' gradient elements were zero.{cause}",
        f"Fix the overflow in {worst}'s part (FP32 there), and give each optimizer a GradScaler of its own.",
    )  # fmt: skip
