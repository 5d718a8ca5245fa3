"""Rules on data and forward: what was non-finite before backward began."""

from __future__ import annotations

import numpy as np

from ampscope.analysis.finding import Finding
from ampscope.analysis.rules import births
from ampscope.analysis.rules.births import blamed, innocence, numbers, place, story
from ampscope.analysis.rules.context import Facts, count, finding, listing, power, span
from ampscope.record.step import Event

NO_SCALE = "A lower loss scale cannot help."


def nonfinite_input(f: Facts) -> Finding | None:
    """The batch holds NaN or inf before the model touches it."""
    if not f.inputs:
        return None
    e = f.inputs[0]
    samples = ", ".join(map(str, e.data.get("samples", [])))
    steps = [x.step for x in f.inputs]
    lost = f.lost_loss_steps
    many = "s" if len(steps) > 1 else ""
    if e.data.get("given_to"):  # past the model: a target
        shape = " × ".join(map(str, e.data.get("shape") or [])) or "scalar"
        text = f"""In the traced step{many} {listing(steps)} {e.data["given_to"]} was given a tensor ({shape}) with
            {count(int(e.data.get("count") or 0), "non-finite value")} that no operation of the step made: a target or a weight of the batch."""
    else:
        text = f"""In the traced step{many} {listing(steps)} argument {e.data.get("argument")} of the model held non-finite values
            ({e.data.get("count")} in sample {samples} of step {e.step}'s batch) before the first layer ran."""
    if lost:
        text += f" The loss was non-finite at {count(len(lost), 'step')}: {listing(lost)}. FP32 would fail as well."
    return finding(
        "nonfinite-input",
        "error",
        "The batch holds NaN or inf in what the loss compares with"
        if e.data.get("given_to")
        else "The model's input holds NaN or inf",
        "data",
        op="-",
        where=e.where,
        steps=span([*steps, *lost]),
        evidence=text,
        numbers={"bad_inputs_seen": len(steps), "steps_with_bad_loss": len(lost), "shape": e.data.get("shape")},
        remedy="""Clean or validate the data: reject a batch unless torch.isfinite(x).all() before the forward.
            AMP is not at fault, and a skipped step is all that keeps the weights alive.""",
    )


def input_exceeds(f: Facts) -> Finding | None:
    """A finite input overflows on the cast to FP16."""
    found = births.of(f, "input-exceeds-fp16-range", ("root", "hidden"))
    if not found:
        return None
    e = found[0]
    return finding(
        "input-exceeds-fp16-range",
        "error",
        "The input is finite but too large for FP16",
        "data",
        layers=blamed(found),
        op=e.op,
        where=e.where,
        steps=span([*(x.step for x in found), *f.lost_loss_steps]),
        evidence=f"""The model's input reaches {e.data.get("input_max") or 0:.4g}; autocast casts it to FP16 on entry to {place(e)},
            where values from 65520 on become inf. {innocence(e)}""",
        numbers=numbers(found),
        remedy="""Normalise the input before the model (x / x.abs().max(), or standardise it), or run the first layer in FP32 or BF16.""",
    )


def buffers(f: Facts) -> Finding | None:
    """Running statistics were poisoned."""
    events = f.by_topic.get("buffers", [])
    if not events or f.inputs:
        return None
    e = events[0]
    names = [str(n) for n in e.data.get("buffers", [])]
    root = next((r for r in f.roots if r.step <= e.step and r.phase == "forward"), None)
    cause = (
        f"The forward overflowed in {place(root)} at step {root.step}."
        if root
        else "The operation was not seen: it did not recur."
    )
    skipped = e.step in set(f.skipped_steps)
    kept = "GradScaler skipped the step and kept the weights, but the" if skipped else "The"
    return finding(
        "batchnorm-buffers-nonfinite",
        "error",
        f"Running statistics are poisoned: {', '.join(names[:2])}",
        "forward",
        layers=tuple(dict.fromkeys([*e.layers, *(blamed([root]) if root else ())])),
        op=root.op if root else "",
        where=root.where if root else "",
        steps=(e.step, f.whole[1], f.n - f.position(e.step)),
        evidence=f"""At step {e.step}, {count(len(names), "buffer")} became non-finite ({", ".join(names[:4])}). {cause} {kept} statistics
            are updated in forward and stay so: every evaluation from then on is NaN.""",
        numbers={"buffers": names[:8], "skipped_steps": len(f.skipped_steps)},
        remedy="""Call reset_running_stats() on these modules (or load the buffers of an earlier checkpoint). Prevent it: reject outlier
            batches before the forward, or run the layer before the normalisation in FP32.""",
    )


