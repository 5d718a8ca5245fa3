"""Rules on the training loop: which calls are made, in which order, on what."""

from __future__ import annotations

import numpy as np

from ampscope.analysis.finding import Finding
from ampscope.analysis.rules.context import Facts, count, listing, modules, power
from ampscope.analysis.rules.loop import loop

NO_GRADS_SHARE = 0.2
"""Share of the steps without a gradient from which it is no exception."""


def unscale_inside(f: Facts) -> Finding | None:
    """`unscale_` inside the accumulation window."""
    rule, remedy = (
        "unscale-every-microbatch",
        "Call scaler.unscale_(optimizer) once, after the last micro-batch, right before clipping and scaler.step(optimizer).",
    )
    e = f.raised("unscale_() has already been called")
    if e is not None and e.data.get("accumulating"):
        return loop(
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
    return loop(
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
        return loop(
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
    return loop(
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
    return loop(
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
    return loop(
        "stale-nonfinite-grads",
        "Gradients are not cleared after a skipped step, so that its inf stays",
        f"""Step {int(f.steps[first])} overflowed. At step {listing(steps)} the gradients of the step before were still there when backward
            began, and were non-finite again although the loss was finite ({f.loss[hit][0]:.3g}): inf plus anything is inf. The scale fell
            from {power(f.scale[first])} to {power(f.scale[-1])}.""",
        "Call optimizer.zero_grad(set_to_none=True) in every iteration, also after a skipped step, before the next backward.",
        [int(f.steps[first]), *steps],
        "zero_grad",
        where=f.usage("grads_kept").where,
        numbers={"steps": len(steps), "first_scale": float(f.scale[first]), "last_scale": float(f.scale[-1])},
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
    where, known = f.usage("accumulated").where, {}
    if mixed:
        steps = [step for step, _, _ in mixed]
        scales = ", ".join(power(s) for s in mixed[0][2][:4])
        evidence = f"""At step {listing(steps)} {mixed[0][1]} was stepped on gradients accumulated at the scales {scales}: update() had changed
            the scale between the micro-batches."""
        known = {"steps": len(steps), "loss_scales": mixed[0][2][:8]}
    elif raised is not None and not f.usage("outside_step"):
        steps, where = [raised.step], raised.where
        evidence = f"""At step {raised.step} update() was called after {count(int(raised.data.get("scale_calls") or 0), "micro-batch")} although
            no optimizer had been stepped. GradScaler raised "{raised.data.get("text")}"."""
    elif len(crossed) >= 2 and not f.observed("unscale_inside").any():
        steps = [step for step, _, _ in crossed]
        evidence = f"At step {listing(steps)} gradients had been accumulated over a call of update(), which may change the scale."
        known = {"steps": len(steps)}
    else:
        return None
    return loop(
        "scale-changed-within-accumulation",
        "update() is called between micro-batches, which mixes gradients of two scales",
        evidence,
        "Call scaler.step() and scaler.update() once, after the last micro-batch: all micro-batches of a step must carry the same scale.",
        steps,
        "update",
        where=where,
        numbers=known,
    )


def penalty(f: Facts) -> Finding | None:
    """A gradient penalty computed on scaled gradients."""
    hit = f.observed("penalty_on_scaled") > 0
    if not hit.any():
        return None
    steps, typical = f.at(hit), float(np.median(f.scale[hit]))
    return loop(
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
