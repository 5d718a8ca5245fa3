"""Rules on the training loop: which calls are made, in which order, on what."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ampscope.analysis.finding import Finding, Severity
from ampscope.analysis.rules.context import Array, Facts, count, finding, listing, modules, power, span

PINNED = 2e-3
"""Relative spread within which a scaled norm counts as pinned: clipping leaves it equal up to FP32 rounding and an epsilon of 1e-6."""
PINNED_STEPS, PINNED_SHARE = 5, 0.5
"""Steps, and share of the steps, at which it must be."""
CHANGED_SHARE = 0.5
"""Share of the first steps in which all gradients were changed in place before unscaling."""
ADVANCED_SHARE, ADVANCED_COUNT = 0.05, 3
"""design.md §7: more than 5 % of the run's steps, and at least 3."""
PER_STEP = 0.3
"""Share of the good steps after which the learning rate moved, from which the schedule is one a step rather than one an epoch."""
NO_GRADS_SHARE = 0.2
"""Share of the steps without a gradient from which it is no exception."""


def _loop(
    rule: str,
    title: str,
    evidence: str,
    remedy: str,
    steps: Sequence[int],
    op: str,
    *,
    severity: Severity = "error",
    layers: Sequence[str] = (),
    where: str = "",
    numbers: dict[str, object] | None = None,
) -> Finding:
    return finding(
        rule,
        severity,
        title,
        "usage",
        layers=layers,
        op=op,
        where=where,
        steps=span(steps),
        evidence=evidence,
        numbers=numbers,
        remedy=remedy,
    )


def unscale_inside(f: Facts) -> Finding | None:
    """`unscale_` inside the accumulation window."""
    rule, remedy = (
        "unscale-every-microbatch",
        "Call scaler.unscale_(optimizer) once, after the last micro-batch, right before clipping and scaler.step(optimizer).",
    )
    e = f.raised("unscale_() has already been called")
    if e is not None and e.data.get("accumulating"):
        return _loop(
            rule,
            "unscale_() is called for every micro-batch",
            f"""At step {e.step} unscale_() was called {e.data.get("unscale_calls")} times before update(), after
                {e.data.get("scale_calls")} micro-batches whose gradients were being accumulated: it is inside the accumulation loop.
                GradScaler raised "{e.data.get("text")}".""",
            remedy,
            [e.step],
            "unscale_",
            where=e.where,
            numbers={"unscale_calls": e.data.get("unscale_calls"), "micro_batches": e.data.get("scale_calls")},
        )
    inside = f.observed("unscale_inside") > 0
    if not inside.any():
        return None
    steps = f.at(inside)
    return _loop(
        rule,
        "unscale_() is called inside the accumulation window",
        f"""At step {listing(steps)} a scaled backward added its gradients to some that unscale_() had divided by the scale already: the sum
            mixes true gradients with others that are {power(f.scale[inside][0])} times too large.""",
        remedy,
        steps,
        "unscale_",
        where=f.usage("unscale_inside").where,
        numbers={"steps": len(steps), "loss_scale": float(f.scale[inside][0])},
    )


def update_missing(f: Facts) -> Finding | None:
    """`update()` missing after a step, or jumped over."""
    rule = "update-not-called-on-skip"
    e = f.raised("unscale_() has already been called")
    if e is not None and not e.data.get("accumulating"):
        return _loop(
            rule,
            "An iteration ended without scaler.update()",
            f"""At step {
                e.step
            } unscale_() was called again although update() had not run since the last call, and the gradients had been
                cleared in between: the loop jumped over scaler.step() and scaler.update() after {
                count(int(e.data.get("records") or 0), "complete step")
            }. GradScaler raised "{e.data.get("text")}".""",
            """Call scaler.update() in every iteration, also where you leave out the step yourself. scaler.step() leaves it out by itself
                when gradients are not finite.""",
            [e.step],
            "update",
            where=e.where,
            numbers={"complete_steps": e.data.get("records")},
        )
    e = f.raised("step() has already been called") or f.raised("unscale_() is being called after step()")
    if e is None:
        return None
    return _loop(
        rule,
        "scaler.update() is missing after scaler.step()",
        f"""At step {e.step} {e.data.get("call")}() was called although scaler.step() had run and scaler.update() had not since. GradScaler
            raised "{e.data.get("text")}".""",
        "Call scaler.update() once at the end of every iteration, after scaler.step() of all optimizers.",
        [e.step],
        "update",
        where=e.where,
        numbers={"complete_steps": e.data.get("records")},
    )


