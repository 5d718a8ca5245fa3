"""Rules on how AMP is used in the training loop."""

from __future__ import annotations

import numpy as np

from ampscope.analysis.rules.context import Facts, finding, listing, modules, power, span
from ampscope.analysis.finding import Finding

LOOP = "(training loop)"
PINNED = 2e-3
"""Relative spread of the scaled norm (or maximum) under which it counts as pinned: clipping leaves it equal to FP32 rounding and an epsilon."""
PINNED_STEPS = 5
ADVANCED_SHARE, ADVANCED_COUNT = 0.05, 3
"""design.md §7: more than 5 % of the run's steps, and at least 3."""
LOST_SHARE = 0.5
"""Share of weights with a gradient that an update leaves unchanged."""


def _usage(rule: str, title: str, evidence: str, remedy: str, steps: tuple[int, int, int], op: str = "", layers: tuple[str, ...] = (), severity: str = "error", where: str = LOOP, phase: str = "usage") -> Finding:
    return finding(rule, severity, title, phase, layers, op, where, steps, evidence, remedy)


def half_parameters(f: Facts) -> Finding | None:
    """Trainable parameters are FP16."""
    raised = next((e for e in f.usage("raised").events if "FP16 gradients" in str(e.data.get("text"))), None)
    seen = f.usage("half_parameters")
    if raised is None and not (seen and seen.data.get("enabled")):
        return None
    event = raised or seen.events[0]
    names = event.layers or seen.events[0].layers
    tail = f' GradScaler raised "{raised.data.get("text")}" in {raised.data.get("call")}().' if raised else ""
    return _usage(
        "trainable-params-fp16", "Trainable parameters are float16: the scaler refuses to unscale them",
        f"{len(names)} trainable parameters are float16, so their gradients are too: {', '.join(names[:4])}.{tail}",
        "Keep trainable parameters in float32 (model.float(); cast only frozen ones) and let autocast do the rest, or train in BF16 without a scaler.",
        span([event.step]), "unscale_", modules(names)[:8],
    )  # fmt: skip


def unscale_twice(f: Facts) -> Finding | None:
    """`unscale_` inside the accumulation window."""
    for e in f.usage("raised").events:
        d = e.data
        if "unscale_() has already been called" in str(d.get("text")) and d.get("accumulating"):
            return _usage(
                "unscale-every-microbatch", "unscale_() is called for every micro-batch",
                f"At step {e.step} unscale_() was called {d.get('unscale_calls')} times before update(), after {d.get('scale_calls')} micro-batches whose gradients were still being accumulated: it is inside the accumulation loop.",
                "Call scaler.unscale_(optimizer) once, after the last micro-batch, right before clipping and scaler.step(optimizer).",
                span([e.step]), "unscale_",
            )  # fmt: skip
    mixed = f.observed("unscaled_not_stepped") > 0
    kept = f.observed("update_between_microbatches") > 0
    if mixed.sum() >= 2 and kept.any() and not f.usage("mixed_scales"):
        steps = f.steps[mixed].tolist()
        return _usage(
            "unscale-every-microbatch", "unscale_() and update() are called for every micro-batch",
            f"At step {listing(steps)} gradients were unscaled and update() was called, but no optimizer stepped; the next micro-batch added scaled gradients to unscaled ones.",
            "Call unscale_(), step() and update() once, after the last micro-batch.", span(steps), "unscale_",
        )  # fmt: skip
    return None


def update_missing(f: Facts) -> Finding | None:
    """`update()` missing after a step."""
    for e in f.usage("raised").events:
        d, text = e.data, str(e.data.get("text"))
        if "unscale_() has already been called" in text and not d.get("accumulating"):
            return _usage(
                "update-not-called-on-skip", "An iteration ended without scaler.update()",
                f"At step {e.step} unscale_() was called again although update() had not run since the last call; {d.get('records')} iterations before it were complete and gradients had been cleared in between: the loop jumped over step() and update().",
                "Call scaler.update() in every iteration, also where you skip the step yourself; scaler.step() skips on inf and NaN by itself.",
                span([e.step]), "update",
            )  # fmt: skip
        if "step() has already been called" in text or "unscale_() is being called after step()" in text:
            return _usage(
                "update-not-called-on-skip", "scaler.update() is missing after scaler.step()",
                f"At step {e.step} {d.get('call')}() was called although step() had run and update() had not since.",
                "Call scaler.update() once at the end of every iteration, after scaler.step() of all optimizers.", span([e.step]), "update",
            )  # fmt: skip
    return None