def _forward(f: Facts, rule: str, title: str, remedy: str, found: list[Event], more: str = "") -> Finding:
    e = found[0]
    pool = f.lost_loss_steps if e.data.get("loss_bad") else []
    if e.data.get("role") == "hidden" and not pool:  # squashed before the loss: its steps are those that backward lost
        first = min(e.step for e in found)
        pool = [s for s, c in f.culprits.items() if c.data.get("nan") and s <= first]
        more = f"{more} The value was squashed on its way to the loss, and broke backward."
    if e.data.get("role") == "root" and not e.data.get("loss_bad"):
        pool = [s for s, c in f.culprits.items() if c.data.get("nan") and c.data.get("loss_finite")]
        more = f"{more} The loss stayed finite (the value was squashed or masked on its way), the gradients did not."
    hidden = e.data.get("role") == "hidden" or not e.data.get("loss_bad")
    lost = (
        f"{'Gradients were' if hidden else 'The loss was'} non-finite at {count(len(pool), 'step')}: {listing(pool)}."
        if pool
        else ""
    )
    return finding(
        rule,
        "error",
        title,
        "forward",
        layers=blamed(found),
        op=e.op,
        where=e.where,
        steps=span([*(x.step for x in found), *pool]),
        evidence=f"{story(found)} {more} {lost}",
        numbers=numbers(found) | {"steps_with_bad_loss": len(pool)},
        remedy=remedy,
    )


def softmax_masked(f: Facts) -> Finding | None:
    """A fully masked softmax row."""
    found = births.of(f, "forward-nan-softmax-all-masked")  # hidden ones that hurt nothing are no fault
    if not found:
        return None
    if found[0].data.get("masks_added"):
        remedy = """Mask with torch.finfo(dtype).min of the dtype at hand, combine masks before they become numbers (a boolean or), or
            take the softmax in FP32: -1e5 and the sum of two lowest finite values are -inf in FP16 alone."""
        more = "The row holds nothing but -inf because the mask left FP16's range, by a cast or by adding masks up."
    else:
        more = ""
        remedy = """Never mask a whole row: let a padded query attend to one position, or replace such rows, for example
            w = torch.where(mask.all(-1, keepdim=True), 0.0, w). FP32 gives NaN here too."""
    title = f"A softmax row is masked completely and gives NaN in {place(found[0])}"
    return _forward(f, "forward-nan-softmax-all-masked", title, remedy, found, more)


def eps_underflow(f: Facts) -> Finding | None:
    """An epsilon that FP16 rounds to zero."""
    found = births.of(f, "eps-underflow-division", ("root", "hidden"))
    if not found:
        return None
    e = found[0]
    eps = float(e.data.get("eps") or 0.0)
    return _forward(
        f,
        "eps-underflow-division",
        f"eps={eps:g} is zero in FP16, and {e.op} {'meets 0' if e.op.startswith('log') else 'divides by it'} in {place(e)}",
        """Do this step in FP32 (x.float(), or inside torch.autocast(device_type, enabled=False)), use an eps that FP16 holds
            (1e-4 or larger), or train in BF16.""",
        found,
        f"The constant {eps:g} is at or below 2^-25 = 3e-8 and rounds to zero in FP16, so that {'the logarithm is taken of' if e.op.startswith('log') else 'the denominator is'} exactly 0.",
    )


def attention(f: Facts) -> Finding | None:
    """Attention logits beyond FP16."""
    found = births.of(f, "forward-overflow-attention")
    if not found:
        return None
    return _forward(
        f,
        "forward-overflow-attention",
        f"Attention logits overflow FP16 before the softmax in {place(found[0])}",
        f"""Scale the query before the product ((q / d**0.5) @ k.transpose(-2, -1)), normalise q and k, use
            torch.nn.functional.scaled_dot_product_attention, or compute the logits in FP32 or BF16. {NO_SCALE}""",
        found,
    )


