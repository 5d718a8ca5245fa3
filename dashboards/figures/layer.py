"""One layer: its lines, its exponents over time with the limits of each format, and the histogram at one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ampscope.analysis import formats

from ..views.layer import Exponents, LayerLines
from . import encode
from .metrics import Style, bar_trace, colorscale
from .stack import Line, Panel, cursor, stacked
from .theme import PALETTES, Figure, Palette, Theme, layout


@dataclass(frozen=True)
class Limits:
    """A float format's limits as powers of two: overflow from 2^`top`, smallest normal, flushed at or below 2^`flush`."""

    name: str
    top: float
    normal: int
    flush: int


TITLES = {"fp16": "FP16", "bf16": "BF16", "fp8_e4m3": "FP8 E4M3", "fp8_e5m2": "FP8 E5M2"}
FORMATS = {
    k: Limits(TITLES[k], float(np.log2(f.overflow)), f.min_exponent, f.flush_exponent)
    for k, f in formats.FORMATS.items()
}

SHARES = Style("Share of elements", "of this layer in the binade", 1e-6, 1.0, share=True)


def lines(view: LayerLines, theme: Theme, revision: str, *, mark: float | None = None, narrow: bool = False) -> Figure:
    """Return the layer's curves, stacked on one x axis."""
    p, c = PALETTES[theme], view.curves
    norm, peak, u, low, high = (
        c[k] for k in ("grad_norm", "grad_max", "underflow_ratio", "underflow_ratio_low", "underflow_ratio_high")
    )
    measured, zero, sub, room, weight = (
        c[k] for k in ("underflow_ratio_measured", "zero_ratio", "subnormal_ratio", "headroom_bits", "weight_norm")
    )
    probes = np.isfinite(measured.y)
    weights = np.isfinite(weight.y)
    both = np.isfinite(low.y) & np.isfinite(high.y) if len(low.y) == len(high.y) else np.zeros(0, bool)
    panels = [
        Panel(
            "How large are its gradients? (unscaled)",
            short="How large are its gradients?",
            lines=[Line("norm", norm.x, norm.y, p.line), Line("largest element", peak.x, peak.y, p.skip)],
            scale="log10", bad_x=norm.bad_x, bad_kind=norm.bad_kind,
        ),
        Panel(
            "How much of it does FP16 flush to zero?",
            short="What does FP16 flush to zero?",
            lines=[
                Line("at least", low.x[both], low.y[both], p.line, width=0),
                Line("at most", high.x[both], high.y[both], p.line, width=0, fill=p.band),
                Line("underflow", u.x, u.y, p.line),
                Line("measured", measured.x[probes], measured.y[probes], p.probe, mode="markers", symbol="circle-open", size=7),
            ],
            scale="share",
        ),
        Panel(
            "How much is zero, or kept with fewer bits?",
            short="What is zero, or loses bits?",
            lines=[Line("zeros", zero.x, zero.y, p.line), Line("subnormal", sub.x, sub.y, p.skip)],
            scale="share",
        ),
        Panel("How far is it from overflow? (bits)", [Line("headroom", room.x, room.y, p.line)], bad_x=room.bad_x, bad_kind=room.bad_kind),
        Panel(
            "How large is the weight? (norm)",
            [Line("weight norm", weight.x[weights], weight.y[weights], p.line, mode="lines+markers", size=4)],
        ),
    ]  # fmt: skip
    return stacked(
        panels, theme, revision, x_range=view.span.pair, breaks=view.sessions, height=120, mark=mark, narrow=narrow
    )


