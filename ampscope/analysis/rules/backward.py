"""Rules on backward: the loss was finite, gradients were not."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np

from ampscope.analysis.finding import Finding
from ampscope.analysis.rules import births
from ampscope.analysis.rules.births import blamed, numbers, place, story
from ampscope.analysis.rules.context import Array, Facts, count, finding, listing, modules, power, span
from ampscope.record.step import Event

DEPTH_BITS = 5.0
"""log2 growth of gradients from output to input that makes depth the cause: 32-fold. Over healthy networks the layers' gradients
lie within a factor of about 10 of each other."""
DEPTH_JUMP = 0.6
"""Share of that growth that one step between neighbours may account for: more is a jump at one layer, not growth."""
DEPTH_SKIPS = 3
"""Skips from which a growing gradient is more than the first search for a scale."""
DEPTH_LAYERS = 4
"""Weight matrices from which a network has a depth to speak of."""
AGAIN = 2
"""Times a fault that no trace explains must come before it counts as one of its own."""
NEARBY = 100
"""Steps before a lonely overflow that tell how close the scale had come to FP16's end."""
CLOSE_BITS = 1.0
"""Doublings left below which the next larger batch overflows."""
RARE = 0.02
"""Share of steps below which untraced skips with a finite loss are ordinary outliers."""


def custom_function(f: Facts) -> Finding | None:
    """A custom autograd.Function overflows in its backward."""
    found = births.of(f, "backward-overflow-custom-function")
    hidden = [e for e in f.traced("hidden") if e.phase == "backward" and e.data.get("custom_function")]
    if not found and not hidden:
        return None
    both = found or hidden
    e = both[0]
    name = e.data["custom_function"]
    silent = "" if found else "No step was skipped for it: the overflow is divided away, and the gradient is wrong."
    return finding(
        "backward-overflow-custom-function",
        "error",
        f"The backward of the custom function {name} overflows FP16 in {place(e)}",
        "backward",
        layers=blamed(both),
        op=f"{e.op} in {name}",
        where=e.where,
        steps=span([*(x.step for x in [*found, *hidden]), *(_finite_loss_skips(f) if found else [])]),
        evidence=f"{story(both)} It happened inside {name}.backward, while the gradient that came in was finite. {silent}",
        numbers=numbers(both) | {"skipped_steps": len(f.skipped_steps)},
        remedy=f"""Let it compute in FP32: decorate {name}.forward with torch.amp.custom_fwd(device_type=..., cast_inputs=torch.float32)
            and {name}.backward with torch.amp.custom_bwd(device_type=...).""",
    )


def norm_eps(f: Facts) -> Finding | None:
    """A normalisation's backward over (near-)constant input."""
    found = births.of(f, "backward-overflow-norm-eps")
    if not found:
        return None
    e = found[0]
    rstd = e.data.get("rstd_max") or e.data.get("steep")
    return finding(
        "backward-overflow-norm-eps",
        "error",
        f"The backward of the normalisation {place(e)} overflows over (near-)constant input",
        "backward",
        layers=blamed(found),
        op=e.op,
        where=e.where,
        steps=span([*(x.step for x in found), *_finite_loss_skips(f)]),
        evidence=f"""{story(found)} {f"1/σ reached {rstd:.3g}." if rstd else ""} Rows with next to no variance are divided by little more than
            the eps, and so are their gradients.""",
        numbers=numbers(found) | ({"largest_rstd": rstd} if rstd else {}),
        remedy="Use a larger eps (1e-5), mask constant (padded) rows before the normalisation, or run it and its input in FP32.",
    )


def backward_nan(f: Facts) -> Finding | None:
    """A derivative is NaN or inf at that point; of one layer alone, or of all behind it."""
    found = births.of(f, "backward-nan-finite-forward")
    if not found:
        return _untraced(f)
    e = found[0]
    node = str(e.data.get("autograd_node", ""))
    producer = str(e.data.get("producer", ""))
    name = e.data.get("forward_op") if not e.data.get("cast") else ""
    name = str(name or (producer if births.SINGULAR.search(producer) else node).split("Backward")[0]).lower()
    op = f"{name} backward ({e.op})"
    own = _own_layer(f, found)
    if own is not None:
        owner, steps = own
        return _single(owner, op, e.where, steps, story(found), numbers(found))
    lost = [s for s, c in f.culprits.items() if c.data.get("nan") and c.data.get("loss_finite")]
    return finding(
        "backward-nan-finite-forward",
        "error",
        f"The derivative of {name} is not finite in {place(e)}, although the forward is",
        "backward",
        layers=blamed(found),
        op=op,
        where=e.where,
        steps=span([*(x.step for x in found), *lost]),
        evidence=f"{story(found)} It happened in {node or 'backward'}, while the loss was finite.",
        numbers=numbers(found) | {"skipped_steps": len(f.skipped_steps)},
        remedy=f"""Keep the argument of {name} away from the point where its derivative is infinite, by a bound that FP16 can hold
            (2^-10, not 1e-6), or compute this part in FP32; for probabilities use the loss that takes logits.""",
    )