def without_grads(f: Facts) -> Finding | None:
    """An optimizer is stepped although none of its parameters has a gradient."""
    notes = f.usage("no_grads")
    raised = f.raised("No inf checks were recorded for this optimizer", "step")
    if not notes:
        return None
    label = str(notes.data.get("optimizer"))
    times = f.observed(f"no_grads/{label}") > 0
    steps = f.at(times) or [notes.first.step]
    if raised is None and len(steps) < max(2, NO_GRADS_SHARE * f.n):
        return None
    tail = f'GradScaler raised "{raised.data.get("text")}".' if raised else ""
    return _loop(
        "optimizer-without-grads",
        f"{label} is stepped although none of its parameters has a gradient",
        f"At step {listing(steps)} every parameter of {label} had .grad = None. {tail}",
        """Step an optimizer only in iterations whose backward reaches its parameters. Check requires_grad, detach(), and which parameters
            it was given.""",
        steps,
        "step",
        layers=modules(f.owned(label)),
        where=notes.where,
        numbers={"steps": len(steps), "parameters": len(f.owned(label))},
    )


def stale(f: Facts) -> Finding | None:
    """Gradients not cleared after a skip: the inf stays and the scale collapses."""
    kept = f.observed("grads_kept") > 0
    hit = kept & np.concatenate([[False], f.skipped[:-1]]) & f.skipped & ~f.loss_bad if f.n else kept
    if hit.sum() < 2 or hit.sum() < 0.5 * f.skipped.sum():
        return None
    steps = f.at(hit)
    first = max(f.position(steps[0]) - 1, 0)
    return _loop(
        "stale-nonfinite-grads",
        "Gradients are not cleared after a skipped step, so that its inf stays",
        f"""Step {int(f.steps[first])} overflowed. At step {listing(steps)} the gradients of the step before were still there when backward
            began, and were non-finite again although the loss was finite ({f.loss[hit][0]:.3g}): inf plus anything is inf. The scale fell
            from {power(f.scale[first])} to {power(f.scale[-1])}.""",
        "Call optimizer.zero_grad(set_to_none=True) in every iteration, also after a skipped step, before the next backward.",
        [int(f.steps[first]), *steps],
        "zero_grad",
        numbers={"steps": len(steps), "first_scale": float(f.scale[first]), "last_scale": float(f.scale[-1])},
    )


def outside(f: Facts) -> Finding | None:
    """`optimizer.step()` called beside the scaler, or on gradients that still carry the scale."""
    raw, unscaled, beside = (f.observed(f"outside_step/{k}") > 0 for k in ("scaled", "unscaled", "beside"))
    where = f.usage("outside_step").where
    if beside.any() or unscaled.any():
        steps = f.at(beside | unscaled | raw)
        how = (
            "beside scaler.step() in the same step"
            if beside.any()
            else "after scaler.unscale_(), in place of scaler.step()"
        )
        twice = "Every update is applied twice, and" if beside.any() else "So"
        return _loop(
            "optimizer-step-outside-scaler",
            f"optimizer.step() is called {how}",
            f"""At step {listing(steps)} an optimizer was stepped directly, {how}. {twice} nothing keeps inf and NaN out of the weights: the
                check is in scaler.step().""",
            "Call scaler.step(optimizer) alone, which unscales, checks and steps; never optimizer.step() itself.",
            steps,
            "step",
            where=where,
            numbers={"steps": len(steps)},
        )
    if not raw.any():
        return None
    steps = f.at(raw)
    typical = float(np.nanmedian(f.scale[raw]))
    return _loop(
        "optimizer-step-without-unscale",
        "optimizer.step() runs on gradients that are still multiplied by the loss scale",
        f"""At step {listing(steps)} the loss went through scaler.scale(), but the optimizer was stepped directly: its gradients were
            {power(typical)} times too large.""",
        "Replace optimizer.step() by scaler.step(optimizer), and call scaler.update() at the end of the iteration.",
        steps,
        "step",
        where=where,
        numbers={"steps": len(steps), "loss_scale": typical},
    )