def exponents(
    view: Exponents, theme: Theme, revision: str, *, mark: float | None = None, narrow: bool = False
) -> Figure:
    """Return binade × step: colour is the share of the layer's elements, lines are the limits of the formats."""
    p = PALETTES[theme]
    bins = np.arange(view.first, view.first + view.share.shape[1] + 1)
    fp16 = FORMATS["fp16"]
    shift = view.shift
    bottom = min(view.first, fp16.flush - int(np.ceil(shift.max(initial=0))) - 2)
    top = max(int(bins[-1]), int(fp16.top - shift.min(initial=0)) + 1)
    z = np.where(view.share > 0, view.share, np.nan)
    x: dict[str, Any] = {
        "title": {"text": "step"},
        "showgrid": False,
        "exponentformat": "none",
        "separatethousands": True,
    }
    x |= {"range": view.span.pair, "autorange": False} if view.span.pair else {"autorange": True}
    stride = max(1, -(-(top - bottom) // 12))
    ticks = list(range(bottom - bottom % stride, top + 1, stride))
    heat = {
        "type": "heatmap", "x": encode.array(view.edges), "y": encode.array(bins), "z": encode.array(z.T), "zauto": False,
        "zmin": SHARES.low, "zmax": SHARES.high, "colorscale": colorscale(SHARES), "zsmooth": False, "hoverongaps": False,
        "hovertemplate": "step %{x}<br>2^%{y:.0f}<br>%{z:.3~p} of the elements<extra></extra>",
        "showscale": False,
        "meta": {
            "steps": view.steps.tolist(), "shift": view.shift.tolist(), "limits": [v for v, _ in _lines_of(FORMATS["fp16"])],
        },
    }  # fmt: skip
    return {
        "data": [heat, *_zone(view, bottom), *_limits(view, p, bottom, top), bar_trace(SHARES, p.muted, narrow)],
        "layout": layout(
            theme, revision, xaxis=x, height=440, hovermode="closest", margin={"l": 52 if narrow else 64, "r": 60 if narrow else 92, "t": 46, "b": 46},
            yaxis={"range": [bottom, top + 0.5], "tickvals": ticks, "ticktext": [f"2^{t}" for t in ticks], "title": {"text": ""}},
            annotations=_names(view, p, bottom, top, narrow), shapes=cursor(mark, p),
        ),
    }  # fmt: skip


def _at(view: Exponents, exponent: float) -> tuple[list[float], list[float]]:
    """Return a limit as a line over time: level for scaled gradients, moved by the loss scale for true ones."""
    y = exponent - view.shift
    return [float(v) for v in view.edges], [float(v) for v in np.append(y, y[-1:])]


def _zone(view: Exponents, bottom: int) -> list[dict[str, Any]]:
    x, y = _at(view, FORMATS["fp16"].flush)
    clear = {"type": "scatter", "mode": "lines", "x": x, "line": {"width": 0, "shape": "hv"}, "hoverinfo": "skip"}
    floor = clear | {"y": [float(bottom)] * len(x), "name": "bottom"}
    return [floor, clear | {"y": y, "name": "flushed in FP16", "fill": "tonexty", "fillcolor": "rgba(193,18,31,0.16)"}]


def _lines_of(limits: Limits) -> list[tuple[float, str]]:
    return [(limits.top, "overflows"), (limits.normal, "loses bits"), (limits.flush, "becomes zero")]


def _limits(view: Exponents, p: Palette, bottom: int, top: int) -> list[dict[str, Any]]:
    colors = {"fp16": p.nan, "bf16": p.good, "fp8_e4m3": p.inf, "fp8_e5m2": p.skip}
    out = []
    for key, limits in FORMATS.items():
        for exponent, what in _lines_of(limits):
            x, y = _at(view, exponent)
            if max(y, default=bottom) < bottom or min(y, default=top) > top + 1:
                continue
            out.append(
                {"type": "scatter", "mode": "lines", "x": x, "y": y, "name": f"{limits.name} {what}", "hoverinfo": "name",
                 "line": {"color": colors[key], "width": 2 if key == "fp16" else 1, "shape": "hv"}}
            )  # fmt: skip
    return out


def _names(view: Exponents, p: Palette, bottom: int, top: int, narrow: bool) -> list[dict[str, Any]]:
    """Return the limits' names at the right edge; names of equal limits share a line of text."""
    short = {"fp16": "FP16", "bf16": "BF16", "fp8_e4m3": "E4M3", "fp8_e5m2": "E5M2"}
    words = {0: "max", 1: "normal", 2: "zero"}
    at: dict[float, list[str]] = {}
    for key, limits in FORMATS.items():
        for k, (exponent, _) in enumerate(_lines_of(limits) if key == "fp16" or not narrow else []):
            _, y = _at(view, exponent)
            if y and bottom <= y[-1] <= top + 1:
                at.setdefault(round(y[-1]), []).append(f"{short[key]} {words[k]}")
    return [
        {"x": 1.005, "xref": "paper", "xanchor": "left", "y": y, "yref": "y", "showarrow": False, "text": "<br>".join(names),
         "align": "left", "font": {"size": 9, "color": p.muted}}
        for y, names in at.items()
    ]  # fmt: skip


def histogram(view: Exponents, theme: Theme, revision: str, column: int = -1) -> Figure:
    """Return the bars of one column of the exponent picture (the browser redraws them for the step under the cursor)."""
    p = PALETTES[theme]
    centres = np.arange(view.first, view.first + view.share.shape[1]) + 0.5
    shift = float(view.shift[column])
    share = view.share[column]
    fp16 = FORMATS["fp16"]
    low, high = min(view.first, fp16.flush - shift - 2), max(float(centres[-1]), fp16.top - shift) + 1
    stride = max(1, int(-(-(high - low) // 8)))
    ticks = list(range(int(low) - int(low) % stride, int(high) + 1, stride))
    colors = [
        p.nan if c + 0.5 <= fp16.flush - shift else p.skip if c < fp16.normal - shift else p.line
        for c in centres.tolist()
    ]
    bars = {
        "type": "bar", "x": encode.array(centres), "y": encode.array(share), "marker": {"color": colors}, "width": 0.9,
        "hovertemplate": "2^%{x:.0f}: %{y:.3~p}<extra></extra>",
    }  # fmt: skip
    shapes = [
        {
            "type": "line",
            "x0": v - shift,
            "x1": v - shift,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "line": {"color": p.nan, "width": 2},
        }
        for v, _ in _lines_of(fp16)
    ]
    notes = [
        {"x": v - shift, "xref": "x", "y": 1, "yref": "paper", "yanchor": "bottom", "text": w, "showarrow": False,
         "xanchor": anchor, "font": {"size": 10, "color": p.muted}}
        for v, w, anchor in ((fp16.top, "overflows", "right"), (fp16.normal, "loses bits", "center"), (fp16.flush, "zero", "left"))
    ]  # fmt: skip
    return {
        "data": [bars],
        "layout": layout(
            theme, revision, height=300, shapes=shapes, annotations=notes, bargap=0.05, margin={"l": 64, "r": 16, "t": 34, "b": 46},
            xaxis={"range": [low, high], "tickvals": ticks, "ticktext": [f"2^{t}" for t in ticks], "title": {"text": "magnitude"}},
            yaxis={"tickformat": ".2~p", "rangemode": "tozero", "title": {"text": ""}},
        ),
    }  # fmt: skip