def _own_layer(f: Facts, found: list[Event]) -> tuple[str, tuple[int, int, int]] | None:
    """Whether the births are one module's own derivative, and nobody else's gradient suffers: (module, steps)."""
    e, seen = found[0], {x.step for x in found}
    bad = [c for s, c in f.culprits.items() if c.data.get("loss_finite") and (c.data.get("nan") or s in seen)]
    owners = {m for c in bad for m in modules(c.layers)}
    if not e.layers or len(owners) != 1:
        return None
    owner = next(iter(owners))
    if any(c.data.get("pattern") != "single" for c in bad) and e.layers[0] != owner:
        return None  # the last layer that backward reaches: the NaN may have come from right before it
    inside = e.layers[0] == owner or owner.startswith(e.layers[0] + ".") or e.layers[0].startswith(owner + ".")
    return (owner, span(c.step for c in bad)) if inside else None


def _single(
    owner: str, op: str, where: str, steps: tuple[int, int, int], told: str, known: dict[str, object]
) -> Finding:
    return finding(
        "single-layer-nan",
        "error",
        f"Only {owner} has non-finite gradients, of its own making",
        "backward",
        layers=(owner,),
        op=op,
        where=where,
        steps=steps,
        evidence=f"""{told} No other layer was non-finite before unscaling, so that the fault is in {owner}'s own derivative. Clipping by
            global norm would spread it over all.""",
        numbers=known,
        remedy=f"""Look at what {owner} computes from its own parameters (sqrt, norm or division at 0): add an epsilon that FP16 can
            hold, or compute it in FP32. Clip with error_if_nonfinite=True while you search.""",
    )


def _untraced(f: Facts) -> Finding | None:
    """Gradients that were non-finite at a finite loss and that no traced step explains: what the free record says."""
    rest = [
        c
        for c in f.culprits.values()
        if c.data.get("loss_finite") and c.data.get("bad") and not _calibration(f, c.step)
    ]
    if not rest or f.inputs or f.roots:
        return None
    nan = [c for c in rest if c.data.get("nan") and not c.data.get("pos_inf") and not c.data.get("neg_inf")]
    often = len(nan) >= max(AGAIN, RARE * f.n) and len(nan) >= 0.5 * len(rest)
    chosen = nan if often else rest
    first, steps = chosen[0], span(c.step for c in chosen)
    owners, front = modules(first.layers), str(first.data.get("front", ""))
    if len(chosen) > 1 and not often:
        return None  # overflows now and then: the rules on the scale judge these
    kind = "NaN, none inf: no overflow" if chosen is nan or first in nan else "NaN or inf"
    told = f"""At {count(len(chosen), "step")} ({listing(c.step for c in chosen)}) the loss was finite and {first.data["bad"]} of
        {first.data["measured"]} layers had {kind}."""
    known: dict[str, object] = {"bad_layers": first.data["bad"], "layers": first.data["measured"], "steps": len(chosen)}
    if often and len(owners) == 1 and first.data.get("pattern") == "single":
        return _single(owners[0], "", "", steps, told, known)
    return finding(
        "backward-nan-finite-forward",
        "error" if often else "info",
        f"NaN is born in backward at or right before {front}"
        if often
        else f"One step overflowed in backward, first at {front}",
        "backward",
        layers=tuple(dict.fromkeys([*modules([front]), *owners])),
        steps=steps,
        evidence=f"{told} The first bad layer in backward order is {front}.",
        numbers=known,
        remedy="""Run such a batch under ampscope.trace(model) to name the operation; look for sqrt, log, division or norm at 0 there."""
        if often
        else _once(f, first.step),
    )


def _once(f: Facts, step: int) -> str:
    """Say whether one lonely overflow was to be expected: how close the steps before it had come to FP16's end."""
    at = f.position(step)
    before = f.scalar("headroom_bits")[max(0, at - NEARBY) : at]
    before = before[np.isfinite(before)]
    left = float(before.min()) if len(before) else np.inf
    if left < CLOSE_BITS:
        return f"""Nothing, if it stays alone: the loss scale had come within {left:.1f} doublings of FP16's end in the steps before,
            and the scaler halved it, as it should."""
    return "Nothing, if it stays alone: a batch out of the ordinary, which the scaler skipped."


def _calibration(f: Facts, step: int) -> bool:
    at = f.position(step)
    return at < f.n and bool(f.calibration[at])


def _finite_loss_skips(f: Facts) -> list[int]:
    return f.at(f.skipped & ~f.loss_bad)


