"""The rules, a few a module: pure functions of `Facts` that return a `Finding` or None. docs/rules.md explains each to a user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ampscope.analysis.finding import Finding
from ampscope.analysis.rules import (
    backward,
    calls,
    clipping,
    forward,
    resume,
    scale,
    setup,
    shared,
    stepping,
    underflow,
)
from ampscope.analysis.rules.context import Facts


@dataclass(frozen=True)
class Rule:
    """A function, the rules (ids) it may find, and those whose findings follow from it and are not listed beside it."""

    ids: tuple[str, ...]
    look: Callable[[Facts], Finding | None]
    explains: frozenset[str] = field(default_factory=frozenset)


SCALE_FALLS = frozenset(
    {
        "loss-too-large-scale-below-one", "backward-overflow-depth", "scale-stuck-low-underflow", "layer-underflow",
        "warmup-calibration", "scaler-state-not-restored", "dead-units-zero-grad",
    }
)  # fmt: skip
"""What a scale that was driven down by something else looks like."""
GRADIENTS_LOST = SCALE_FALLS | {"backward-nan-finite-forward", "single-layer-nan"}
"""What gradients that are non-finite for another reason look like."""
FORWARD_LOST = GRADIENTS_LOST | {
    "forward-overflow-activation", "forward-overflow-attention", "forward-overflow-reduction", "forward-overflow-loss-value-only",
    "forward-nan-softmax-all-masked", "silent-forward-overflow", "eval-only-forward-overflow", "batchnorm-buffers-nonfinite",
}  # fmt: skip
"""What a forward that is non-finite for another reason looks like."""
SCALE_LOW = frozenset({"layer-underflow", "scale-stuck-low-underflow", "dead-units-zero-grad"})
"""What too low a scale, or clipped gradients, look like."""


def _rule(ids: str, look: Callable[[Facts], Finding | None], explains: frozenset[str] = frozenset()) -> Rule:
    mine = tuple(ids.split())
    return Rule(mine, look, explains.difference(mine))


RULES: tuple[Rule, ...] = (
    # The loop is wrong: everything else may follow from that.
    _rule(
        "trainable-params-fp16",
        setup.half_parameters,
        frozenset({"optimizer-without-grads", "optimizer-eps-underflow"}),
    ),
    _rule("unscale-every-microbatch", calls.unscale_inside),
    _rule("update-not-called-on-skip", calls.update_missing),
    _rule("optimizer-without-grads", calls.without_grads),
    _rule("scale-changed-within-accumulation", calls.within_accumulation, frozenset({"unscale-every-microbatch"})),
    _rule("penalty-on-scaled-grads", calls.penalty, FORWARD_LOST | {"one-optimizer-overflows-shared-scale"}),
    _rule("optimizer-step-outside-scaler optimizer-step-without-unscale", stepping.outside, FORWARD_LOST),
    _rule(
        "stale-nonfinite-grads",
        calls.stale,
        FORWARD_LOST | {"one-optimizer-overflows-shared-scale", "backward-overflow-norm-eps"},
    ),
    # The scale, or the data, is beyond repair.
    _rule("scales-differ-across-ranks", scale.ranks),
    _rule(
        "scale-below-fp32-normal-weights-lost",
        scale.below_normal,
        FORWARD_LOST | {"nonfinite-input", "input-exceeds-fp16-range", "all-steps-skipped-constant-scale"},
    ),
    _rule("nonfinite-input", forward.nonfinite_input, FORWARD_LOST | {"all-steps-skipped-constant-scale"}),
    _rule("input-exceeds-fp16-range", forward.input_exceeds, FORWARD_LOST),
    _rule("optimizer-eps-underflow", setup.optimizer_eps, FORWARD_LOST | {"weight-update-lost-to-rounding"}),
    _rule("batchnorm-buffers-nonfinite", forward.buffers, FORWARD_LOST),
    _rule(
        "all-steps-skipped-constant-scale",
        scale.constant_scale,
        FORWARD_LOST | {"eps-underflow-division", "backward-overflow-norm-eps", "backward-overflow-custom-function"},
    ),
    _rule("one-optimizer-overflows-shared-scale", shared.one_optimizer, FORWARD_LOST),
    # Forward
    _rule("parameter-underflow-on-cast", underflow.cast_underflow, SCALE_LOW),
    _rule("forward-nan-softmax-all-masked", forward.softmax_masked, FORWARD_LOST - {"batchnorm-buffers-nonfinite"}),
    _rule(
        "eps-underflow-division",
        forward.eps_underflow,
        GRADIENTS_LOST | {"forward-overflow-activation", "silent-forward-overflow", "forward-overflow-loss-value-only"},
    ),
    _rule(
        "forward-overflow-loss-value-only",
        forward.loss_value_only,
        FORWARD_LOST - {"backward-overflow-depth", "forward-nan-softmax-all-masked"},
    ),
    _rule("forward-overflow-attention", forward.attention, GRADIENTS_LOST | {"forward-overflow-loss-value-only"}),
    _rule("forward-overflow-reduction", forward.reduction, GRADIENTS_LOST | {"forward-overflow-loss-value-only"}),
    _rule("forward-overflow-activation", forward.activation, GRADIENTS_LOST | {"forward-overflow-loss-value-only"}),
    # Backward
    _rule("scaled-loss-overflows-fp16", forward.scaled_loss, GRADIENTS_LOST),
    _rule("backward-overflow-custom-function", backward.custom_function, GRADIENTS_LOST),
    _rule("backward-overflow-norm-eps", backward.norm_eps, GRADIENTS_LOST),
    _rule("single-layer-nan backward-nan-finite-forward", backward.backward_nan, SCALE_FALLS),
    _rule(
        "scaler-state-not-restored", resume.not_restored, frozenset({"warmup-calibration", "backward-overflow-depth"})
    ),
    _rule("clip-before-unscale", clipping.clip_scaled, SCALE_LOW),
    _rule("loss-too-large-scale-below-one", scale.too_large, SCALE_FALLS),
    _rule("backward-overflow-depth", backward.depth, SCALE_LOW | {"warmup-calibration"}),
    # Nothing is skipped, yet
    _rule("eval-only-forward-overflow", forward.evaluation),
    _rule("silent-forward-overflow", forward.silent, frozenset({"dead-units-zero-grad"})),
    _rule(
        "scale-runaway-zero-grads",
        scale.runaway,
        GRADIENTS_LOST | {"forward-overflow-activation", "scaler-without-autocast"},
    ),
    _rule("gradient-underflow-no-scaling", underflow.no_scaling, SCALE_LOW),
    _rule("weight-update-lost-to-rounding", setup.rounding),
    _rule("scale-stuck-low-underflow", underflow.stuck_low, SCALE_LOW),
    _rule("layer-underflow", underflow.layer_underflow, SCALE_LOW),
    _rule("scheduler-advanced-on-skipped-step", stepping.scheduler),
    _rule("scaler-without-autocast", setup.no_autocast),
    _rule("scaler-useless-with-bf16", setup.bf16, frozenset({"scale-runaway-zero-grads"})),
    _rule("dead-units-zero-grad", underflow.dead_units),
    _rule("warmup-calibration", scale.warmup),
    _rule("no-fp16-tensor-cores", setup.tensor_cores),
)
"""Causes before their consequences: of two findings as serious, the earlier is told first."""

IDS: tuple[str, ...] = tuple(i for rule in RULES for i in rule.ids)
"""Every rule id."""
