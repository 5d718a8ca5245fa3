"""What the tracer's births say: which rule each speaks for, where it happened, and how to tell people.

A birth is an operation that made non-finite values out of finite ones (docs/tracing.md lists the fields of its event).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from ampscope.analysis.rules.context import Facts, listing
from ampscope.record.step import Event

FP16_MAX = 65504.0
RSTD_LARGE = 1e3
"""1/σ beyond which a normalisation multiplies gradients by more than the usual eps of 1e-5 allows (316); it means σ² + eps < 1e-6."""
ATTENTION = re.compile(r"^(bmm|baddbmm|matmul|mul|div|add|einsum|mm)_?$|attention")
"""Operations that make attention logits."""
REDUCTION = re.compile(
    r"^(sum|mean|nansum|cumsum|prod|norm|linalg_vector_norm|var|std|var_mean|std_mean|logsumexp|index_add_?|scatter_add_?|trace)$"
)
POLES = re.compile(r"^(log|atanh|arctanh|logit|reciprocal|rsqrt|div|erfinv|digamma|lgamma)")
"""Operations that are infinite somewhere."""
SINGULAR = re.compile(
    r"Sqrt|Rsqrt|Pow|Log(?!Softmax|Sigmoid)|Div|Reciprocal|Acos|Asin|Atanh|Acosh|BinaryCrossEntropyBackward|Norm(Backward|2)|VectorNorm|Cdist|Dist"
)
"""Autograd nodes whose derivative has a pole."""
NORMALISATION = re.compile(r"(Layer|Batch|Group|Instance|Rms|RMS)_?Norm", re.IGNORECASE)


def classify(event: Event, scale: float = 1.0) -> str:
    """Return the id of the rule that a birth speaks for; "" for an overflow that a lower loss scale cures.

    Args:
        event: a birth.
        scale: the loss scale of its step, to tell a derivative that is infinite from a scale that is too high.
    """
    d = event.data
    if d.get("in_scale"):
        return "scaled-loss-overflows-fp16"
    if event.phase == "backward":
        return _backward(event, scale)
    nan = d.get("kind_of_value") == "nan"
    if nan and d.get("masked_rows") and (d.get("softmax") or "attention" in event.op):
        return "forward-nan-softmax-all-masked"
    if d.get("eps") is not None and (d.get("zero_divisor") or event.op.startswith("log")):
        return "eps-underflow-division"
    if d.get("cast") and d.get("from_input"):
        return "input-exceeds-fp16-range"
    if "attention" in event.op or (d.get("feeds_softmax") and ATTENTION.search(event.op) and not d.get("parameter")):
        return "forward-overflow-attention"
    if not nan and (d.get("reduction") or REDUCTION.search(event.op)):
        return "forward-overflow-reduction"
    return "forward-overflow-activation"


def _backward(event: Event, scale: float) -> str:
    d = event.data
    if d.get("custom_function"):
        return "backward-overflow-custom-function"
    node = str(d.get("autograd_node", ""))
    if d.get("cast"):  # the overflow of what another node made: that one is to blame
        node += f" {d.get('producer', '')}"
    rstd = d.get("rstd_max")
    if (NORMALISATION.search(node) or NORMALISATION.search(event.op)) and (rstd is None or rstd > RSTD_LARGE):
        return "backward-overflow-norm-eps"
    if (d.get("steep") or 0.0) > RSTD_LARGE and not d.get("zero_divisor"):
        return "backward-overflow-norm-eps"
    if d.get("zero_divisor") or d.get("kind_of_value") == "nan":
        return "backward-nan-finite-forward"
    if SINGULAR.search(node):
        largest = d.get("output_max_fp32")
        # At a scale of 1 it would overflow as well: no scale worth the name cures it.
        if d.get("fp32_ok") is not True or (largest is not None and largest / max(scale, 1e-30) > FP16_MAX):
            return "backward-nan-finite-forward"
    return ""


def of(f: Facts, rule: str, roles: Sequence[str] = ("root",)) -> list[Event]:
    """Return the births of the first of these roles that has any for `rule`."""
    for role in roles:
        events = f.roots if role == "root" else f.traced(role)
        found = [e for e in events if not e.data.get("opaque") and classify(e, scale_at(f, e.step)) == rule]
        if found:
            return found
    return []


def scale_at(f: Facts, step: int) -> float:
    """Return the loss scale of a step, 1 where it is not known."""
    at = f.position(step)
    return float(f.scale[at]) if at < f.n and f.scale[at] > 0 else 1.0


def blamed(events: Iterable[Event]) -> tuple[str, ...]:
    """Return the modules of births, the most frequent first, then the modules around them."""
    tally: Counter[str] = Counter()
    around: dict[str, tuple[str, ...]] = {}
    for e in events:
        if e.layers:
            tally[e.layers[0]] += 1
            around.setdefault(e.layers[0], e.layers)
    out = [name for name, _ in tally.most_common(3)]
    for name in tuple(out):
        out += [x for x in around[name][1:] if x not in out]
    return tuple(out)


def place(event: Event) -> str:
    """Return where a birth happened, for people."""
    if event.layers:
        return event.layers[0]
    return "the loss function" if event.data.get("in_loss", True) else "the model's own forward"


def innocence(event: Event) -> str:
    """Say whether FP32 has the fault too."""
    ok = event.data.get("fp32_ok")
    if event.data.get("masks_added"):
        return "In FP32 the mask's values are finite, and so is the softmax."
    if ok is None and event.data.get("zero_divisor"):
        return "FP32 has the fault too if the value is exactly 0 there, and not rounded to 0 by FP16: one step with autocast off tells."
    if ok is True:
        return "In FP32 the same operation on the same inputs is finite."
    return "The same operation is non-finite in FP32 too: not AMP's fault." if ok is False else ""


def story(events: Sequence[Event]) -> str:
    """Say what happened, with steps and sizes."""
    e = events[0]
    kind = {"nan": "NaN", "+inf": "inf", "-inf": "-inf"}.get(str(e.data.get("kind_of_value")), "non-finite values")
    steps = listing(sorted({x.step for x in events}))
    seen = "It was seen" if len(events) > 1 else "This was seen"
    dtype = e.data.get("dtype", "")
    source = (
        f"{dtype} inputs that hold an infinity put there on purpose"
        if e.data.get("of_poles")
        else f"finite {dtype} inputs"
    )
    what = f"The cast to {dtype} ({e.op})" if e.data.get("cast") else e.op or "An operation"
    text = f"{what} in {place(e)} made {kind} out of {'finite values' if e.data.get('cast') else source}"
    sizes = []
    if e.data.get("input_max") is not None:
        sizes.append(f"largest input {e.data['input_max']:.4g}")
    if e.data.get("output_max_fp32") is not None and e.data.get("fp32_ok"):
        sizes.append(f"the result would be {e.data['output_max_fp32']:.4g}, FP16 ends at 65504")
    if sizes:
        text += f" ({'; '.join(sizes)})"
    return f"{text}. {seen} in the traced step{'s' if len(events) > 1 else ''} {steps}. {innocence(e)}"


def numbers(events: Sequence[Event]) -> dict[str, object]:
    """Return the numbers of the first birth, by name."""
    d = events[0].data
    out = {
        "dtype": d.get("dtype"),
        "largest_input": d.get("input_max"),
        "largest_output_in_fp32": d.get("output_max_fp32"),
    }
    out |= {"finite_in_fp32": d.get("fp32_ok"), "traced_steps": len({e.step for e in events})}
    return {k: v for k, v in out.items() if v is not None}