def within_accumulation(f: Facts) -> Finding | None:
    """`update()` between micro-batches mixes gradients of two scales."""
    crossed: list[tuple[int, str, list[float]]] = []
    scale = f.run.scalar("loss_scale")
    for name, values in f.observed_like("accumulated_since/").items():
        for i in np.flatnonzero(np.isfinite(values)).tolist():
            step = int(f.steps[i])
            inside = (f.run.steps >= values[i]) & (f.run.steps <= step)
            crossed.append((step, name, list(dict.fromkeys(scale[inside].tolist()))))
    mixed = sorted(x for x in crossed if len(x[2]) > 1)
    raised = f.raised("No inf checks were recorded prior to update", "update")
    where, known = "", {}
    if mixed:
        steps = [step for step, _, _ in mixed]
        scales = ", ".join(power(s) for s in mixed[0][2][:4])
        evidence = f"""At step {listing(steps)} {mixed[0][1]} was stepped on gradients accumulated at the scales {scales}: update() had changed
            the scale between the micro-batches."""
        known = {"steps": len(steps), "loss_scales": mixed[0][2][:8]}
    elif raised is not None:
        steps, where = [raised.step], raised.where
        evidence = f"""At step {raised.step} update() was called after {count(int(raised.data.get("scale_calls") or 0), "micro-batch")} although
            no optimizer had been stepped. GradScaler raised "{raised.data.get("text")}"."""
    elif len(crossed) >= 2:
        steps = [step for step, _, _ in crossed]
        evidence = f"At step {listing(steps)} gradients had been accumulated over a call of update(), which may change the scale."
        known = {"steps": len(steps)}
    else:
        return None
    return _loop(
        "scale-changed-within-accumulation",
        "update() is called between micro-batches, which mixes gradients of two scales",
        evidence,
        "Call scaler.step() and scaler.update() once, after the last micro-batch: all micro-batches of a step must carry the same scale.",
        steps,
        "update",
        where=where,
        numbers=known,
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
    return _loop(
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


def clip_scaled(f: Facts) -> Finding | None:
    """Gradients were clipped while still scaled: changed in place before unscaling, and their norm or maximum pinned to one value."""
    changed = f.observed("grads_changed_before_unscale") > 0
    seen = max(min(f.n, 3), 1)
    if not f.enabled or changed[:seen].mean() < CHANGED_SHARE:
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
    return _loop(
        "clip-before-unscale",
        "Gradients are clipped while they are still multiplied by the loss scale",
        f"""Gradients were changed in place between backward and unscaling, and the {kind} of the scaled gradients was {value:.4g} at
            {share:.0%} of the steps. Divided by the scale ({power(typical)}), that is a limit of {value / typical:.3g}.""",
        "Call scaler.unscale_(optimizer) right before torch.nn.utils.clip_grad_norm_(...), then scaler.step(optimizer).",
        f.at(good),
        "clip_grad_norm_" if "norm" in kind else "clip_grad_value_",
        numbers={"limit": value, "share_of_steps": share, "loss_scale": typical, "effective_limit": value / typical},
    )


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


def penalty(f: Facts) -> Finding | None:
    """A gradient penalty computed on scaled gradients."""
    hit = f.observed("penalty_on_scaled") > 0
    if not hit.any():
        return None
    steps, typical = f.at(hit), float(np.median(f.scale[hit]))
    return _loop(
        "penalty-on-scaled-grads",
        "A gradient penalty is computed on gradients that are still multiplied by the loss scale",
        f"""At step {listing(steps)} a scaled loss was differentiated with create_graph=True, and the next loss, which is made of these
            gradients, does not divide by the scale: the penalty sees gradients {power(typical)} times too large, and changes whenever the
            scale does.""",
        """Divide first: grads = torch.autograd.grad(scaler.scale(loss), params, create_graph=True); inverse = 1.0 / scaler.get_scale();
            grads = [g * inverse for g in grads]; then compute the penalty.""",
        steps,
        "autograd.grad",
        where=f.usage("penalty").where,
        numbers={"steps": len(steps), "loss_scale": typical},
    )


def not_restored(f: Facts) -> Finding | None:
    """A resumed session starts from the initial scale again."""
    found = _restart(f) or _resumed_optimizer(f)
    if found is None:
        return None
    at, before, told = found
    burst = next((b.last + 1 - at for b in f.blocks if b.first <= at <= b.last), 0)
    if not burst and before is None:
        return None
    known = f", although the session before had settled at {power(before)}" if before is not None else ""
    return _loop(
        "scaler-state-not-restored",
        "A resumed run starts from a fresh loss scale: the scaler's state was not restored",
        f"""At step {int(f.steps[at])} the scale was {power(f.scale[at])}{known}; {count(burst, "step")} in a row
            {"was" if burst == 1 else "were"} skipped until it fitted again. {told}""",
        "Save scaler.state_dict() in the checkpoint, and call scaler.load_state_dict(...) where model and optimizer are restored.",
        f.steps[at : at + max(burst, 1)].tolist(),
        "load_state_dict",
        severity="warning",
        numbers={"loss_scale": float(f.scale[at]), "scale_before": before, "skipped_in_a_row": burst},
    )


def _restart(f: Facts) -> tuple[int, float | None, str] | None:
    """A session that began at its own initial scale, far above the one the session before had left."""
    sessions = f.run.sessions
    tracker = f.scalar("growth_tracker")
    for previous, session in zip(sessions, sessions[1:], strict=False):
        at = f.position(session.first_step)
        if session.first_step < 0 or previous.first_step < 0 or not 0 < at < f.n:
            continue
        left = float(f.scale[at - 1]) * (float(f.scaler.get("backoff_factor", 0.5)) if f.skipped[at - 1] else 1.0)
        initial = f.run.session(session.index).metadata.get("scaler", {}).get("init_scale")
        if tracker[at] == 0 and f.scale[at] == initial and f.scale[at] > 2 * left:
            told = f.usage("optimizer_resumed")
            return at, left, f"{told.first.message}." if told else ""
    return None


def _resumed_optimizer(f: Facts) -> tuple[int, float | None, str] | None:
    """An optimizer with steps behind it beside a scaler at its start (the session before was not recorded)."""
    notes = f.usage("optimizer_resumed")
    if not notes:
        return None
    at = f.position(notes.first.step)
    return (at, None, f"{notes.first.message}.") if at < f.n and f.skipped[at : at + 2].any() else None
