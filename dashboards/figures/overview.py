"""The overview's stacked panels."""

from __future__ import annotations

from typing import Any

from ..views.marks import KINDS, Marks
from ..views.overview import Overview
from . import encode
from .stack import Line, Panel, stacked, steep
from .theme import PALETTES, Figure, Palette, Theme

SHAPES = {"growth": "triangle-up", "skip": "triangle-down", "inf": "diamond", "nan": "x"}
SIGNS = {"growth": "▲ growth", "skip": "▼ skipped", "inf": "◆ inf", "nan": "✕ NaN"}
HEIGHTS = {kind: 0.88 - 0.25 * i for i, kind in enumerate(KINDS)}


def strip(marks: Marks, p: Palette) -> dict[str, Any]:
    """Return the marks as one trace on a 0–1 axis (as shapes a refresh would take four times as long)."""
    colors = {"growth": p.growth, "skip": p.skip, "inf": p.inf, "nan": p.nan}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "events",
        "x": encode.array(marks.x),
        "y": [HEIGHTS[k] for k in marks.kind],
        "text": [encode.text(t) for t in marks.text],
        "hovertemplate": "%{text} (at step %{x})",
        "marker": {"symbol": [SHAPES[k] for k in marks.kind], "color": [colors[k] for k in marks.kind], "size": 9},
    }


def figure(view: Overview, theme: Theme, revision: str, *, mark: float | None = None, narrow: bool = False) -> Figure:
    """Return the figure: one x axis, one crosshair, from the loss scale down to the step time."""
    p = PALETTES[theme]
    low, high, u = view.underflow_low, view.underflow_high, view.underflow
    ticks = {"tickmode": "array", "tickvals": [HEIGHTS[k] for k in KINDS], "ticktext": [SIGNS[k] for k in KINDS]}
    panels = [
        Panel(
            "Is the loss scale stable?",
            [Line("loss scale", view.scale.x, view.scale.y, p.line, step=True)],
            scale="log2", bad_x=view.scale.bad_x, bad_kind=view.scale.bad_kind,
        ),
        Panel("Was anything skipped or not finite?", [], strip=strip(view.marks, p), ticks=ticks, weight=0.75),
        Panel(
            "Does the loss fall?",
            [Line("loss", view.loss.x, view.loss.y, p.line)],
            scale="log10" if steep(view.loss.y) else "linear",
            bad_x=view.loss.bad_x, bad_kind=view.loss.bad_kind,
        ),
        Panel(
            "How large are the gradients? (unscaled norm)",
            short="How large are the gradients?",
            lines=[Line("gradient norm", view.grad_norm.x, view.grad_norm.y, p.line)],
            scale="log10", bad_x=view.grad_norm.bad_x, bad_kind=view.grad_norm.bad_kind,
        ),
        Panel(
            "How much of the gradient does FP16 flush to zero?",
            short="What does FP16 flush to zero?",
            lines=[
                Line("at least", low.x, low.y, p.line, width=0, hover=True),
                Line("at most", high.x, high.y, p.line, width=0, fill=p.band, hover=True),
                Line("underflow", u.x, u.y, p.line),
                Line("measured", view.measured.x, view.measured.y, p.probe, mode="markers", symbol="circle-open", size=7),
            ],
            scale="share", bad_x=u.bad_x, bad_kind=u.bad_kind,
        ),
        Panel(
            "How long does a step take?",
            [Line("step time", view.step_seconds.x, view.step_seconds.y, p.line)],
            format=".4~s", suffix="s",
        ),
    ]  # fmt: skip
    return stacked(panels, theme, revision, x_range=view.span.pair, breaks=view.sessions, mark=mark, narrow=narrow)
