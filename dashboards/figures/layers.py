"""The heatmap layers × steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..views.common import Range
from ..views.layers import ABSENT, NONFINITE, UNBOUNDED, UNSAMPLED, VALUE, LayerMap
from . import encode
from .metrics import STYLES, Style, bar_trace, colorscale
from .stack import cursor
from .theme import PALETTES, Figure, Palette, Theme, layout

CROSSES = 1500
"""Crosses drawn over non-finite cells at most; their colour stays where there are more."""
WORDS = {
    ABSENT: "no gradient",
    NONFINITE: "NaN or inf",
    UNBOUNDED: "all zero, no limit",
    UNSAMPLED: "not sampled",
    VALUE: "",
}


def figure(
    view: LayerMap,
    theme: Theme,
    revision: str,
    span: Range,
    *,
    selected: str = "",
    mark: float | None = None,
    narrow: bool = False,
) -> Figure:
    """Return the heatmap; row 0 is at the top.

    Args:
        view: the plain data.
        theme: light or dark.
        revision: see `theme.layout`.
        span: the range of steps asked for.
        selected: key of the row to point out.
        mark: the chosen step.
        narrow: for a phone.
    """
    p, style = PALETTES[theme], STYLES[view.metric]
    rows = len(view.rows)
    shown_as = names(view)
    height = int(min(max(rows * (18 if rows <= 30 else 12 if rows <= 60 else 7), 120), 900)) + 110
    spacing = max(1, round(rows * 11 / (height - 110)))
    shown = [i for i, row in enumerate(view.rows) if i % spacing == 0 or row.key == selected]
    axis_y = {
        "type": "category", "categoryorder": "array", "categoryarray": shown_as, "autorange": "reversed", "fixedrange": rows <= 8,
        "autorangeoptions": {"minallowed": -0.5, "maxallowed": rows - 0.5},
        "tickmode": "array", "tickvals": [shown_as[i] for i in shown], "ticks": "", "ticklabelstandoff": 6, "showgrid": False,
        "ticktext": [_label(view.rows[i].label, view.rows[i].key == selected, 16 if narrow else 36) for i in shown], "tickfont": {"size": 11},
    }  # fmt: skip
    axis_x: dict[str, Any] = {
        "title": {"text": "step"},
        "showgrid": False,
        "exponentformat": "none",
        "separatethousands": True,
    }
    axis_x |= {"range": span.pair, "autorange": False} if span.pair else {"autorange": True}
    if not span.pair and len(view.edges) > 1:  # no empty rim: plotly would make room for the crosses
        axis_x["autorangeoptions"] = {
            "minallowed": float(view.edges[0]) - 0.5,
            "maxallowed": float(view.edges[-1]) - 0.5,
        }
    return {
        "data": [_values(view, style, shown_as), _overlay(view, p, shown_as), _crosses(view, p, shown_as), bar_trace(style, p.muted, narrow)],
        "layout": layout(
            theme, revision, xaxis=axis_x, yaxis=axis_y, height=height, hovermode="closest", clickmode="event",
            margin={"l": 24, "r": 8, "t": 30, "b": 46}, plot_bgcolor=p.surface, shapes=cursor(mark, p),
        ),
    }  # fmt: skip


def names(view: LayerMap) -> list[str]:
    """Return what the y axis calls each row: plotly text, each different."""
    return _unique([encode.text(row.label) for row in view.rows])


def borders(view: LayerMap) -> np.ndarray[Any, Any]:
    """Return the columns' borders, half a step before each first step: a column of one step is centred on it."""
    return view.edges - 0.5


def _values(view: LayerMap, style: Style, names: list[str]) -> dict[str, Any]:
    special = bool((view.cells != VALUE).any())
    words = [[WORDS[int(c)] for c in row] for row in view.cells] if special else []
    where = "step" if view.raw else "around step"
    return {
        "type": "heatmap", "x": encode.array(borders(view)), "y": names, "z": encode.array(view.values), "text": words,
        "zmin": style.low, "zmax": style.high, "zauto": False, "colorscale": colorscale(style), "showscale": False,
        "zsmooth": False, "hoverongaps": True, "xgap": 0, "ygap": 1 if len(names) <= 60 else 0,
        "hovertemplate": f"%{{y}}<br>{where} %{{x:.0f}}<br>{encode.text(style.title.lower())}: %{{z:{style.format}}} "
        + ("%{text}<extra></extra>" if special else "<extra></extra>"),
    }  # fmt: skip


def _overlay(view: LayerMap, p: Palette, names: list[str]) -> dict[str, Any]:
    """Return the cells that are no number, each kind in a flat colour outside the scale."""
    code = np.zeros(view.cells.shape, np.uint8)
    for k, kind in enumerate((ABSENT, NONFINITE, UNBOUNDED), 1):
        code[view.cells == kind] = k
    clear = "rgba(0,0,0,0)"
    colors = [clear, p.absent, p.nan, p.zero]
    scale = [[t, c] for k, c in enumerate(colors) for t in (k / 4, (k + 1) / 4)]
    z: Any = encode.array(code) if code.any() else []
    return {
        "type": "heatmap", "x": encode.array(borders(view)) if code.any() else [], "y": names if code.any() else [], "z": z,
        "zmin": -0.5, "zmax": 3.5, "colorscale": scale, "showscale": False, "hoverinfo": "skip", "zsmooth": False,
        "ygap": 1 if len(names) <= 60 else 0,
    }  # fmt: skip


def _crosses(view: LayerMap, p: Palette, names: list[str]) -> dict[str, Any]:
    rows, columns = np.nonzero(view.cells == NONFINITE)
    if len(rows) > CROSSES:
        keep = np.linspace(0, len(rows) - 1, CROSSES).astype(int)
        rows, columns = rows[keep], columns[keep]
    middle = (view.edges[:-1] + view.edges[1:] - 1) / 2 if len(view.edges) > 1 else np.zeros(0)
    return {
        "type": "scatter", "mode": "markers", "x": encode.array(middle[columns]), "y": [names[r] for r in rows.tolist()],
        "hoverinfo": "skip", "marker": {"symbol": "x-thin", "size": 7, "line": {"color": p.surface, "width": 1.5}},
    }  # fmt: skip


def _label(name: str, selected: bool, width: int) -> str:
    short = encode.text(encode.shorten(name, width))
    return f"<b>▶ {short}</b>" if selected else short


def _unique(names: list[str]) -> list[str]:
    """Return names that differ: a category axis would draw two rows of the same text on top of each other."""
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        out.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return out