def depth(f: Facts) -> Finding | None:
    """Gradients grow layer by layer towards the input until they overflow."""
    skips = [f.culprits[s] for s in _finite_loss_skips(f) if s in f.culprits]
    if len(skips) >= DEPTH_SKIPS:
        looped = recurrence(f)
        if looped is not None:
            return _through_calls(f, *looped, [c.step for c in skips])
    inside = [c for c in skips if c.data.get("finite_before") and c.data.get("front_kind") == "inf"]
    if len(skips) < DEPTH_SKIPS or len(inside) < max(1, len(skips) // 3):
        return None
    rise, near_input, near_output = growth(f)
    if rise < DEPTH_BITS:
        return None
    fronts = [str(c.data["front"]) for c in inside]
    traced = [e for e in f.roots if e.phase == "backward" and births.classify(e, births.scale_at(f, e.step)) == ""]
    e = next((x for x in traced if x.step == inside[0].step), None)
    return finding(
        "backward-overflow-depth",
        "error" if f.unfinished_skips else "warning",
        "Gradients grow layer by layer towards the input until they overflow",
        "backward",
        layers=tuple(dict.fromkeys([*modules(fronts[:1]), *blamed([e] if e else []), *modules(fronts)])),
        op=e.op if e else "",
        where=e.where if e else "",
        steps=span(c.step for c in skips),
        evidence=f"""{count(len(skips), "step")} with a finite loss {"were" if len(skips) > 1 else "was"} skipped. The first bad layer in
            backward order was {listing(dict.fromkeys(fronts), 4)}, while layers nearer the output stayed finite: gradients grow
            {2**rise:.3g}-fold from {near_output} to {near_input}. The scale fell from {power(f.scale[0])} to {power(f.scale[-1])}.""",
        numbers={
            "growth": float(2**rise),
            "skipped_steps": len(skips),
            "first_scale": float(f.scale[0]),
            "last_scale": float(f.scale[-1]),
        },
        remedy="""Bound the growth: normalise between blocks, scale the branches down, keep the residual stream in FP32, or train in BF16.
            A scale low enough for the first layers starves the last ones.""",
    )


def _through_calls(f: Facts, rise: float, calls: int, e: Event, steps: list[int]) -> Finding:
    """Return the finding for one module that is called again and again: depth in time."""
    name = e.layers[0]
    return finding(
        "backward-overflow-depth",
        "error" if f.unfinished_skips else "warning",
        f"Gradients grow with every call of {name} they pass, until they overflow",
        "backward",
        layers=blamed([e]),
        op=e.op,
        where=e.where,
        steps=span(steps),
        evidence=f"""{count(len(steps), "step")} with a finite loss were skipped. In the traced step {e.step} backward passed {name} again and
            again ({calls} gradients were seen there), and the largest grew {2**rise:.3g}-fold on the way. The scale fell from {power(f.scale[0])} to
            {power(f.scale[-1])}.""",
        numbers={"growth": float(2**rise), "gradients_seen": calls, "skipped_steps": len(steps)},
        remedy=f"""Bound the growth: truncate backpropagation (detach the state now and then), normalise the state or scale {name}'s weight
            down, keep the state in FP32, or train in BF16.""",
    )


def recurrence(f: Facts) -> tuple[float, int, Event] | None:
    """Return (log2 growth, calls, birth) of a module that backward passed again and again with a growing gradient, or None."""
    best: tuple[float, int, Event] | None = None
    for e in f.roots:
        if e.phase != "backward" or births.classify(e, births.scale_at(f, e.step)) != "":
            continue
        chain = [(str(n), float(v)) for n, v in e.data.get("growth", []) if v]
        for name in dict.fromkeys(n for n, _ in chain if n):
            newest = max((i for i, (n, _) in enumerate(chain) if n == chain[0][0]), default=0)
            part = chain[newest:] if chain[0][0] != name else chain  # of several backward passes the last
            logs = np.log2([v for n, v in part if n == name])
            rise = _rise(logs)
            if rise >= DEPTH_BITS and (best is None or rise > best[0]):
                layers = (name, *(x for x in e.layers if x != name and name.startswith(f"{x}.")))
                best = rise, len(logs), replace(e, layers=layers)
    return best


def _rise(logs: Array) -> float:
    """Return by how much a sequence rises from its first to its last third; 0 if it does not do so step by step."""
    if len(logs) < DEPTH_LAYERS:
        return 0.0
    third = max(len(logs) // 3, 1)
    rise = float(np.median(logs[-third:]) - np.median(logs[:third]))
    ranks = np.argsort(np.argsort(logs))
    trend = float(np.corrcoef(ranks, np.arange(len(logs)))[0, 1])
    steady = rise > 0 and trend >= 0.6 and float(np.diff(logs).max()) <= DEPTH_JUMP * rise
    return rise if steady else 0.0


def growth(f: Facts) -> tuple[float, str, str]:
    """Return (log2 growth of the typical gradient from output to input, layer nearest the input, layer nearest the output).

    0 where gradients do not grow step by step along the backward order.
    """
    matrices = [i for i in f.order if len(f.layers[i].shape) >= 2]
    values = f.metric("grad_max")[~f.skipped[f.rows]]
    values = values if len(values) else f.metric("grad_max")
    if len(matrices) < DEPTH_LAYERS or not len(values):
        return 0.0, "", ""
    with warnings.catch_warnings(), np.errstate(divide="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # a layer without a gradient
        logs = np.log2(np.nanmedian(values, axis=0))[matrices]
    kept = [i for i, x in zip(matrices, logs, strict=True) if np.isfinite(x)]
    logs = logs[np.isfinite(logs)]
    rise = _rise(logs)
    return (rise, f.names[kept[-1]], f.names[kept[0]]) if rise else (0.0, "", "")
