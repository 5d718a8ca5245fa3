"""Panels stacked on one x axis with one crosshair.

One x axis with several y domains: `hoversubplots="axis"` needs it (`make_subplots(shared_xaxes=True)` does not do it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..views.common import power
from . import encode
from .theme import PALETTES, Figure, Palette, Theme, layout

Array = np.ndarray[Any, Any]
Scale = Literal["linear", "log10", "log2", "share"]

BAD = {"nan": "x", "+inf": "triangle-up", "-inf": "triangle-down"}
"""Marker shapes of values that a line cannot show."""
ZERO, ZEROS = "circle-open", 300
"""Marker shape of zeros on a log axis, and how many are drawn at most."""


@dataclass(frozen=True)
class Line:
    """One trace of a panel: a line (`mode="lines"`), dots, or the upper edge of a band (`fill`)."""

    name: str
    x: Array
    y: Array
    color: str
    mode: str = "lines"
    width: float = 1.5
    step: bool = False
    fill: str = ""
    symbol: str = "circle"
    size: int = 6
    hover: bool = True


@dataclass(frozen=True)
class Panel:
    """One y axis. `bad_x`, `bad_kind`: steps at which the value was NaN or inf, drawn at the panel's upper edge."""

    title: str
    lines: Sequence[Line]
    scale: Scale = "linear"
    weight: float = 1.0
    format: str = ".4~g"
    bad_x: Array = field(default_factory=lambda: np.zeros(0))
    bad_kind: Sequence[str] = ()
    strip: dict[str, Any] | None = None
    """A ready trace for a panel of marks on a hidden 0–1 axis, instead of lines."""
    ticks: dict[str, Any] = field(default_factory=dict)
    suffix: str = ""
    """Unit after a value."""
    short: str = ""
    """The title on a phone."""


