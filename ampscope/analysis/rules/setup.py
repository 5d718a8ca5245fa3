"""Rules on how AMP is set up: dtypes of weights, state and operations, and the device."""

from __future__ import annotations

from ampscope.analysis.finding import Finding
from ampscope.analysis.rules.context import Facts, count, finding, listing, modules, span

LOST_SHARE = 0.5
"""Share of the weights with a gradient that a step leaves as they were, from which training is no longer the one that was asked for."""
HALVES = ("float16", "bfloat16")
FEW = 2
"""Steps that are needed to judge what runs in which dtype."""


def half_parameters(f: Facts) -> Finding | None:
    """Trainable parameters are FP16: the scaler refuses to unscale them."""
    raised = f.raised("FP16 gradients")
    notes = f.usage("half_parameters")
    if raised is None and not (notes and notes.data.get("enabled") and not f.n):
        return None
    e = raised or notes.first
    names = e.layers or notes.first.layers
    tail = f'GradScaler raised "{raised.data.get("text")}" in {raised.data.get("call")}().' if raised else ""
    return finding(
        "trainable-params-fp16",
        "error",
        "Trainable parameters are float16: the scaler refuses to unscale them",
        "usage",
        layers=modules(names),
        op="unscale_",
        where=e.where,
        steps=span([e.step]),
        evidence=f"{count(len(names), 'trainable parameter')} in float16, so that their gradients are too: {listing(names, 4)}. {tail}",
        numbers={"parameters": list(names[:8])},
        remedy="""Keep trainable parameters in float32 (call .float() on them; only frozen ones may stay half) and let autocast do the
            rest. Or train in BF16 without a scaler.""",
    )


def optimizer_eps(f: Facts) -> Finding | None:
    """Adam's epsilon is zero in the optimizer's FP16 state."""
    notes = f.usage("optimizer_eps")
    lost = f.observed("optimizer_eps/nonfinite")
    if not notes or not (lost.any() or any(e.data.get("computes_in_half", True) for e in notes.events)):
        return None  # an optimizer of the user's that adds it in FP32, it seems
    e = next((e for e in notes.events if e.data.get("computes_in_half", True)), notes.first)
    steps = f.at(lost > 0)
    seen = f"At step {listing(steps)} weights were inf or NaN after the optimizer's step." if steps else ""
    return finding(
        "optimizer-eps-underflow",
        "error",
        f"{e.data.get('optimizer')}'s eps={float(e.data.get('eps') or 0):g} is zero in float16",
        "optimizer",
        layers=modules(e.layers),
        op="step",
        where=e.where,
        steps=(e.step, max(f.whole[1], e.step), max(f.n, 1)),
        evidence=f"""{e.message}: where the second moment rounds to zero as well, the update is x/0 or 0/0, and the weight becomes inf or
            NaN. {seen}""",
        numbers={
            "eps": e.data.get("eps"),
            "optimizer": e.data.get("optimizer"),
            "nonfinite_weights_seen": int(lost.max(initial=0)),
        },
        remedy="""Keep parameters and optimizer state in float32 (autocast casts for the forward), or use an eps that FP16 holds (1e-4).""",
    )


def rounding(f: Facts) -> Finding | None:
    """Updates are too small beside half-precision weights to change them."""
    asked, same = f.observed("rounding/asked"), f.observed("rounding/unchanged")
    if not asked.sum() or same.sum() / asked.sum() < LOST_SHARE:
        return None
    half = [x for x in f.layers if x.dtype in HALVES]
    kind = half[0].dtype if half else "bfloat16"
    steps = f.at(asked > 0)
    share = float(same.sum() / asked.sum())
    return finding(
        "weight-update-lost-to-rounding",
        "warning",
        f"Most updates are lost to rounding: the weights are {kind}",
        "optimizer",
        layers=modules(x.name for x in half),
        op="step",
        steps=span(steps),
        evidence=f"""Of the weights with a gradient, {share:.0%} did not change at all in the {count(len(steps), "step")} that were compared
            ({listing(steps)}): an update below {"2^-11" if kind == "float16" else "2^-9"} of the weight rounds away.""",
        numbers={"unchanged_share": share, "steps_compared": len(steps), "dtype": kind},
        remedy="""Keep master weights in float32 and let autocast cast them; or round stochastically, or use a larger learning rate.""",
    )


def no_autocast(f: Facts) -> Finding | None:
    """Scaling without FP16 anywhere."""
    if not f.enabled or f.n < FEW or any(x.dtype in HALVES for x in f.layers):
        return None
    if not f.matmuls or set(f.matmuls) & set(HALVES) or f.dtype_of_gradients in HALVES:
        return None
    return finding(
        "scaler-without-autocast",
        "warning",
        "GradScaler is used, but nothing runs in FP16",
        "usage",
        op="autocast",
        steps=f.whole,
        evidence=f"""All {sum(f.matmuls.values())} matrix products of the audited steps ran in {", ".join(sorted(f.matmuls))}, and gradients
            carry its full mantissa: the scale only multiplies and divides FP32 numbers.""",
        numbers={"matrix_products": dict(f.matmuls)},
        remedy="Wrap forward and loss in torch.autocast(device_type, dtype=torch.float16), or drop the GradScaler.",
    )


def bf16(f: Facts) -> Finding | None:
    """Scaling BF16, which has FP32's range."""
    if not f.enabled or f.n < FEW:
        return None
    kinds = f.matmuls
    seen = kinds.get("bfloat16", 0) > 0 and not kinds.get("float16", 0)
    if not seen and (kinds or f.dtype_of_gradients != "bfloat16"):
        return None
    told = (
        f"{kinds['bfloat16']} of {sum(kinds.values())} matrix products of the audited steps ran in bfloat16, none in float16"
        if kinds
        else "Gradients carry BF16's 7 mantissa bits"
    )
    return finding(
        "scaler-useless-with-bf16",
        "warning",
        "GradScaler scales BF16, which has FP32's range and needs no scaling",
        "usage",
        op="-",
        steps=f.whole,
        evidence=f"""{told}; {count(int(f.skipped.sum()), "step")} of {f.n} were skipped. Note that torch.autocast("cpu") without a dtype means
            bfloat16.""",
        numbers={"matrix_products": dict(kinds), "skipped_steps": int(f.skipped.sum())},
        remedy="Use GradScaler(enabled=False) with BF16, or autocast with dtype=torch.float16 if FP16 was meant.",
    )


def tensor_cores(f: Facts) -> Finding | None:
    """The GPU has no FP16 tensor cores."""
    notes = f.usage("no_tensor_cores")
    if not notes or not f.fp16:
        return None
    return finding(
        "no-fp16-tensor-cores",
        "info",
        "This GPU has no FP16 tensor cores",
        "none",
        op="-",
        steps=f.whole,
        evidence=f"{notes.first.message}: FP16 saves memory there, but little time.",
        numbers={"capability": notes.data.get("capability")},
        remedy="Expect no speed-up here: use AMP for its memory, or a GPU of compute capability 7.0 or newer.",
    )
