"""What a traced step showed, as plain data: births and what followed from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ampscope.probe.places import Place


@dataclass(slots=True)
class Birth:
    """An operation that made non-finite values out of finite ones."""

    op: str
    place: Place
    phase: str
    node: str
    custom: str | None
    dtype: str
    elements: int
    nan: bool = False
    pos_inf: bool = False
    neg_inf: bool = False
    meant: bool = False
    """-inf written by a constant or a pole: a fault only if it reaches the loss as NaN."""
    input_max: float = float("nan")
    fp32_ok: bool | None = None
    fp32_max: float = float("nan")
    cast: bool = False
    reduction: bool = False
    zero_divisor: bool = False
    eps: float | None = None
    softmax: bool = False
    masked_rows: bool = False
    rstd_max: float | None = None
    recomputed: bool = False
    parameter: str = ""
    from_input: bool = False
    producer: str = ""
    healed: bool = True
    """Whether no non-finite value that came of it reached the loss (or, in backward, a gradient)."""
    forward_op: str = ""
    sizes: tuple[tuple[int, ...], ...] = ()
    feeds_softmax: bool = False
    """Whether what came of it went into a softmax (not the log-softmax of a loss)."""
    evaluation: bool = False
    """Whether it belongs to an evaluation forward between a step's forward and its backward."""
    aside: bool = False
    """Whether nothing it was made of carries a gradient and no module owns it: a metric of the loop."""
    of_poles: bool = False
    """Whether its inputs held an infinity that was meant (a mask, a pole of log)."""
    masks_added: bool = False
    """Whether rows are masked only because the mask left FP16's range."""
    steep: float | None = None
    """In the backward of a normalisation written by hand: the largest factor it multiplies by."""
    healed_right: list[bool] = field(default_factory=list)
    """Where a finite result was made of it: whether that is what FP32 gives."""
    order: int = 0

    @property
    def harmless(self) -> bool:
        """Whether FP32 gives the same wherever the overflow was squashed: tanh of inf is tanh of 70,000."""
        return bool(self.healed_right) and all(self.healed_right)


@dataclass
class Trace:
    """What one traced step showed."""

    births: list[Birth] = field(default_factory=list)
    matmuls: dict[str, int] = field(default_factory=dict)
    """Matrix products in forward, by dtype."""
    flushed_weights: dict[str, float] = field(default_factory=dict)
    """Parameter → share of its non-zero elements that became zero when they were cast to FP16."""
    overflowed_weights: dict[str, int] = field(default_factory=dict)
    growth: list[tuple[str, float]] = field(default_factory=list)
    """(module, largest |gradient|) in backward order."""
    bad_inputs: list[dict[str, Any]] = field(default_factory=list)
    input_max: float = 0.0
    inputs_seen: bool = False
    loss_bad: bool = False
    loss_root: int | None = None
    gradients_bad: bool = False
    opaque: bool = False
    """A non-finite value came out of something the tracer did not see (a compiled part)."""
    opaque_place: Place = field(default_factory=Place)
    trained: bool = False
    """Whether a training forward was seen."""
    ops: int = 0
    activation_max: list[tuple[str, str, float]] = field(default_factory=list)
    closed: bool = False


def of_sum(birth: Birth) -> bool:
    """Whether a birth is a mask that FP32 would hold: a sum of masks, or a cast."""
    return birth.meant and birth.fp32_ok is True and birth.op.rstrip("_") in ("add", "sub", "_to_copy")


def taint_is_bad(trace: Trace, taint: frozenset[int]) -> bool:
    """Whether any of these births is a fault by itself, not a mask."""
    return any(not trace.births[i].meant for i in taint)