def powers(values: Sequence[Array], most: int = 6) -> dict[str, Any]:
    """Return ticks of a log2 axis labelled 2^k (plotly itself would write 16.384k), at most about `most` in view."""
    seen = np.concatenate([np.asarray(v, float).ravel() for v in values]) if len(values) else np.zeros(0)
    seen = seen[np.isfinite(seen) & (seen > 0)]
    if not seen.size:
        return {"tickmode": "array", "tickvals": [1.0], "ticktext": ["2^0"]}
    low, high = int(np.floor(np.log2(seen.min()))), int(np.ceil(np.log2(seen.max())))
    stride = max(1, -(-(high - low) // most))
    exponents = range(low - low % stride - 2 * stride, high + 3 * stride, stride)
    exponents = range(max(exponents.start, -1000), min(exponents.stop, 1000), stride)
    return {"tickmode": "array", "tickvals": [2.0**k for k in exponents], "ticktext": [f"2^{k}" for k in exponents]}


def steep(*values: Array) -> bool:
    """Whether values are positive and spread so far that a linear axis would show its largest only."""
    seen = np.concatenate([v[np.isfinite(v)] for v in values]) if values else np.zeros(0)
    return bool(seen.size) and float(seen.min()) > 0 and float(seen.max()) > 1000 * float(np.median(seen))


def log_range(values: Sequence[Array], base: float, pad: float = 0.06, least: float = 1.0) -> list[float] | None:
    """Return a range for a log axis (in log10 units) that holds all positive values, or None if there is none."""
    seen = np.concatenate([np.asarray(v, float).ravel() for v in values]) if len(values) else np.zeros(0)
    seen = seen[np.isfinite(seen) & (seen > 0)]
    if not seen.size:
        return None
    low, high = float(np.log10(seen.min())), float(np.log10(seen.max()))
    spread = max((high - low) * pad, least * float(np.log10(base)))
    return [low - spread, high + spread]


def stacked(
    panels: Sequence[Panel],
    theme: Theme,
    revision: str,
    *,
    x_range: Sequence[float] | None = None,
    x_title: str = "step",
    x_log: bool = False,
    breaks: Sequence[tuple[float, str]] = (),
    height: int = 150,
    legend: bool = False,
    mark: float | None = None,
    narrow: bool = False,
) -> Figure:
    """Return the figure.

    Args:
        panels: from top to bottom.
        x_range: the x range to show; None lets plotly follow the data.
        breaks: (x, label) of vertical lines over all panels, e.g. where a session began.
        height: pixels of a panel of weight 1.
        mark: the chosen step.
        narrow: for a phone.
    """
    p = PALETTES[theme]
    total = sum(panel.weight for panel in panels)
    pixels = int(total * height) + 60
    gap = 30 / pixels
    data: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    floor = "y" if len(panels) == 1 else f"y{len(panels)}"
    notes: list[dict[str, Any]] = []
    top = 1.0
    for i, panel in enumerate(panels):
        share = panel.weight / total
        domain = [max(0.0, top - share + (gap if i < len(panels) - 1 else 0)), top - gap * 0.6]
        top -= share
        name = "y" if i == 0 else f"y{i + 1}"
        axes[f"yaxis{name[1:]}"] = _axis(panel, domain)
        data += [_trace(line, panel, name) for line in panel.lines]
        if panel.strip is not None:
            data.append(panel.strip | {"xaxis": "x", "yaxis": name})
        if panel.strip is None:
            over = f"y{i + 1 + len(panels)}"
            axes[f"yaxis{over[1:]}"] = {
                "overlaying": name,
                "range": [0, 1],
                "visible": False,
                "fixedrange": True,
                "domain": domain,
            }
            data.append(_bad(panel, over, p))
        notes.append(
            {"text": f"<b>{encode.text((narrow and panel.short) or panel.title)}</b>", "x": 0, "xref": "paper", "xanchor": "left", "y": domain[1],
             "yref": "paper", "yanchor": "bottom", "showarrow": False, "font": {"size": 12, "color": p.text}}
        )  # fmt: skip
    wall = f"y{2 * len(panels) + 1}"
    axes[f"yaxis{wall[1:]}"] = {
        "range": [0, 1], "visible": False, "fixedrange": True, "domain": [0, 1], "anchor": "x", "overlaying": "y",
    }  # fmt: skip
    data.append(_breaks(breaks, wall, p.session))
    notes += [
        {"text": encode.text(label), "x": x, "xref": "x", "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "left",
         "showarrow": False, "font": {"size": 10, "color": p.muted}}
        for x, label in list(breaks)[:20]
    ]  # fmt: skip
    x_axis: dict[str, Any] = {
        "title": {"text": x_title}, "anchor": floor, "domain": [0, 1],
        "showspikes": True, "spikemode": "across", "spikesnap": "cursor", "spikethickness": 1, "spikedash": "solid",
        "spikecolor": p.muted, "unifiedhovertitle": {"text": x_title + " %{x:,}"}, "type": "log" if x_log else "linear", "exponentformat": "none", "separatethousands": True,
    }  # fmt: skip
    x_axis |= {"range": [float(v) for v in x_range], "autorange": False} if x_range else {"autorange": True}
    side = {"l": 52, "r": 6} if narrow else {"l": 68, "r": 14}
    return {
        "data": data,
        "layout": layout(
            theme, revision, xaxis=x_axis, **axes, annotations=notes, height=pixels, hovermode="x unified",
            hoversubplots="axis", margin={**side, "t": 34, "b": 46}, showlegend=legend, shapes=cursor(mark, p),
        ),
    }  # fmt: skip


def cursor(at: float | None, p: Palette) -> list[dict[str, Any]]:
    """Return the line that marks the chosen step, as layout shapes (one at most: many would make every refresh slow)."""
    if at is None:
        return []
    return [
        {
            "type": "line",
            "x0": at,
            "x1": at,
            "y0": 0,
            "y1": 1,
            "xref": "x",
            "yref": "paper",
            "line": {"color": p.skip, "width": 2},
        }
    ]


def _axis(panel: Panel, domain: list[float]) -> dict[str, Any]:
    axis: dict[str, Any] = {"domain": domain, "anchor": "x", "tickformat": panel.format, "nticks": 5}
    values = [line.y for line in panel.lines]
    if panel.strip is not None:
        return axis | {"range": [0, 1], "fixedrange": True, "showgrid": False, "zeroline": False, **panel.ticks}
    if panel.scale == "log2":
        axis |= {"type": "log", **powers(values)}
        axis.pop("tickformat")
    elif panel.scale == "log10":
        axis |= {"type": "log", "exponentformat": "e"}
        axis.pop("tickformat")
        axis |= _decades(values)
    elif panel.scale == "share":
        axis |= {"tickformat": ".3~p", "rangemode": "tozero"}
        if all(not np.any(v[np.isfinite(v)]) for v in values):
            axis |= {"range": [0, 0.01], "autorange": False}  # plotly would show 0 to 100 %
    elif not panel.suffix:
        axis["exponentformat"] = "e"
        axis.pop("tickformat")  # which would write 0.00002
    if panel.suffix:
        axis["ticksuffix"] = panel.suffix
    return axis | panel.ticks


def _decades(values: Sequence[Array]) -> dict[str, Any]:
    """Return ticks of a log10 axis: decades; 1, 2, 5 written in full over fewer than two; plotly's choice within half of one."""
    span = log_range(values, 10.0, 0.0, 0.0)
    if span is None or span[1] - span[0] < 0.5:
        return {}
    if span[1] - span[0] < 2:
        ticks = [m * 10.0**d for d in range(int(np.floor(span[0])) - 1, int(np.ceil(span[1])) + 2) for m in (1, 2, 5)]
        return {"tickmode": "array", "tickvals": ticks, "ticktext": [f"{v:.6g}" for v in ticks]}
    return {"dtick": max(1, int(np.ceil((span[1] - span[0]) / 5)))}


def _trace(line: Line, panel: Panel, axis: str) -> dict[str, Any]:
    shown = ".3~p" if panel.scale == "share" else panel.format
    trace: dict[str, Any] = {
        "type": "scatter", "name": encode.text(line.name), "xaxis": "x", "yaxis": axis, "mode": line.mode,
        "x": encode.array(line.x), "connectgaps": False,
        "y": encode.array(np.where(line.y > 0, line.y, np.nan) if panel.scale in ("log10", "log2") else line.y),
    }  # fmt: skip
    if "lines" in line.mode:
        trace["line"] = {
            "color": line.color,
            "width": line.width,
            "shape": "hv" if line.step else "linear",
            "simplify": False,
        }
    if "markers" in line.mode:
        trace["marker"] = {"color": line.color, "symbol": line.symbol, "size": line.size}
        trace["cliponaxis"] = False  # or a mark at 0 % is cut in half
    if line.fill:
        trace |= {"fill": "tonexty", "fillcolor": line.fill}
    if line.hover and panel.scale == "log2":
        trace |= {"text": [power(v) for v in line.y.tolist()], "hovertemplate": "%{text}"}
    elif line.hover:
        trace["hovertemplate"] = f"%{{y:{shown}}}{panel.suffix}"
    else:
        trace["hoverinfo"] = "skip"
    return trace


def _bad(panel: Panel, axis: str, p: Palette) -> dict[str, Any]:
    """Return the marks of what a line cannot show: NaN and inf at the upper edge; on a log axis zeros at the lower."""
    kinds, zeros = list(panel.bad_kind), _zeros(panel)
    x = np.concatenate([np.asarray(panel.bad_x, float), zeros])
    return {
        "type": "scatter", "mode": "markers", "xaxis": "x", "yaxis": axis, "name": encode.text(f"{panel.title}: not finite"),
        "x": encode.array(x), "y": [0.93] * len(kinds) + [0.04] * len(zeros),
        "text": [k.upper() if k == "nan" else k for k in kinds] + ["0"] * len(zeros),
        "hovertemplate": "%{text} (at %{x})", "cliponaxis": False,
        "marker": {
            "symbol": [BAD[k] for k in kinds] + [ZERO] * len(zeros), "size": 8,
            "color": [p.nan] * len(kinds) + [p.muted] * len(zeros),
        },
    }  # fmt: skip


def _zeros(panel: Panel) -> Array:
    if panel.scale not in ("log10", "log2"):
        return np.zeros(0)
    at = [np.asarray(line.x, float)[np.asarray(line.y) == 0] for line in panel.lines]
    found = np.unique(np.concatenate(at)) if at else np.zeros(0)
    return found if len(found) <= ZEROS else found[np.linspace(0, len(found) - 1, ZEROS).astype(int)]


def _breaks(breaks: Sequence[tuple[float, str]], axis: str, color: str) -> dict[str, Any]:
    x = [value for at, _ in breaks for value in (at, at, None)]
    return {
        "type": "scatter", "mode": "lines", "xaxis": "x", "yaxis": axis, "name": "session start", "hoverinfo": "skip",
        "x": x, "y": [value for _ in breaks for value in (0, 1, None)], "line": {"color": color, "width": 1},
    }  # fmt: skip
