"""What a trace showed, as events. docs/tracing.md lists the fields of `data`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ampscope.probe.births import Birth, Trace
from ampscope.probe.tracer import OpTracer
from ampscope.probe.values import host, summary
from ampscope.record.step import Event

LOSS = "(loss function)"


def number(x: float | None) -> float | None:
    """Return a finite number or None: JSON has no NaN."""
    return None if x is None or not math.isfinite(x) else float(x)


def layers_of(birth: Birth) -> tuple[str, ...]:
    """Return the modules to blame, innermost first; () where no module owns the operation."""
    return tuple(m for m in birth.place.modules if m)


def describe(birth: Birth, trace: Trace, **more: Any) -> dict[str, Any]:
    """Return an event's `data` for a birth."""
    kind = "nan" if birth.nan else "+inf" if birth.pos_inf else "-inf"
    return {
        "topic": "trace", "dtype": birth.dtype, "input_max": number(birth.input_max), "output_max_fp32": number(birth.fp32_max),
        "kind_of_value": kind, "fp32_ok": birth.fp32_ok, "recomputation": birth.recomputed, "cast": birth.cast,
        "reduction": birth.reduction, "elements": birth.elements, "in_loss": not birth.place.modules, "in_scale": birth.place.scaling,
        "autograd_node": birth.node, "forward_op": birth.forward_op, "custom_function": birth.custom,
        "module_type": birth.place.types[0] if birth.place.types else "", "module_chain": list(birth.place.modules),
        "zero_divisor": birth.zero_divisor, "eps": birth.eps, "softmax": birth.softmax, "masked_rows": birth.masked_rows,
        "rstd_max": number(birth.rstd_max), "parameter": birth.parameter, "from_input": birth.from_input, "producer": birth.producer,
        "of_poles": birth.of_poles, "masks_added": birth.masks_added, "steep": number(birth.steep), "harmless": birth.harmless,
        "sizes": [list(s) for s in birth.sizes], "healed": birth.healed, "feeds_softmax": birth.feeds_softmax, "function": birth.place.function,
        "growth": [[n, number(m)] for n, m in trace.growth[-200:]] if birth.phase == "backward" else [], **more,
    }  # fmt: skip


def sentence(birth: Birth) -> str:
    """Return one line for people."""
    kind = "NaN" if birth.nan else "inf"
    place = birth.place.module or (LOSS if not birth.place.modules else "the model")
    where = f" ({birth.place.where})" if birth.place.where else ""
    node = f" of {birth.node}" if birth.node else ""
    size = f"; largest input {birth.input_max:.3g}" if math.isfinite(birth.input_max) else ""
    also = {True: "; finite in FP32", False: "; also in FP32", None: ""}[birth.fp32_ok]
    return f"{birth.phase}: {birth.op}{node} in {place}{where} made {kind} from finite {birth.dtype} inputs{size}{also}"


def event_of(birth: Birth, trace: Trace, step: int, **more: Any) -> Event:
    """Return the event of one birth."""
    return Event(
        step, "nonfinite", phase=birth.phase, layers=layers_of(birth), op=birth.op, where=birth.place.where, message=sentence(birth),
        data=describe(birth, trace, **more),
    )  # fmt: skip


def root_of(trace: Trace) -> Birth | None:
    """Return the birth that everything else follows from, or None."""
    births = [b for b in trace.births if not b.evaluation]
    forward = [b for b in births if b.phase != "backward"]
    if trace.loss_bad:
        if trace.loss_root is not None:
            tainted = [b for b in forward if not b.healed]
            plain = [b for b in tainted if not b.meant]
            return (plain or tainted or [trace.births[trace.loss_root]])[0]
        plain = [b for b in forward if not b.meant and b.phase != "data"]
        return plain[0] if plain else None
    if not trace.gradients_bad:
        return None
    backward = [b for b in births if b.phase == "backward" or b.recomputed or b.place.scaling]
    reached = [b for b in backward if not b.healed]
    # A loss that hides a NaN of the forward (masked rows) does not keep it from the gradients: 0 · NaN.
    hidden = [b for b in forward if not b.healed and not b.meant]
    found = reached or hidden or backward
    return found[0] if found else None


