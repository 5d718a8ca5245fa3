"""The diagnosis: every rule, root cause first, consequences folded into it."""

from __future__ import annotations

from collections.abc import Callable

from ampscope.analysis.rules.context import Facts
from ampscope.analysis.finding import Finding
from ampscope.analysis.rules import scale, trace, underflow, usage
from ampscope.run.run import Run

Rule = Callable[[Facts], Finding | None]

RULES: tuple[tuple[str, Rule], ...] = (
    ("trainable-params-fp16", usage.half_parameters),
    ("unscale-every-microbatch", usage.unscale_twice),
    ("update-not-called-on-skip", usage.update_missing),
    ("optimizer-without-grads", usage.without_grads),
    ("scale-changed-within-accumulation", usage.within_accumulation),
    ("optimizer-step-outside-scaler", usage.outside),
    ("optimizer-step-without-unscale", usage.outside),
    ("scales-differ-across-ranks", scale.ranks),
    ("scale-below-fp32-normal-weights-lost", scale.below_normal),
    ("nonfinite-input", trace.nonfinite_input),
    ("input-exceeds-fp16-range", trace.input_exceeds),
    ("batchnorm-buffers-nonfinite", trace.buffers),
    ("one-optimizer-overflows-shared-scale", scale.one_optimizer),
    ("all-steps-skipped-constant-scale", scale.constant_scale),
    ("forward-nan-softmax-all-masked", trace.softmax_masked),
    ("eps-underflow-division", trace.eps_underflow),
    ("scaled-loss-overflows-fp16", trace.scaled_loss),
    ("forward-overflow-loss-value-only", trace.loss_value_only),
    ("forward-overflow-attention", trace.attention),
    ("forward-overflow-reduction", trace.reduction),
    ("forward-overflow-activation", trace.activation),
    ("stale-nonfinite-grads", usage.stale),
    ("penalty-on-scaled-grads", usage.penalty),
    ("optimizer-eps-underflow", usage.optimizer_eps),
    ("backward-overflow-custom-function", trace.custom_function),
    ("backward-overflow-norm-eps", trace.norm_eps),
    ("single-layer-nan", trace.backward_nan),
    ("backward-nan-finite-forward", trace.backward_nan),
    ("scaler-state-not-restored", usage.not_restored),
    ("clip-before-unscale", usage.clip_scaled),
    ("loss-too-large-scale-below-one", scale.too_large),
    ("backward-overflow-depth", trace.depth),
    ("eval-only-forward-overflow", trace.evaluation),
    ("silent-forward-overflow", trace.silent),
    ("parameter-underflow-on-cast", underflow.cast_underflow),
    ("scale-runaway-zero-grads", scale.runaway),
    ("gradient-underflow-no-scaling", underflow.no_scaling),
    ("weight-update-lost-to-rounding", usage.rounding),
    ("scheduler-advanced-on-skipped-step", usage.scheduler),
    ("scaler-without-autocast", usage.no_autocast),
    ("scaler-useless-with-bf16", usage.bf16),
    ("scale-stuck-low-underflow", underflow.stuck_low),
    ("layer-underflow", underflow.layer_underflow),
    ("warmup-calibration", scale.warmup),
    ("dead-units-zero-grad", underflow.dead_units),
    ("no-fp16-tensor-cores", usage.tensor_cores),
)
"""(rule id, function), causes before their consequences. A function that tells two rules apart stands twice and is called once."""