def without_grads(f: Facts) -> Finding | None:
    """An optimizer is stepped although none of its parameters has a gradient."""
    seen = f.usage("no_grads")
    raised = next((e for e in f.usage("raised").events if "No inf checks were recorded" in str(e.data.get("text")) and e.data.get("call") == "step"), None)
    if raised is None and not seen:
        return None
    e = raised or seen.events[0]
    label = str(seen.data.get("optimizer", "the optimizer"))
    counts = f.observed_like("no_grads/").get(label, np.zeros(1))
    times = int((counts > 0).sum())
    names = [layer.name for layer in f.run.layers if layer.optimizer == label]
    tail = f' GradScaler raised "{str(raised.data.get("text")).strip()}".' if raised else ""
    if raised is None and times < max(2, 0.2 * f.n):
        return None
    return _usage(
        "optimizer-without-grads", f"{label} is stepped although none of its parameters has a gradient",
        f"At step {e.step} ({max(times, 1)} steps in all) every parameter of {label} had .grad = None.{tail}",
        "Step an optimizer only in iterations whose backward reaches its parameters; check requires_grad, detach() and which parameters it was given.",
        span([e.step]) if times < 2 else span(f.steps[counts > 0].tolist()), "step", modules(names)[:6],
    )  # fmt: skip


def stale(f: Facts) -> Finding | None:
    """Gradients not cleared after a skip."""
    kept = f.observed("grads_kept") > 0
    if f.n < 3 or not kept.any():
        return None
    previous = np.concatenate([[False], f.skipped[:-1]])
    hit = kept & previous & f.skipped
    if hit.sum() < 2 or not f.unfinished_skips and hit.sum() < 0.5 * f.skipped.sum():
        return None
    if f.loss_bad[hit].mean() > 0.5:
        return None
    steps = [int(s) for s in f.steps[hit]]
    first = max(int(np.flatnonzero(hit)[0]) - 1, 0)
    return _usage(
        "stale-nonfinite-grads", "Gradients are not cleared after a skipped step, so the inf stays",
        f"Step {int(f.steps[first])} overflowed; at step {listing(steps)} the gradients of the step before were still there when the loss was scaled, and were non-finite again although the loss was finite ({f.loss[hit][0]:.3g}). The scale fell from {power(float(f.scale[first]))} to {power(float(f.scale[-1]))}.",
        "Call optimizer.zero_grad(set_to_none=True) in every iteration, also after a skipped step, before the next backward.",
        span([int(f.steps[first]), *steps]), "zero_grad",
    )  # fmt: skip


def outside(f: Facts) -> Finding | None:
    """`optimizer.step()` beside the scaler, or on scaled gradients."""
    raw, unscaled, beside = (f.observed(f"outside_step/{k}") > 0 for k in ("scaled", "unscaled", "beside"))
    if beside.any() or unscaled.any():
        steps = f.steps[beside | unscaled].tolist()
        how = "beside scaler.step() in the same iteration" if beside.any() else "after scaler.unscale_(), in place of scaler.step()"
        return _usage(
            "optimizer-step-outside-scaler", f"optimizer.step() is called {how}",
            f"At step {listing(steps)} an optimizer was stepped directly, {how}: that step is not guarded by the inf check" + (", and every update is applied twice." if beside.any() else "."),
            "Call only scaler.step(optimizer), which unscales, checks and steps; never optimizer.step() itself.", span(steps), "step",
        )  # fmt: skip
    if raw.any():
        steps = f.steps[raw].tolist()
        return _usage(
            "optimizer-step-without-unscale", "optimizer.step() runs on gradients that are still multiplied by the loss scale",
            f"At step {listing(steps)} the loss went through scaler.scale(), but the optimizer was stepped directly: its gradients were {power(float(np.nanmedian(f.scale[raw])))} times too large.",
            "Replace optimizer.step() by scaler.step(optimizer) followed by scaler.update().", span(steps), "step",
        )  # fmt: skip
    return None


