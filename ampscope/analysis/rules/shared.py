"""The rule on one scaler for several optimizers."""

from __future__ import annotations

import warnings

import numpy as np

from ampscope.analysis.finding import Finding
from ampscope.analysis.rules.births import blamed, place
from ampscope.analysis.rules.context import Array, Facts, count, finding, modules, power, span
from ampscope.analysis.rules.underflow import ENOUGH, MATTERS, ROOM_BITS, flushed, surely_flushed

STARVED_SHARE, OTHERS_SHARE, STARVED_SKIPS = 0.2, 0.2, 4
"""One optimizer to blame: it skips at least this share of the steps and this often, the others at most this share of that."""
FAR_BITS = 2 * ROOM_BITS
"""Unused doublings of an optimizer's own from which the scale is far too low for it."""


def one_optimizer(f: Facts) -> Finding | None:
    """With one scaler for several optimizers, one keeps the scale down for the others."""
    flags = {name: values > 0 for name, values in f.observed_like("skipped/").items()}
    if len(flags) < 2 or not f.skipped.any() or f.inputs:
        return None
    tally = {name: int(v.sum()) for name, v in flags.items()}
    worst = max(tally, key=lambda k: tally[k])
    others = sum(tally.values()) - tally[worst]
    if others > OTHERS_SHARE * tally[worst]:
        return None
    if tally[worst] < max(STARVED_SKIPS, STARVED_SHARE * f.n) or f.calibration[flags[worst]].all():
        return _starved(f, worst, tally)
    rest = [i for i, layer in enumerate(f.layers) if layer.optimizer not in ("", worst)]
    e = f.roots[0] if f.roots else None
    cause = f"The value is made by {e.op} in {place(e)} ({e.where})." if e else ""
    names = ", ".join(k for k in tally if k != worst)
    return finding(
        "one-optimizer-overflows-shared-scale",
        "error",
        f"{worst} overflows and pulls the shared loss scale down for {names}",
        e.phase if e else "forward" if f.loss_bad[f.skipped].mean() > 0.5 else "backward",
        layers=tuple(dict.fromkeys([*(blamed(f.roots) if e else ()), *modules(f.owned(worst))])),
        op=e.op if e else "",
        where=e.where if e else "",
        steps=span(f.at(flags[worst])),
        evidence=f"""{worst} found inf or NaN in {tally[worst]} of {f.n} steps, {names} in {others}. Each time the scale they share was
            halved, from {power(f.scale[0])} to {power(f.scale[-1])}; {_zeros(f, rest)} {cause}""",
        numbers={"skips": tally, "first_scale": float(f.scale[0]), "last_scale": float(f.scale[-1])},
        remedy=f"Fix the overflow in {worst}'s part (FP32 there), and give each optimizer a GradScaler of its own.",
    )


def _starved(f: Facts, worst: str, tally: dict[str, int]) -> Finding | None:
    """The scale settled where one optimizer's gradients just fit; another's, much smaller, flush to zero at it."""
    good = ~f.skipped
    if not f.enabled or not f.fp16 or good.sum() < ENOUGH:
        return None
    room = {name: _room(f, name) for name in tally}
    share, sure = flushed(f), surely_flushed(f)
    lost = [i for i, x in enumerate(f.layers) if sure[i] > MATTERS and room.get(x.optimizer, 0.0) >= FAR_BITS]
    if not lost or not room[worst] < ROOM_BITS:
        return None
    lost.sort(key=lambda i: (len(f.layers[i].shape) < 2, -share[i]))
    victim, typical = f.layers[lost[0]].optimizer, float(np.median(f.scale[good]))
    starved = (
        f"{victim}'s gradients would allow {room[victim]:.0f}"
        if np.isfinite(room[victim])
        else f"all of {victim}'s are zero"
    )
    named = ", ".join(f"{f.names[i]} {share[i]:.0%}" for i in lost[:3])
    return finding(
        "one-optimizer-overflows-shared-scale",
        "warning",
        f"{worst} holds the shared loss scale at {power(typical)}, where gradients of {victim} flush to zero",
        "backward",
        layers=modules(f.owned(worst)),
        op="mm",
        steps=span(f.at(good)),
        evidence=f"""All {count(tally[worst], "skipped step")} were {worst}'s, from scale {power(f.scale[0])} down. At {power(typical)} its
            gradients leave {max(room[worst], 0.0):.1f} doublings before overflow, {starved}. Share of elements flushed to zero: {named}.""",
        numbers={
            "skips": tally,
            "unused_doublings": {k: v for k, v in room.items() if np.isfinite(v)},
            "flushed_share": {f.names[i]: round(float(share[i]), 4) for i in lost[:8]},
            "loss_scale": typical,
        },
        remedy=f"""Give each optimizer a GradScaler of its own, or make {worst}'s loss smaller (a mean, normalised targets) so that one scale
            fits both.""",
    )


def _room(f: Facts, optimizer: str) -> float:
    """Return the doublings of the scale that an optimizer's gradients would survive at 95 % of the good steps; NaN if not known."""
    mine = [i for i, x in enumerate(f.layers) if x.optimizer == optimizer]
    bits = f.metric("headroom_bits")[~f.skipped[f.rows]][:, mine]
    bits = np.where(np.isnan(bits), np.inf, bits).min(1, initial=np.inf)
    return float(np.quantile(bits, 0.05, method="lower")) if len(bits) else float("nan")


def _zeros(f: Facts, layers: list[int]) -> str:
    """Say how many gradient elements of these layers were zero in the last quarter."""
    values: Array = f.metric("zero_ratio")[-max(len(f.rows) // 4, 1) :, layers] if layers else np.zeros(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nothing was measured
        share = float(np.nanmedian(values)) if values.size else float("nan")
    return f"at the end {share:.0%} of the other gradients' elements were zero." if share == share else ""