BROKEN_FORWARD = {
    "nonfinite-input", "input-exceeds-fp16-range", "forward-nan-softmax-all-masked", "eps-underflow-division", "forward-overflow-attention",
    "forward-overflow-reduction", "forward-overflow-activation", "all-steps-skipped-constant-scale", "batchnorm-buffers-nonfinite",
    "scale-below-fp32-normal-weights-lost", "one-optimizer-overflows-shared-scale",
}  # fmt: skip
SCALE_FALLS = {
    "loss-too-large-scale-below-one", "backward-overflow-depth", "scale-stuck-low-underflow", "layer-underflow", "warmup-calibration",
    "scale-runaway-zero-grads", "scaler-state-not-restored",
}  # fmt: skip
FOLDS: dict[str, set[str]] = {
    **{rule: SCALE_FALLS | {"backward-nan-finite-forward", "single-layer-nan", "forward-overflow-loss-value-only"} for rule in BROKEN_FORWARD},
    "all-steps-skipped-constant-scale": SCALE_FALLS | BROKEN_FORWARD | {"backward-nan-finite-forward", "single-layer-nan", "forward-overflow-loss-value-only"},
    "one-optimizer-overflows-shared-scale": SCALE_FALLS | BROKEN_FORWARD | {"backward-nan-finite-forward", "single-layer-nan"},
    "batchnorm-buffers-nonfinite": SCALE_FALLS | BROKEN_FORWARD | {"eval-only-forward-overflow"},
    "scale-below-fp32-normal-weights-lost": SCALE_FALLS | BROKEN_FORWARD | {"backward-nan-finite-forward", "single-layer-nan", "silent-forward-overflow"},
    "forward-overflow-loss-value-only": {"forward-overflow-activation", "forward-overflow-reduction", "silent-forward-overflow"},
    "stale-nonfinite-grads": SCALE_FALLS | {"backward-nan-finite-forward", "single-layer-nan", "forward-overflow-activation"},
    "backward-overflow-custom-function": SCALE_FALLS | {"backward-nan-finite-forward", "single-layer-nan"},
    "backward-overflow-norm-eps": SCALE_FALLS | {"backward-nan-finite-forward", "single-layer-nan"},
    "single-layer-nan": SCALE_FALLS,
    "backward-nan-finite-forward": SCALE_FALLS,
    "scaled-loss-overflows-fp16": SCALE_FALLS | {"backward-nan-finite-forward", "single-layer-nan"},
    "loss-too-large-scale-below-one": {"backward-overflow-depth", "scale-stuck-low-underflow", "layer-underflow", "warmup-calibration"},
    "backward-overflow-depth": {"layer-underflow", "scale-stuck-low-underflow", "warmup-calibration"},
    "scaler-state-not-restored": {"warmup-calibration", "backward-overflow-depth"},
    "clip-before-unscale": {"layer-underflow", "scale-stuck-low-underflow"},
    "scale-runaway-zero-grads": {"layer-underflow", "dead-units-zero-grad", "loss-too-large-scale-below-one", "warmup-calibration", "backward-nan-finite-forward"},
    "gradient-underflow-no-scaling": {"layer-underflow", "dead-units-zero-grad"},
    "scale-stuck-low-underflow": {"layer-underflow"},
    "trainable-params-fp16": {"optimizer-without-grads"},
    "optimizer-step-without-unscale": SCALE_FALLS | BROKEN_FORWARD | {"forward-overflow-loss-value-only", "backward-nan-finite-forward", "single-layer-nan"},
    "penalty-on-scaled-grads": SCALE_FALLS | {"backward-nan-finite-forward", "single-layer-nan", "forward-overflow-activation", "forward-overflow-reduction"},
    "optimizer-eps-underflow": BROKEN_FORWARD | {"backward-nan-finite-forward", "single-layer-nan", "weight-update-lost-to-rounding"},
}
"""Cause → the findings that follow from it and are not listed as faults of their own."""


def diagnose(run: Run) -> list[Finding]:
    """Return what is wrong with a run, root cause first; [] where nothing is worth saying.

    Raises:
        LogError: the log cannot be read.
    """
    facts = Facts(run)
    found: list[Finding] = []
    called: set[Rule] = set()
    for _, rule in RULES:
        if rule in called:
            continue
        called.add(rule)
        finding = rule(facts)
        if finding is not None:
            found.append(finding)
    hidden: set[str] = set()
    kept: list[Finding] = []
    for finding in found:
        if finding.rule in hidden:
            continue
        hidden |= FOLDS.get(finding.rule, set())
        kept.append(finding)
    return sorted(kept, key=lambda f: -f.rank)


def summary(run: Run) -> str:
    """Return one sentence of facts for a run without findings above info."""
    facts = Facts(run)
    if not facts.n:
        return "No step was recorded yet."
    skipped = int(facts.skipped.sum())
    growths = sum(e.kind == "growth" for e in facts.events)
    if skipped == 0:
        skips = f"no step of {facts.n:,} was skipped"
    elif facts.leading == skipped:
        skips = f"{skipped} of {facts.n:,} steps were skipped, all in warm-up"
    else:
        skips = f"{skipped} of {facts.n:,} steps were skipped"
    from ampscope.analysis.rules.context import power

    scale = f"loss scale {power(float(facts.scale[-1]))}" if facts.enabled else "no loss scaling"
    return f"Healthy: {skips}; {scale}, grown {growths} times." if growths else f"Healthy: {skips}; {scale}."
