"""Rules on what is lost at the small end of FP16. They rest on `underflow_ratio` and its bounds (docs/underflow.md)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ampscope.analysis.finding import Finding
from ampscope.analysis.rules.context import Array, Facts, count, finding, listing, modules, power, span

MATTERS = 0.05
"""Share of a layer's elements whose loss matters: Micikevicius et al. (2018) lost accuracy with about 5 % below 2^-24."""
ROOM_BITS = 4.0
"""Unused doublings from which a scale counts as far too low: at the level GradScaler settles at, 0 to 2 are unused."""
CAST_SHARE = 0.05
"""Share of a layer's weights that vanish on the cast. An ordinary initialisation loses about one in a million."""
DEAD_ZERO = 0.99
"""Share of zeros from which a layer counts as dead."""
ENOUGH = 3
"""Good steps that are needed to speak of a run's typical share."""


def flushed(f: Facts) -> Array:
    """Return the typical flushed share a layer, float64 [L]: measured where a probe ran, estimated elsewhere."""
    measured, free = f.typical("underflow_ratio_measured"), f.typical("underflow_ratio")
    return np.where(np.isfinite(measured), measured, free)


def surely_flushed(f: Facts) -> Array:
    """Return a flushed share a layer that is not overstated, float64 [L]: measured, or the larger of the low bound and half the estimate."""
    share, measured = flushed(f), np.isfinite(f.typical("underflow_ratio_measured"))
    return np.where(measured, share, np.maximum(f.typical("underflow_ratio_low"), share / 2))


def _behind(f: Facts, found: Sequence[int], share: Array) -> Array:
    """Return `share`, with the layers that get nothing at all, and lie behind one of `found` on the way back, as lost altogether.

    Such a layer keeps no survivor to be judged by, and its bounds allow both; but the flow that reaches it has been flushed already.
    """
    out = share.copy()
    rank = {i: k for k, i in enumerate(f.order)}
    first = min((rank[i] for i in found if i in rank), default=None)
    if first is None:
        return out
    zero, high = f.typical("zero_ratio"), f.typical("underflow_ratio_high")
    for i, k in rank.items():
        if k > first and zero[i] > DEAD_ZERO and high[i] > DEAD_ZERO:
            out[i] = zero[i]
    return out


def _worst(f: Facts, share: Array) -> list[int]:
    """Return the layers above `MATTERS`: weight matrices first, the most lost first, of equal ones those nearest the input."""
    found = [i for i in range(len(share)) if share[i] > MATTERS]
    return sorted(found, key=lambda i: (len(f.layers[i].shape) < 2, -round(float(share[i]), 2), i))


def _shares(f: Facts, found: Sequence[int], share: Array) -> str:
    return ", ".join(f"{f.names[i]} {share[i]:.0%}" for i in found[:4]) + (", …" if len(found) > 4 else "")


def _numbers(f: Facts, found: Sequence[int], share: Array) -> dict[str, object]:
    return {
        "flushed_share": {f.names[i]: round(float(share[i]), 4) for i in found[:8]},
        "loss_scale": float(f.scale[-1]),
    }


def no_scaling(f: Facts) -> Finding | None:
    """FP16 autocast with no scaler or a disabled one, and gradients flush to zero."""
    if f.enabled or not f.fp16 or not f.n:
        return None
    share = flushed(f)
    found = _worst(f, share)
    if not found:
        return None
    share = _behind(f, found, share)
    found = _worst(f, share)
    state = "disabled" if f.scaler.get("type") else "missing"
    return finding(
        "gradient-underflow-no-scaling",
        "error",
        "FP16 gradients flush to zero: there is no loss scaling",
        "backward",
        layers=modules(f.names[i] for i in found),
        op="mm",
        steps=f.whole,
        evidence=f"""The forward runs in FP16 and the GradScaler is {state}. Share of gradient elements flushed to zero (median over
            {count(f.n, "step")}): {_shares(f, found, share)}. Nothing overflows, so nothing tells.""",
        numbers=_numbers(f, found, share),
        remedy="""Scale the loss: scaler = torch.amp.GradScaler(device), scaler.scale(loss).backward(), scaler.step(optimizer),
            scaler.update(). Or train in BF16, which needs no scaling.""",
    )


def stuck_low(f: Facts) -> Finding | None:
    """The scale is far below what headroom allows, grows too slowly, and gradients flush."""
    good = ~f.skipped
    if not f.enabled or not f.fp16 or good.sum() < ENOUGH or not f.headroom >= ROOM_BITS:
        return None
    share = flushed(f)
    found = _worst(f, share)
    if not found:
        return None
    share = _behind(f, found, share)
    found = _worst(f, share)
    typical = float(np.median(f.scale[good]))
    interval = f.scaler.get("growth_interval")
    better = typical * 2.0 ** max(int(f.headroom) - 1, 0)
    return finding(
        "scale-stuck-low-underflow",
        "warning",
        f"The loss scale {power(typical)} is {f.headroom:.0f} doublings below what fits, and gradients flush to zero",
        "backward",
        layers=modules(f.names[i] for i in found),
        op="mm",
        steps=span(f.at(good)),
        evidence=f"""Share of gradient elements flushed to zero: {_shares(f, found, share)}. The largest scaled gradient leaves
            {f.headroom:.1f} doublings before overflow at 95 % of the steps; the scale grows once in {interval} good steps.""",
        numbers=_numbers(f, found, share) | {"unused_doublings": f.headroom, "growth_interval": interval},
        remedy=f"""Start higher: GradScaler(init_scale={power(better).replace("2^", "2.0**")}), or lower growth_interval; make sure that
            nothing sets, floors or caps the scale.""",
    )