def step(tracer: OpTracer, at: int) -> list[Event]:
    """Return the events of one traced training step: the root of what went wrong, and overflows that were hidden."""
    trace = tracer.trace
    events = []
    for bad in trace.bad_inputs[:1]:
        samples = ", ".join(map(str, bad["samples"]))
        text = f"the batch holds {bad['count']} non-finite values before the model touches it (argument {bad['argument']}, samples {samples})"
        events.append(Event(at, "nonfinite", phase="data", message=text, op="-", data={"topic": "input", **bad}))
    if not trace.trained:
        for birth in trace.births:
            birth.evaluation = False  # a loop that trains in evaluation mode
    root = root_of(trace)
    if root is not None and root.phase == "data":
        events.append(_data(root, at))
    elif root is not None:
        events.append(event_of(root, trace, at, role="root", loss_bad=trace.loss_bad, chain=_chain(trace, root)))
    elif trace.loss_bad and trace.opaque and not trace.bad_inputs:
        place = trace.opaque_place
        text = "a non-finite value came out of a part that is not traced (torch.compile); what lies outside it is sound"
        data = {
            "topic": "trace",
            "role": "root",
            "opaque": True,
            "compiled": True,
            "loss_bad": True,
            "module_chain": list(place.modules),
        }
        events.append(
            Event(
                at,
                "nonfinite",
                phase="forward",
                layers=tuple(m for m in place.modules if m),
                where=place.where,
                message=text,
                data=data,
            )
        )
    for birth in trace.births:
        hidden = birth is not root and birth.phase == "forward" and not birth.meant and not birth.aside
        hidden = hidden and (birth.healed or not trace.loss_bad) and not birth.place.scaling
        hidden = hidden and not (birth.harmless and not trace.gradients_bad)
        if birth.evaluation:
            if hidden and birth.fp32_ok is not False and not any(e.data.get("role") == "eval" for e in events):
                events.append(event_of(birth, trace, at, role="eval", eval=True))
        elif hidden and len(events) < 6:
            events.append(event_of(birth, trace, at, role="hidden", loss_bad=trace.loss_bad))
        poisoned = birth is not root and birth.custom and birth.phase == "backward" and not trace.loss_bad
        if poisoned and len(events) < 6:
            events.append(event_of(birth, trace, at, role="hidden", loss_bad=trace.loss_bad))
    return events


def _data(birth: Birth, at: int) -> Event:
    """Return the event of data that was non-finite before any operation, and went past the model: a target."""
    text = f"{birth.op} was given {birth.elements} non-finite values that no operation made"
    data = {
        "topic": "input",
        "argument": None,
        "count": birth.elements,
        "shape": list(birth.sizes[0]),
        "samples": [],
        "given_to": birth.op,
    }
    return Event(
        at, "nonfinite", phase="data", message=text, op="-", where=birth.place.where, layers=layers_of(birth), data=data
    )


def _chain(trace: Trace, root: Birth) -> list[str]:
    """Name what came of the root, for people."""
    return [f"{b.op} in {b.place.module or LOSS}" for b in trace.births if b is not root and not b.healed][:6]


def audit(tracer: OpTracer, at: int) -> Event:
    """Return what a healthy step shows too: dtypes, casts of weights, inputs."""
    trace = tracer.trace
    flushed = {n: round(s, 6) for n, s in trace.flushed_weights.items() if s > 0}
    kinds = ", ".join(f"{n} in {k}" for k, n in sorted(trace.matmuls.items())) or "none seen"
    data = {
        "topic": "audit", "matmuls": trace.matmuls, "flushed_weights": flushed, "cast_weights": len(trace.flushed_weights),
        "overflowed_weights": trace.overflowed_weights, "input_max": number(trace.input_max), "inputs_seen": trace.inputs_seen,
        "growth": [[n, number(m)] for n, m in trace.growth[:400]], "ops": trace.ops, "births": len(trace.births),
    }  # fmt: skip
    return Event(at, "note", message=f"audit of one step: {trace.ops} operations; matrix products: {kinds}", data=data)


def evaluation(tracer: OpTracer, output: Any, at: int) -> Event | None:
    """Return the event of an evaluation forward that went non-finite, or None."""
    trace = tracer.trace
    bad = any(
        isinstance(t, torch.Tensor) and t.is_floating_point() and host(t) and summary(t)[0] for t in tree_leaves(output)
    )
    plain = [b for b in trace.births if not b.meant and (bad or not (b.harmless or b.fp32_ok is False))]
    if trace.bad_inputs or not (bad or plain):
        return None
    if plain:
        return event_of(plain[0], trace, at, role="eval", eval=True, output_bad=bad)
    text = "an evaluation forward gave non-finite output although its input was finite"
    return Event(
        at,
        "nonfinite",
        phase="forward",
        message=text,
        data={"topic": "trace", "role": "eval", "eval": True, "output_bad": bad, "opaque": True},
    )
