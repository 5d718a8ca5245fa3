"""Rules on what is lost at the small end of FP16."""

from __future__ import annotations

import numpy as np

from ampscope.analysis.rules.context import Facts, finding, modules, power, span
from ampscope.analysis.finding import Finding

MATTERS = 0.05
"""Share of a layer's elements whose loss matters: Micikevicius et al. (2018) lost accuracy where about 5 % of gradients were below 2^-24."""
ROOM_BITS = 4.0
"""Unused doublings beyond which the scale is far too low: at the level GradScaler settles at, 0 to 2 bits are unused."""
CAST_SHARE = 0.01
"""Share of a layer's weights that vanish on the cast. An ordinary initialisation loses one in a million."""
DEAD_ZERO = 0.99
"""Share of zeros from which a layer counts as dead."""


def flushed(f: Facts) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the typical flushed share a layer: measured where a probe ran, estimated elsewhere."""
    measured, free = f.typical("underflow_ratio_measured"), f.typical("underflow_ratio")
    return np.where(np.isfinite(measured), measured, free)


def _worst(f: Facts, share: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[int]:
    """Return layers above `MATTERS`, weight matrices first, the most lost first."""
    found = [i for i in np.argsort(-np.nan_to_num(share), kind="stable").tolist() if share[i] > MATTERS]
    return sorted(found, key=lambda i: (len(f.run.layers[i].shape) < 2, -round(float(share[i]), 3)))


def _names(f: Facts, found: list[int]) -> tuple[str, ...]:
    return modules(f.names[i] for i in found)[:8]


def _shares(f: Facts, found: list[int], share: np.ndarray[tuple[int], np.dtype[np.float64]]) -> str:
    return ", ".join(f"{f.names[i]} {share[i]:.0%}" for i in found[:4])


def no_scaling(f: Facts) -> Finding | None:
    """FP16 autocast with no scaler."""
    if f.enabled or not f.fp16 or not f.n:
        return None
    share = flushed(f)
    found = _worst(f, share)
    if not found:
        return None
    return finding(
        "gradient-underflow-no-scaling", "error", "FP16 gradients flush to zero: there is no loss scaling", "backward", _names(f, found), "mm", "", span(f.steps.tolist()),
        f"Autocast runs in FP16 and the GradScaler is {'disabled' if f.run.metadata.get('scaler', {}).get('type') else 'missing'}. Flushed to zero: {_shares(f, found, share)} of elements (median over {f.n} steps).",
        "Enable the scaler: torch.amp.GradScaler(device, enabled=True) with scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update(); or train in BF16.",
    )  # fmt: skip


def stuck_low(f: Facts) -> Finding | None:
    """The scale is far below what headroom allows."""
    if not f.enabled or not f.fp16 or f.n < 5:
        return None
    good = ~f.skipped
    if good.sum() < 3:
        return None
    share = flushed(f)
    found = _worst(f, share)
    headroom = f.run.scalar("headroom_bits")[good]
    headroom = headroom[np.isfinite(headroom)]
    if not found or not len(headroom):
        return None
    room = float(np.quantile(headroom, 0.05))
    if room < ROOM_BITS:
        return None
    interval = f.run.metadata.get("scaler", {}).get("growth_interval")
    return finding(
        "scale-stuck-low-underflow", "warning", f"The loss scale {power(float(np.median(f.scale[good])))} is {room:.0f} doublings below what fits, and gradients flush to zero", "backward",
        _names(f, found), "mm", "", span(f.steps[good].tolist()),
        f"Flushed to zero: {_shares(f, found, share)}. The largest scaled gradient leaves {room:.1f} bits before overflow at 95 % of steps; with growth_interval={interval} the scale grows only after that many clean steps.",
        f"Start higher: GradScaler(init_scale={power(float(np.median(f.scale[good])) * 2 ** max(int(room) - 1, 0))}), or a smaller growth_interval; check that nothing sets or floors the scale.",
    )  # fmt: skip


def layer_underflow(f: Facts) -> Finding | None:
    """At a sensible scale some layers still lose a share that matters."""
    if not f.enabled or not f.fp16 or f.n < 5:
        return None
    share = flushed(f)
    low = f.typical("underflow_ratio_low")
    measured = np.isfinite(f.typical("underflow_ratio_measured"))
    sure = np.where(measured, share, np.minimum(share, np.maximum(low, share * 0.5)))
    found = [i for i in _worst(f, share) if sure[i] > MATTERS]
    if not found:
        return None
    good = ~f.skipped
    headroom = f.run.scalar("headroom_bits")[good]
    headroom = headroom[np.isfinite(headroom)]
    if not len(headroom) or float(np.quantile(headroom, 0.05)) >= ROOM_BITS:
        return None
    return finding(
        "layer-underflow", "warning", f"Gradients of {f.names[found[0]]} flush to zero at a sensible loss scale", "backward", _names(f, found), "mm", "", span(f.steps[good].tolist()),
        f"Flushed to zero at scale {power(float(np.median(f.scale[good])))}: {_shares(f, found, share)}. Other layers leave only {float(np.quantile(headroom, 0.05)):.1f} bits before overflow, so no one scale fits all.",
        "Run these layers in FP32 (torch.autocast(enabled=False)), multiply their branch by a constant and divide behind it, or train in BF16. Ask ampscope.what_if(run) for the window of each layer.",
    )  # fmt: skip


def cast_underflow(f: Facts) -> Finding | None:
    """Weights flush to zero when autocast casts them."""
    lost: dict[str, float] = {}
    for e in f.audits:
        for name, share in e.data.get("flushed_weights", {}).items():
            if share > CAST_SHARE:
                lost[name] = max(lost.get(name, 0.0), float(share))
    if not lost:
        return None
    names = sorted(lost, key=lambda n: -lost[n])
    step = f.audits[0].step
    return finding(
        "parameter-underflow-on-cast", "error", f"Weights of {names[0]} become zero when autocast casts them to FP16", "forward", modules(names)[:8], "_to_copy", "", (step, int(f.steps[-1]) if f.n else step, max(f.n, 1)),
        "Share of non-zero weights that are exactly zero in FP16: " + ", ".join(f"{n} {lost[n]:.0%}" for n in names[:4]) + ". Values up to 2^-25 = 3e-8 do not survive; the layer computes with zeros.",
        "Rescale these weights (fold a factor into the next layer), keep the layer in FP32 (torch.autocast(enabled=False)), or train in BF16.",
    )  # fmt: skip


def dead_units(f: Facts) -> Finding | None:
    """Zeros are natural."""
    if not f.n:
        return None
    zero, high, low = f.typical("zero_ratio"), f.typical("underflow_ratio_high"), flushed(f)
    dead = [i for i in range(len(f.names)) if zero[i] > DEAD_ZERO and len(f.run.layers[i].shape) >= 1]
    dead = [i for i in dead if not low[i] > MATTERS]
    norm = f.run.scalar("grad_norm")
    if not dead or len(dead) == len(f.names) or not np.nanmax(np.nan_to_num(norm)) > 0:
        return None
    if f.metric("zero_ratio")[:, dead].shape[0] < 2:
        return None
    certain = "bounded by " + (f"{np.nanmax(high[dead]):.0%}" if np.isfinite(high[dead]).any() else "nothing recorded")
    return finding(
        "dead-units-zero-grad", "info", f"The gradient of {f.names[dead[0]]} is zero by nature, not by underflow", "none", _names(f, dead), "threshold_backward", "", span(f.steps.tolist()),
        f"{', '.join(f.names[i] for i in dead[:4])}: {zero[dead[0]]:.0%} zeros at every step while neighbours behind them have ordinary gradients (flushed share {certain}).",
        "Dead units, unused rows or a zero-initialised factor; re-initialise, lower the learning rate or use a leaky activation if it is not meant. A higher loss scale does nothing.",
    )  # fmt: skip