def layer_underflow(f: Facts) -> Finding | None:
    """At a sensible scale named layers still lose a share that matters; no one scale fits all layers."""
    good = ~f.skipped
    if not f.enabled or not f.fp16 or good.sum() < ENOUGH or not f.headroom < ROOM_BITS:
        return None
    share = flushed(f)
    sure = surely_flushed(f)
    found = [i for i in _worst(f, share) if sure[i] > MATTERS]
    if not found:
        return None
    typical = float(np.median(f.scale[good]))
    return finding(
        "layer-underflow",
        "warning",
        f"Gradients of {f.names[found[0]]} flush to zero at a sensible loss scale",
        "backward",
        layers=modules(f.names[i] for i in found),
        op="mm",
        steps=span(f.at(good)),
        evidence=f"""Share of gradient elements flushed to zero at scale {power(typical)}: {_shares(f, found, share)}. Other layers leave
            only {f.headroom:.1f} doublings before overflow, so that no one scale fits all.""",
        numbers=_numbers(f, found, share) | {"unused_doublings": f.headroom},
        remedy="""Run these layers in FP32 (inside torch.autocast(device_type, enabled=False)), give their part of the loss a larger weight,
            or train in BF16. ampscope.what_if(run) shows the window of scales of each layer.""",
    )


def cast_underflow(f: Facts) -> Finding | None:
    """Weights themselves flush to zero when autocast casts them."""
    lost: dict[str, float] = {}
    for e in f.audits:
        for name, share in dict(e.data.get("flushed_weights") or {}).items():
            lost[name] = max(lost.get(name, 0.0), float(share))
    lost = {n: s for n, s in lost.items() if s > CAST_SHARE}
    if not lost:
        return None
    names = sorted(lost, key=lambda n: -lost[n])
    step = f.audits[0].step
    return finding(
        "parameter-underflow-on-cast",
        "error",
        f"Weights of {names[0]} become zero when autocast casts them to FP16",
        "forward",
        layers=modules(names),
        op="_to_copy",
        steps=(step, max(f.whole[1], step), max(f.n, 1)),
        evidence=f"""Share of non-zero weights that are exactly zero in FP16: {", ".join(f"{n} {lost[n]:.0%}" for n in names[:4])} (seen in
            {count(len(f.audits), "audit")}). Values up to 2^-25 = 3e-8 do not survive the cast; the layer computes with zeros.""",
        numbers={"flushed_weights": {n: lost[n] for n in names[:8]}},
        remedy="""Rescale these weights (fold the factor into the next layer), keep the layer in FP32 (inside
            torch.autocast(device_type, enabled=False)), or train in BF16.""",
    )


def dead_units(f: Facts) -> Finding | None:
    """Zeros are natural (dead units, unseen rows), not underflow."""
    good = ~f.skipped
    zero, low = f.typical("zero_ratio"), flushed(f)
    dead = [i for i in range(len(f.names)) if zero[i] > DEAD_ZERO and not low[i] > MATTERS]
    if good.sum() < ENOUGH or not dead or len(dead) == len(f.names):
        return None
    norm = f.scalar("grad_norm")
    if not np.nanmax(np.nan_to_num(norm)) > 0:
        return None
    # Of the modules that are dead altogether, the one that backward reaches first is where the zeros begin; those behind it only
    # receive them, and the weight before it is multiplied by dead outputs.
    rank = {i: k for k, i in enumerate(f.order)}
    alive = set(modules(f.names[i] for i in range(len(f.names)) if i not in dead))
    dead.sort(key=lambda i: (modules([f.names[i]])[0] in alive, rank.get(i, len(rank))))
    names = [f.names[i] for i in dead]
    high = f.typical("underflow_ratio_high")[dead]
    bound = f"{float(np.nanmax(high)):.0%}" if np.isfinite(high).any() else "not known"
    return finding(
        "dead-units-zero-grad",
        "info",
        f"The gradient of {names[0]} is zero by nature, not by underflow",
        "none",
        layers=modules(names),
        op="threshold_backward",
        steps=f.whole,
        evidence=f"""{listing(names, 4)}: at least {DEAD_ZERO:.0%} zeros in the typical step, while other layers have ordinary gradients. The
            share that can have been flushed is at most {bound}.""",
        numbers={"zero_share": {f.names[i]: round(float(zero[i]), 4) for i in dead[:8]}, "flushed_at_most": bound},
        remedy="""Dead units, unused rows, or a factor that is zero. If it is not meant: re-initialise, lower the learning rate, use a
            leaky activation. A higher loss scale does nothing.""",
    )