def within_accumulation(f: Facts) -> Finding | None:
    """`update()` between micro-batches."""
    mixed = f.usage("mixed_scales")
    between = f.observed("update_between_microbatches") > 0
    raised = next((e for e in f.usage("raised").events if e.data.get("call") == "update" and "No inf checks" in str(e.data.get("text"))), None)
    if mixed:
        scales = " and ".join(power(float(s)) for s in mixed.data.get("scales", []))
        evidence = f"At step {listing(e.step for e in mixed.events)} an optimizer was stepped on gradients accumulated at scales {scales}: update() had changed the scale between the micro-batches."
        steps = span([e.step for e in mixed.events])
    elif raised is not None:
        evidence = f"At step {raised.step} update() was called after {raised.data.get('scale_calls')} micro-batch(es) although no optimizer had been stepped; GradScaler raised \"{str(raised.data.get('text')).strip()}\"."
        steps = span([raised.step])
    elif between.sum() >= 2:
        evidence = f"At step {listing(f.steps[between].tolist())} gradients had been accumulated across a call of update()."
        steps = span(f.steps[between].tolist())
    else:
        return None
    return _usage(
        "scale-changed-within-accumulation", "update() is called between micro-batches, which mixes gradients of two scales", evidence,
        "Call scaler.step() and scaler.update() once, after the last micro-batch; every micro-batch of a step must carry the same scale.", steps, "update",
    )  # fmt: skip


def scheduler(f: Facts) -> Finding | None:
    """The learning-rate scheduler moved on although the optimizer did not."""
    if f.n < 3 or not f.skipped.any():
        return None
    moved = np.zeros(f.n, bool)
    moved[:-1] = np.diff(f.lr) != 0
    moved &= np.isfinite(f.lr)
    good = ~f.skipped
    good[-1] = False
    hit = moved & f.skipped
    if not hit.any() or good.any() and moved[good].mean() < 0.3:
        return None
    count = int(hit.sum())
    serious = count >= ADVANCED_COUNT and count > ADVANCED_SHARE * f.n
    steps = [int(s) for s in f.steps[hit]]
    return _usage(
        "scheduler-advanced-on-skipped-step", f"The learning-rate scheduler advanced on {count} skipped steps",
        f"At step {listing(steps)} the optimizer was skipped and the learning rate moved on all the same ({count} of {f.n} steps). The schedule runs ahead of the training by that many steps.",
        "Advance it only after a real step: s = scaler.get_scale(); scaler.step(optimizer); scaler.update(); if scaler.get_scale() >= s: scheduler.step().",
        span(steps), "scheduler.step", severity="warning" if serious else "info",
    )  # fmt: skip


def clip_scaled(f: Facts) -> Finding | None:
    """Gradients clipped while still scaled."""
    changed = f.observed("grads_changed_before_unscale") > 0
    if not f.enabled or not changed.any():
        return None
    good = ~f.skipped & np.isfinite(f.run.scalar("grad_norm"))
    norm = f.run.scalar("grad_norm") * f.scale
    pinned = _pinned(norm[good])
    kind = "norm"
    if pinned is None:
        at = good[f.rows]
        with np.errstate(all="ignore"):
            largest = np.nanmax(f.metric("grad_max"), axis=1) * f.scale[f.rows] if f.names else np.zeros(0)
        pinned, kind = _pinned(largest[at]), "largest element"
    if pinned is None:
        return None
    value, share = pinned
    steps = [int(s) for s in f.steps[good]]
    return _usage(
        "clip-before-unscale", "Gradients are clipped while they are still multiplied by the loss scale",
        f"Before unscaling gradients were changed in place, and the {kind} of the scaled gradients was {value:.4g} at {share:.0%} of {len(steps)} steps; divided by the scale ({power(float(np.median(f.scale[good])))}) that leaves an effective limit of {value / float(np.median(f.scale[good])):.3g}.",
        "Call scaler.unscale_(optimizer) right before torch.nn.utils.clip_grad_norm_(...), then scaler.step(optimizer).", span(steps), "clip_grad_norm_",
    )  # fmt: skip


