"""Share lost by loss scale, the layers' windows of good scales, and a replayed scaler."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..views.whatif import HIGH, LOW, ReplayView, Sweep
from . import encode
from .stack import Line, Panel, stacked
from .theme import PALETTES, Figure, Palette, Theme, layout

FLOOR = 1e-7
"""Least share drawn."""


def _scales(narrow: bool) -> dict[str, Any]:
    ticks = list(range(LOW, HIGH + 1, 8 if narrow else 4))
    return {
        "title": {"text": "loss scale"}, "range": [LOW - 0.5, HIGH + 0.5], "tickvals": ticks, "ticktext": [f"2^{k}" for k in ticks],
        "zeroline": False,
    }  # fmt: skip


def _marks(view: Sweep, p: Palette) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return shapes and labels: the window of good scales, the scales recorded, the scale chosen."""
    shapes: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []

    def note(x: float, text: str, row: int) -> None:
        notes.append(
            {"x": x, "xref": "x", "y": 1, "yref": "paper", "yanchor": "bottom", "yshift": 14 * row, "text": text, "showarrow": False,
             "font": {"size": 10, "color": p.muted}}
        )  # fmt: skip

    if view.window is not None:
        low, high = view.window
        shapes.append(
            {"type": "rect", "x0": low - 0.5, "x1": high + 0.5, "y0": 0, "y1": 1, "yref": "paper", "fillcolor": p.good, "opacity": 0.15,
             "line": {"width": 0}, "layer": "below"}
        )  # fmt: skip
        note((max(low, LOW) + min(high, HIGH)) / 2, "good for every layer", 0)
    if math.isfinite(view.recorded[0]):
        low, high = view.recorded
        grey = {"type": "line", "y0": 0, "y1": 1, "yref": "paper", "line": {"color": p.session, "width": 1}}
        shapes += [grey | {"x0": x, "x1": x} for x in sorted({low, high})]
        note((low + high) / 2, "recorded" if low == high else "recorded, least and greatest", 1)
    shapes.append(
        {
            "type": "line",
            "x0": view.exponent,
            "x1": view.exponent,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "line": {"color": p.skip, "width": 2},
        }
    )
    note(view.exponent, f"chosen: 2^{view.exponent}", 2)
    return shapes, notes


def figure(view: Sweep, theme: Theme, revision: str, *, narrow: bool = False) -> Figure:
    """Return flushed and overflowing share over the loss scale; both axes logarithmic."""
    p = PALETTES[theme]
    shapes, notes = _marks(view, p)

    def line(name: str, y: Any, color: str, symbol: str) -> dict[str, Any]:
        shown = np.where(y >= FLOOR, y, np.nan)
        return {
            "type": "scatter", "mode": "lines+markers", "name": name, "x": encode.array(view.exponents), "y": encode.array(shown),
            "line": {"color": color, "width": 2}, "marker": {"color": color, "symbol": symbol, "size": 7},
            "text": [f"2^{k}" for k in view.exponents.tolist()], "hovertemplate": "%{text}: %{y:.3~p}",
        }  # fmt: skip

    return {
        "data": [line("flushed to zero", view.flushed, p.line, "circle"), line("overflowing", view.overflow, p.nan, "triangle-up")],
        "layout": layout(
            theme, revision, height=360, shapes=shapes, annotations=notes, hovermode="x unified", showlegend=True,
            legend={"orientation": "h", "x": 0, "y": -0.2}, margin={"l": 64, "r": 14, "t": 60, "b": 70},
            xaxis=_scales(narrow) | {"unifiedhovertitle": {"text": "loss scale"}},
            yaxis={"type": "log", "tickformat": ".3~p", "range": [math.log10(FLOOR), 0.1], "dtick": 1, "title": {"text": ""}},
        ),
    }  # fmt: skip


def layers(view: Sweep, theme: Theme, revision: str, *, narrow: bool = False) -> Figure:
    """Return each layer's window of good scales as a bar; a layer without one has a cross where it would begin."""
    p = PALETTES[theme]
    shapes, notes = _marks(view, p)
    rows = [r for r in view.rows if not math.isnan(r.low)]
    names = [encode.text(r.name) for r in rows]
    x: list[Any] = []
    y: list[Any] = []
    bad_x, bad_y = [], []
    for name, r in zip(names, rows, strict=True):
        if r.low <= r.high and math.isfinite(r.high):
            x += [max(r.low, LOW - 4), min(r.high, HIGH + 4), None]
            y += [name, name, None]
        else:
            bad_x.append(min(max(r.low if math.isfinite(r.low) else HIGH, LOW), HIGH))
            bad_y.append(name)
    height = max(120, 16 * len(rows)) + 110
    return {
        "data": [
            {"type": "scatter", "mode": "lines+markers", "name": "good scales", "x": x, "y": y, "hovertemplate": "%{y}: 2^%{x}<extra></extra>",
             "line": {"color": p.good, "width": 5}, "marker": {"color": p.good, "symbol": "line-ns", "size": 9}},
            {"type": "scatter", "mode": "markers", "name": "no good scale", "x": bad_x, "y": bad_y, "hovertemplate": "%{y}: none<extra></extra>",
             "marker": {"color": p.nan, "symbol": "x", "size": 9}},
        ],
        "layout": layout(
            theme, revision, height=height, shapes=shapes, annotations=notes, margin={"l": 24, "r": 14, "t": 60, "b": 46}, xaxis=_scales(narrow),
            yaxis={"type": "category", "categoryorder": "array", "categoryarray": names, "autorange": "reversed", "tickmode": "array",
                   "tickvals": names, "ticktext": [encode.text(encode.shorten(r.name, 16 if narrow else 36)) for r in rows]},
        ),
    }  # fmt: skip


def replay(view: ReplayView, theme: Theme, revision: str, *, narrow: bool = False, mark: float | None = None) -> Figure:
    """Return the recorded and the replayed loss scale, and what was skipped in each."""
    p = PALETTES[theme]
    heights = {"recorded": 0.72, "replayed": 0.28}
    skips = [("recorded", view.recorded_skips, p.line), ("replayed", view.replayed_skips, p.skip)]
    strip = {
        "type": "scatter", "mode": "markers", "name": "skipped", "x": encode.array(np.concatenate([x for _, x, _ in skips])),
        "y": [heights[k] for k, x, _ in skips for _ in x], "text": [f"skipped, {k}" for k, x, _ in skips for _ in x],
        "hovertemplate": "%{text} (at step %{x})",
        "marker": {"symbol": "triangle-down", "size": 9, "color": [c for _, x, c in skips for _ in x]},
    }  # fmt: skip
    ticks = {"tickmode": "array", "tickvals": list(heights.values()), "ticktext": [f"▼ {k}" for k in heights]}
    panels = [
        Panel(
            "Would the loss scale be better?",
            [
                Line("recorded", view.x, view.recorded, p.line, step=True, width=4),
                Line("replayed", view.x_replayed, view.replayed, p.skip, step=True, width=1.5),
            ],
            scale="log2", weight=1.5,
        ),
        Panel("Would fewer steps be skipped?", [], strip=strip, ticks=ticks, weight=0.6),
    ]  # fmt: skip
    figure = stacked(panels, theme, revision, x_range=view.span.pair, mark=mark, narrow=narrow, legend=True)
    for trace in figure["data"]:
        trace["showlegend"] = trace["name"] in heights
    figure["layout"]["legend"] = {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom"}
    return figure
