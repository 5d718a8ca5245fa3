"""Colours, the two plotly templates, and the configuration every chart has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Theme = Literal["light", "dark"]
Figure = dict[str, Any]

CONFIG: dict[str, Any] = {
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "displaylogo": False,
    "displayNotifier": False,
    "responsive": True,
    "scrollZoom": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "png", "scale": 2, "filename": "ampscope"},
}
"""Nothing leaves the machine: plotly 7.1 would offer to post the figure to a public cloud (style.md, rule 3)."""

RUNS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe-Ito, the colours of runs in the order they were chosen (its yellow and black fail on one theme or the other)."""

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")
"""Marker shapes of runs, so that colour is never the only sign."""

CIVIDIS = (
    "#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838",
)  # fmt: skip


@dataclass(frozen=True)
class Palette:
    """Colours of one theme. Text on `surface` and `page` has a contrast of 4.5 or more, marks have 3 or more."""

    page: str
    surface: str
    text: str
    muted: str
    grid: str
    axis: str
    line: str
    band: str
    probe: str
    good: str
    skip: str
    nan: str
    inf: str
    growth: str
    session: str
    absent: str
    zero: str


PALETTES: dict[Theme, Palette] = {
    "light": Palette(
        page="#f5f6f8", surface="#ffffff", text="#1b1f24", muted="#57606a", grid="#e4e7eb", axis="#8c959f", line="#0072B2",
        band="rgba(0,114,178,0.18)", probe="#9a3a72", good="#007a59", skip="#b35900", nan="#c1121f", inf="#8a3ffc",
        growth="#007a59", session="#57606a", absent="#d8dce1", zero="#b7c9d9",
    ),
    "dark": Palette(
        page="#0f1318", surface="#171c23", text="#e8edf2", muted="#a3adb8", grid="#2a313a", axis="#75808c", line="#56B4E9",
        band="rgba(86,180,233,0.22)", probe="#e59ac6", good="#3fcf9f", skip="#f0a23a", nan="#ff6b6b", inf="#c8a2ff",
        growth="#3fcf9f", session="#a3adb8", absent="#3a424c", zero="#34506a",
    ),
}  # fmt: skip

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif'


def template(theme: Theme) -> dict[str, Any]:
    """Return the whole template of a theme: recolouring the backgrounds alone would leave the grid of the other."""
    p = PALETTES[theme]
    axis = {
        "gridcolor": p.grid, "linecolor": p.axis, "zerolinecolor": p.grid, "tickcolor": p.axis, "ticks": "outside", "ticklen": 4,
        "tickfont": {"color": p.muted, "size": 11}, "title": {"font": {"color": p.muted, "size": 12}}, "automargin": True,
    }  # fmt: skip
    return {
        "layout": {
            "paper_bgcolor": p.surface,
            "plot_bgcolor": p.surface,
            "font": {"family": FONT, "color": p.text, "size": 12},
            "colorway": list(RUNS),
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {
                "bgcolor": p.page,
                "bordercolor": p.axis,
                "font": {"color": p.text, "size": 12},
                "namelength": -1,
            },
            "legend": {"bgcolor": "rgba(0,0,0,0)", "font": {"color": p.text, "size": 12}},
            "annotationdefaults": {"font": {"color": p.text}, "arrowcolor": p.axis},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": p.muted, "activecolor": p.text},
        }
    }


def layout(theme: Theme, revision: str, **extra: Any) -> dict[str, Any]:
    """Return the part of a layout that every chart shares.

    Args:
        revision: plotly's `uirevision`; while it stays the same, the user's zoom and toggles stay.
        extra: entries to add or replace.
    """
    base: dict[str, Any] = {
        "template": template(theme),
        "uirevision": revision,
        "autosize": True,
        "margin": {"l": 64, "r": 16, "t": 24, "b": 44},
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": "zoom",
    }
    return base | extra


def message(theme: Theme, text: str) -> Figure:
    """Return an empty chart that says why it is empty."""
    hidden = {"visible": False, "range": [0, 1], "fixedrange": True}
    note = {"text": text, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False}
    note["font"] = {"color": PALETTES[theme].muted, "size": 14}
    return {"data": [], "layout": layout(theme, "message", xaxis=hidden, yaxis=hidden, annotations=[note], height=220)}


def waiting() -> Figure:
    """Return the chart of a page whose theme the server does not know yet: clear, and grey enough for both."""
    figure = message("light", "Loading …")
    figure["layout"] |= {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"}
    figure["layout"]["annotations"][0]["font"] = {"color": "#76808b", "size": 14}
    return figure