def _pinned(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float] | None:
    values = values[np.isfinite(values) & (values > 0)]
    if len(values) < PINNED_STEPS:
        return None
    top = float(np.median(values[values >= np.quantile(values, 0.5)]))
    near = np.abs(values - top) <= PINNED * top
    return (top, float(near.mean())) if near.mean() >= 0.5 and near.sum() >= PINNED_STEPS else None


def penalty(f: Facts) -> Finding | None:
    """A gradient penalty computed on scaled gradients."""
    hit = f.observed("penalty_on_scaled") > 0
    if hit.sum() < 1:
        return None
    steps = f.steps[hit].tolist()
    return _usage(
        "penalty-on-scaled-grads", "A gradient penalty is computed on gradients that are still multiplied by the loss scale",
        f"At step {listing(steps)} scaled outputs were differentiated with create_graph=True and get_scale() was never asked: the penalty is a function of gradients {power(float(np.median(f.scale[hit])))} times too large, and changes with the scale.",
        "Divide first: grads = torch.autograd.grad(scaler.scale(loss), params, create_graph=True); inv = 1.0 / scaler.get_scale(); grads = [g * inv for g in grads]; then compute the penalty.",
        span(steps), "autograd.grad",
    )  # fmt: skip


def not_restored(f: Facts) -> Finding | None:
    """A resumed session starts from the initial scale again."""
    resumed = f.usage("optimizer_resumed")
    sessions = f.run.sessions
    restart, before = -1, float("nan")
    for previous, session in zip(sessions, sessions[1:], strict=False):
        if session.first_step < 0 or previous.first_step < 0:
            continue
        at = int(np.searchsorted(f.steps, session.first_step))
        if not 0 < at < f.n:
            continue
        earlier = float(f.scale[at - 1]) * (0.5 if f.skipped[at - 1] else 1.0)
        fresh = f.tracker[at] == 0 and f.scale[at] == float(f.run.session(session.index).metadata.get("scaler", {}).get("init_scale", np.nan))
        if fresh and f.scale[at] > 2 * earlier:
            restart, before = at, earlier
            break
    if restart < 0:
        if not resumed:
            return None
        restart = int(np.searchsorted(f.steps, resumed.events[0].step))
        if restart >= f.n or not f.skipped[restart : restart + 2].any():
            return None
    burst = 0
    while restart + burst < f.n and f.skipped[restart + burst]:
        burst += 1
    if burst == 0 and before != before:
        return None
    known = f" although the session before had settled at {power(before)}" if before == before else ""
    state = f" {resumed.events[0].message}." if resumed else ""
    return _usage(
        "scaler-state-not-restored", "A resumed run starts with a fresh loss scale: the scaler's state was not restored",
        f"At step {int(f.steps[restart])} the scale was {power(float(f.scale[restart]))}{known}, and the next {burst} steps were skipped.{state}",
        "Save scaler.state_dict() in the checkpoint and call scaler.load_state_dict(...) beside the model's and the optimizer's.",
        (int(f.steps[restart]), int(f.steps[min(restart + max(burst - 1, 0), f.n - 1)]), max(burst, 1)), "load_state_dict", severity="warning", where="(checkpoint resume)",
    )  # fmt: skip