def reduction(f: Facts) -> Finding | None:
    """A sum, mean or norm over many FP16 elements overflows."""
    found = births.of(f, "forward-overflow-reduction")
    if not found:
        return None
    e = found[0]
    return _forward(
        f,
        "forward-overflow-reduction",
        f"{e.op} over FP16 elements overflows in {place(e)}",
        f"Reduce in FP32: x.float().sum(), or x.sum(dtype=torch.float32); in a loss, start from pred.float(). {NO_SCALE}",
        found,
        f"It reduces {int(e.data.get('elements') or 0):,} elements.",
    )


def activation(f: Facts) -> Finding | None:
    """A module's forward output exceeds FP16 (or is NaN, in FP32 too)."""
    found = births.of(f, "forward-overflow-activation") or _squashed(f)
    if not found:
        return _untraced(f)
    e = found[0]
    if e.data.get("fp32_ok") is False:
        title = f"{e.op} in {place(e)} gives non-finite values in forward, in FP32 too"
        remedy = f"Keep the arguments of {e.op} inside its domain (clamp them, add an epsilon). AMP is not at fault. {NO_SCALE}"
    elif e.data.get("cast") and e.data.get("parameter"):
        title = f"Weights of {e.data['parameter']} exceed 65504 and become inf when autocast casts them"
        remedy = f"Rescale these weights, keep {place(e)} in FP32, or train in BF16. {NO_SCALE}"
    else:
        title = f"The forward output of {e.op} in {place(e)} exceeds FP16's range"
        remedy = f"""Run {place(e)} in FP32 (x.float() inside torch.autocast(device_type, enabled=False)), normalise or rescale
            what it computes, or train in BF16. {NO_SCALE}"""
    return _forward(f, "forward-overflow-activation", title, remedy, found)


def _squashed(f: Facts) -> list[Event]:
    """Return overflows in forward that were squashed before the loss (tanh of inf is 1), but not before backward broke on them."""
    broken = {
        (e.step, e.layers[:1])
        for e in f.roots
        if e.phase == "backward" and births.classify(e) == "backward-nan-finite-forward"
    }
    hidden = [e for e in f.traced("hidden") if e.phase == "forward" and (e.step, e.layers[:1]) in broken]
    # Infinite in FP32 as well (atanh of 1): a pole, not an overflow. Backward's own finding says it.
    hidden = [e for e in hidden if e.data.get("fp32_ok") is not False or not births.POLES.search(e.op)]
    return [e for e in hidden if births.classify(e) == "forward-overflow-activation"]


def _untraced(f: Facts) -> Finding | None:
    """The forward is broken, but no traced step showed the operation (a compiled part, or a fault that did not come back)."""
    broken = [s for s in f.lost_loss_steps if s in f.culprits and f.culprits[s].data.get("bad")]
    opaque = [e for e in f.roots if e.data.get("opaque")]
    if not broken or f.inputs or len(opaque) < len(f.roots):
        return None
    seen = "what lies outside the compiled part is sound" if opaque else "no traced step showed the operation"
    how = (
        "Run one such step without torch.compile under ampscope.trace(model)"
        if opaque
        else "Run such a batch under ampscope.trace(model)"
    )
    return finding(
        "forward-overflow-activation",
        "error" if len(broken) > 1 else "warning",
        "The forward pass gives a non-finite loss",
        "forward",
        layers=opaque[0].layers if opaque else (),
        where=opaque[0].where if opaque else "",
        steps=span(broken),
        evidence=f"""The loss was not finite before backward began at {count(len(broken), "step")}: {listing(broken)}; {seen}.
            Every gradient that followed was lost with it.""",
        numbers={"steps_with_bad_loss": len(broken), "loss_scale": [float(f.scale[f.position(s)]) for s in broken[:3]]},
        remedy=f"{how} to name the operation; then run that part in FP32, or train in BF16. {NO_SCALE}",
    )


def loss_value_only(f: Facts) -> Finding | None:
    """The loss is inf although every gradient is finite."""
    bad = f.loss_bad & (f.bad_layers == 0) & ~f.skipped
    if not bad.any() or (f.loss_bad & (f.bad_layers > 0)).any():
        return None
    steps = f.at(bad)
    roots = [e for e in f.roots if e.phase == "forward"]
    e = roots[0] if roots else None
    return finding(
        "forward-overflow-loss-value-only",
        "warning",
        "The loss value is not finite although every gradient is",
        "forward",
        layers=blamed(roots),
        op=e.op if e else "",
        where=e.where if e else "",
        steps=span(steps),
        evidence=f"""At {count(len(steps), "step")} ({listing(steps)}) the loss was not finite and no gradient was touched: none of these
            steps was skipped. {story(roots) if roots else ""}""",
        numbers={
            "steps_with_bad_loss": len(steps),
            "skipped_steps": int(f.skipped.sum()),
            **(numbers(roots) if roots else {}),
        },
        remedy="""Compute the loss in FP32 (start from pred.float()): logging, early stopping and plateau schedulers need its value.
            The updates themselves are sound.""",
    )


