"""Runs side by side, and the gradient norms of their layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..views.compare import Comparison, Ratio
from . import encode
from .stack import Line, Panel, Scale, stacked, steep
from .theme import PALETTES, RUNS, SYMBOLS, Figure, Theme, layout

TITLES = {"step": "step", "relative": "seconds since the first step", "wall": "clock time"}
MARKS = 14
"""Marks along a line, so that runs differ in shape too."""
LAYERS = 400


def figure(view: Comparison, theme: Theme, revision: str, *, narrow: bool = False) -> Figure:
    """Return loss, loss scale, gradient norm and step time of every run on one x axis."""

    def lines(name: str) -> list[Line]:
        out = []
        for k, run in enumerate(view.runs):
            c = getattr(run, name)
            color, symbol = RUNS[k % len(RUNS)], SYMBOLS[k % len(SYMBOLS)]
            x = c.x * 1000 if view.align == "wall" else c.x
            known = np.flatnonzero(np.isfinite(c.y))
            some = known[np.unique(np.linspace(0, len(known) - 1, MARKS).astype(int))] if len(known) else known
            out.append(Line(run.name, x, c.y, color, step=name == "scale"))
            out.append(Line(run.name, x[some], c.y[some], color, mode="markers", symbol=symbol, size=7, hover=False))
        return out

    def bad(name: str) -> dict[str, Any]:
        x = np.concatenate([getattr(r, name).bad_x for r in view.runs]) if view.runs else np.zeros(0)
        kinds = [k for r in view.runs for k in getattr(r, name).bad_kind]
        return {"bad_x": x * 1000 if view.align == "wall" else x, "bad_kind": kinds}

    loss: Scale = "log10" if steep(*[run.loss.y for run in view.runs]) else "linear"
    panels = [
        Panel("Does the loss fall alike?", lines("loss"), scale=loss, weight=1.4, **bad("loss")),
        Panel("Is the loss scale alike?", lines("scale"), scale="log2", **bad("scale")),
        Panel(
            "Are the gradients alike? (unscaled norm)",
            short="Are the gradients alike?",
            lines=lines("grad_norm"),
            scale="log10",
            **bad("grad_norm"),
        ),
        Panel("How long does a step take?", lines("step_seconds"), format=".4~s", suffix="s"),
    ]
    out = stacked(panels, theme, revision, x_title=TITLES[view.align], narrow=narrow)
    if view.align == "wall":
        out["layout"]["xaxis"] |= {"type": "date", "unifiedhovertitle": {"text": "%{x}"}}
    out["layout"]["annotations"] += _legend(view, theme)
    out["layout"]["margin"]["t"] = 40 + 20 * len(view.runs)
    out["layout"]["height"] += 20 * len(view.runs)
    return out


def _legend(view: Comparison, theme: Theme) -> list[dict[str, Any]]:
    """Return the runs' names over the chart, each with its mark in its colour."""
    signs = dict(zip(SYMBOLS, "●■◆▲✚★", strict=True))
    p = PALETTES[theme]
    return [
        {"x": 0, "xref": "paper", "xanchor": "left", "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False,
         "yshift": 22 + 18 * (len(view.runs) - 1 - k), "font": {"size": 13, "color": p.text},
         "text": f'<span style="color:{RUNS[k % len(RUNS)]}">{signs[SYMBOLS[k % len(SYMBOLS)]]}</span> {encode.text(run.name)}'}
        for k, run in enumerate(view.runs)
    ]  # fmt: skip


def ratio(view: list[Ratio], theme: Theme, revision: str, *, label: int = 34) -> Figure:
    """Return the gradient norm ratios on a log axis, a layer a row, a mark a run; those that differ most on top.

    The axis shows at least half to double, so that a difference of a per cent does not look like a fault.
    """
    p = PALETTES[theme]
    names = view[0].layers[:LAYERS]
    rows = [encode.text(n) for n in names]
    data = []
    for k, r in enumerate(view, 1):
        at = {name: 2.0 ** float(v) for name, v in zip(r.layers, r.log2, strict=True)}
        data.append(
            {"type": "scatter", "mode": "markers", "name": encode.text(r.other), "x": encode.array([at.get(n, np.nan) for n in names]),
             "y": rows, "marker": {"color": RUNS[k % len(RUNS)], "symbol": SYMBOLS[k % len(SYMBOLS)], "size": 8},
             "hovertemplate": "%{y}<br>%{x:.3~g} times the norm<extra>%{fullData.name}</extra>"}
        )  # fmt: skip
    logs = np.concatenate([r.log2 for r in view])
    logs = logs[np.isfinite(logs)]
    reach = max(1.0, float(np.abs(logs).max(initial=0.0)) * 1.05)
    stride = max(1, -(-int(reach) // 4))
    ticks = range(-stride * int(reach // stride), int(reach) + 1, stride)
    height = int(min(max(len(rows) * 16, 140), 900)) + 90
    spacing = max(1, round(len(rows) * 12 / (height - 90)))
    line = {
        "type": "line",
        "x0": 1,
        "x1": 1,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": p.axis, "width": 2},
        "layer": "below",
    }
    return {
        "data": data,
        "layout": layout(
            theme, revision, height=height, margin={"l": 24, "r": 14, "t": 14, "b": 46}, shapes=[line],
            xaxis={"type": "log", "title": {"text": "ratio of the gradient norms"}, "tickmode": "array", "tickvals": [2.0**k for k in ticks],
                   "ticktext": [f"×{2**k}" if k >= 0 else f"×1/{2**-k}" for k in ticks],
                   "range": [-reach * float(np.log10(2)), reach * float(np.log10(2))]},
            yaxis={"type": "category", "categoryorder": "array", "categoryarray": rows, "autorange": "reversed",
                   "tickmode": "array", "tickvals": rows[::spacing], "ticktext": [encode.text(encode.shorten(n, label)) for n in names[::spacing]]},
        ),
    }  # fmt: skip