def no_autocast(f: Facts) -> Finding | None:
    """Scaling without FP16 anywhere."""
    if not f.enabled or f.n < 2:
        return None
    kinds = set(f.matmuls) or ({f.dtype_of_gradients} - {""})
    if not kinds or kinds & {"float16", "bfloat16"} or any(layer.dtype in ("float16", "bfloat16") for layer in f.run.layers):
        return None
    if f.dtype_of_gradients in ("float16", "bfloat16"):
        return None
    seen = f"All {sum(f.matmuls.values())} matrix products of the audited steps ran in {', '.join(sorted(kinds))}" if f.matmuls else "Every gradient is FP32-born"
    return _usage(
        "scaler-without-autocast", "GradScaler is used, but nothing runs in FP16", f"{seen}; the scale only multiplies and divides FP32 numbers.",
        "Wrap the forward and the loss in torch.autocast(device_type, dtype=torch.float16), or drop the GradScaler.", span(f.steps.tolist()), "autocast", severity="warning",
    )  # fmt: skip


def bf16(f: Facts) -> Finding | None:
    """Scaling BF16."""
    if not f.enabled or f.n < 2:
        return None
    kinds = f.matmuls
    if not (kinds.get("bfloat16", 0) > 0 and kinds.get("float16", 0) == 0) and not (not kinds and f.dtype_of_gradients == "bfloat16"):
        return None
    seen = f"{kinds['bfloat16']} of {sum(kinds.values())} matrix products of the audited steps ran in bfloat16, none in float16" if kinds else "Gradients carry BF16's 7 mantissa bits"
    return _usage(
        "scaler-useless-with-bf16", "GradScaler scales BF16, which has FP32's range and needs no scaling", f"{seen}; {int(f.skipped.sum())} of {f.n} steps were skipped. Note that torch.autocast('cpu') without dtype means bfloat16.",
        "Use GradScaler(enabled=False) with BF16, or dtype=torch.float16 if FP16 was meant.", span(f.steps.tolist()), "-", severity="warning",
    )  # fmt: skip


def optimizer_eps(f: Facts) -> Finding | None:
    """Adam's epsilon is zero in its FP16 state."""
    seen = f.usage("optimizer_eps")
    if not seen:
        return None
    e = seen.events[0]
    return _usage(
        "optimizer-eps-underflow", f"{e.data.get('optimizer')}'s eps={e.data.get('eps'):g} is zero in float16", f"{e.message}: where the second moment rounds to zero as well, the update is 0/0 or x/0.",
        "Keep parameters and optimizer state in float32 (autocast casts for the forward), or use eps=1e-4.", (e.step, int(f.steps[-1]) if f.n else e.step, max(f.n, 1)), "step", modules(e.layers)[:8], phase="optimizer",
    )  # fmt: skip


def rounding(f: Facts) -> Finding | None:
    """Updates too small beside half-precision weights."""
    asked, lost = f.observed("rounding/asked"), f.observed("rounding/unchanged")
    if asked.sum() < 1 or lost.sum() / asked.sum() < LOST_SHARE:
        return None
    half = [layer.name for layer in f.run.layers if layer.dtype in ("float16", "bfloat16") and layer.optimizer]
    kind = next((layer.dtype for layer in f.run.layers if layer.name in half), "bfloat16")
    bits = "2^-11" if kind == "float16" else "2^-9"
    return _usage(
        "weight-update-lost-to-rounding", f"Most updates are lost to rounding: the weights are {kind}",
        f"At {int((asked > 0).sum())} looked-at steps {lost.sum() / asked.sum():.0%} of the weights that had a gradient did not change: an update below {bits} of the weight rounds away.",
        "Keep master weights in float32 and let autocast cast them, or use stochastic rounding or a larger learning rate.", span(f.steps[asked > 0].tolist()), "step", modules(half)[:8], severity="warning", phase="optimizer",
    )  # fmt: skip


def tensor_cores(f: Facts) -> Finding | None:
    """The GPU has no FP16 tensor cores."""
    seen = f.usage("no_tensor_cores")
    if not seen or not f.fp16:
        return None
    return _usage(
        "no-fp16-tensor-cores", "This GPU has no FP16 tensor cores", f"{seen.events[0].message}: FP16 saves memory but little time.",
        "Expect no speed-up here; use AMP for memory, or a GPU of compute capability 7.0 or newer.", span(f.steps.tolist()), "-", severity="info", where="",
    )  # fmt: skip