def scaled_loss(f: Facts) -> Finding | None:
    """loss × scale overflows because the loss is an FP16 tensor."""
    half = f.usage("half_loss")
    over = f.observed("scaled_loss_overflow") > 0
    if not half:
        return None
    # The scale itself becomes inf in FP16: the gradient of the product, then, whatever the loss.
    beyond = f.skipped & ~f.loss_bad & (f.scale > births.FP16_MAX)
    if not over.any() and not beyond.any():
        return None
    steps = f.at(over | beyond)
    harmful = bool((f.skipped & (over | beyond)).any())
    at = f.position(steps[0])
    return finding(
        "scaled-loss-overflows-fp16",
        "error" if harmful and f.unfinished_skips else "warning",
        "loss × scale overflows: the loss is an FP16 tensor",
        "forward",
        op="mul",
        where=half.where,
        steps=span(steps),
        evidence=f"""The loss that goes into scale() is a float16 tensor of shape {half.data.get("shape")}, so that the product is float16
            too (a 0-d loss would be promoted to FP32). At {count(len(steps), "step")} ({listing(steps)}) it, or the scale itself, passed
            65504: at step {steps[0]} the loss was {f.loss[at]:.4g} and the scale {power(f.scale[at])}.""",
        numbers={"loss": float(f.loss[at]), "loss_scale": float(f.scale[at]), "skipped_steps": len(f.skipped_steps)},
        remedy="Make the loss a FP32 scalar before scaling: scaler.scale(loss.float().mean()).backward().",
    )


def evaluation(f: Facts) -> Finding | None:
    """Finite in training, overflow in evaluation."""
    found = f.traced("eval")
    if not found or f.loss_bad.any() or f.by_topic.get("buffers"):
        return None
    e = found[0]
    return finding(
        "eval-only-forward-overflow",
        "error",
        f"The model overflows in evaluation mode only ({place(e)})",
        "forward",
        layers=blamed(found),
        op=e.op,
        where=e.where,
        steps=span(x.step for x in found),
        evidence=f"""{story(found)} The loss of every training step was finite: the two modes compute different things (running instead
            of batch statistics, no dropout, other branches).""",
        numbers=numbers(found),
        remedy=f"""Evaluate {place(e)} in FP32, or the model in BF16 or without autocast; compare running statistics with those of a
            batch (a running variance near zero is the usual cause).""",
    )


def silent(f: Facts) -> Finding | None:
    """An intermediate overflows and is hidden: no NaN, a dead branch."""
    other = {
        "eps-underflow-division",
        "input-exceeds-fp16-range",
        "scaled-loss-overflows-fp16",
        "forward-nan-softmax-all-masked",
    }
    found = [e for e in f.traced("hidden") if e.phase == "forward" and not e.data.get("loss_bad")]
    # What FP32 makes non-finite too (1 / 0 in the branch that torch.where leaves out) is no overflow.
    found = [e for e in found if not e.data.get("harmless") and e.data.get("fp32_ok") is not False]
    found = [e for e in found if births.classify(e) not in other]
    if not found:
        return None
    e = found[0]
    return finding(
        "silent-forward-overflow",
        "warning",
        f"{e.op} in {place(e)} overflows, and the loss does not show it",
        "forward",
        layers=blamed(found),
        op=e.op,
        where=e.where,
        steps=span(x.step for x in found),
        evidence=f"""{story(found)} The value was hidden on its way (divided away, masked or squashed): the loss stayed finite, and what
            the operation feeds gets 0 or a constant instead of a signal.""",
        numbers=numbers(found) | {"median_loss": float(np.nanmedian(f.loss)) if np.isfinite(f.loss).any() else None},
        remedy=f"Compute this part in FP32, or rescale it before {e.op}, so that the branch behind it works.",
    )
