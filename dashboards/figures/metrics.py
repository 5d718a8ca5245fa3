"""How each layer metric is drawn: its words, its unit, and one fixed range of colours, so that a colour means the same in every run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .theme import CIVIDIS


@dataclass(frozen=True)
class Style:
    """`low`, `high`: ends of the colour range (of a log range both positive); `reverse`: the low end is the bad one."""

    title: str
    hint: str
    low: float
    high: float
    log: bool = True
    reverse: bool = False
    share: bool = False

    @property
    def format(self) -> str:
        """d3 format of a value."""
        return ".3~p" if self.share else ".4~g"


def _share(title: str, hint: str) -> Style:
    return Style(title, hint, 1e-5, 1.0, share=True)


STYLES: dict[str, Style] = {
    "underflow_ratio": _share("Underflow", "share flushed to zero in FP16, best free estimate"),
    "underflow_ratio_low": _share("Underflow, at least", "lower bound of the share flushed to zero"),
    "underflow_ratio_high": _share("Underflow, at most", "upper bound of the share flushed to zero"),
    "underflow_ratio_measured": _share("Underflow, measured", "share flushed to zero, measured by probes"),
    "underflow_ratio_unscaled": _share("Underflow without scaling", "share that would be flushed at scale 1"),
    "grad_norm": Style("Gradient norm", "L2 norm of the unscaled gradient", 1e-8, 1e4),
    "grad_max": Style("Largest gradient", "largest finite unscaled element", 1e-9, 1e3),
    "headroom_bits": Style(
        "Headroom", "doublings of the scale left before overflow; few are bad", 0, 32, log=False, reverse=True
    ),
    "nonfinite_count": Style("NaN and inf", "elements that were not finite", 1, 1e6),
    "zero_ratio": _share("Zeros", "share of exact zeros, natural ones included"),
    "subnormal_ratio": _share("Subnormals", "share below FP16's smallest normal: kept, with fewer bits"),
    "weight_norm": Style("Weight norm", "L2 norm of the parameter", 1e-4, 1e4),
}
"""Every metric of `Run.metrics`."""


def colorscale(style: Style, steps: int = 48) -> list[list[object]]:
    """Return Cividis over the range; for a log range its stops are spaced so that raw values can be sent and read on hovering."""
    out: list[list[object]] = []
    for k in range(steps + 1):
        t = k / steps
        if style.log:
            value = style.low * (style.high / style.low) ** t
            at = (value - style.low) / (style.high - style.low)
        else:
            at = t
        out.append([0.0 if k == 0 else 1.0 if k == steps else at, _mix(1 - t if style.reverse else t)])
    return out


def bar_ticks(style: Style) -> tuple[list[float], list[str], float, float]:
    """Return tick values, texts, and both ends of the colour bar (in log10 of the value where the range is a log one)."""
    if not style.log:
        values = [style.low + (style.high - style.low) * k / 4 for k in range(5)]
        return values, [f"{v:g}" for v in values], style.low, style.high
    low, high = round(math.log10(style.low)), round(math.log10(style.high))
    stride = max(1, (high - low) // 5)
    decades = list(range(low, high + 1, stride))
    texts = [f"{100 * 10.0**d:g} %" if style.share else f"{10.0**d:g}" for d in decades]
    return [float(d) for d in decades], texts, float(low), float(high)


def _mix(t: float) -> str:
    """Return the colour of Cividis at t in 0..1."""
    place = min(max(t, 0.0), 1.0) * (len(CIVIDIS) - 1)
    i = min(int(place), len(CIVIDIS) - 2)
    a, b = CIVIDIS[i], CIVIDIS[i + 1]
    f = place - i
    parts = [round(int(a[k : k + 2], 16) * (1 - f) + int(b[k : k + 2], 16) * f) for k in (1, 3, 5)]
    return "#" + "".join(f"{p:02x}" for p in parts)


def bar_trace(style: Style, muted: str, narrow: bool = False) -> dict[str, object]:
    """Return a trace without points whose colour bar is that of a heatmap in `colorscale`, evenly spaced in its own way.

    Args:
        style: of the metric.
        muted: colour of the ticks' texts.
        narrow: for a phone: the whole width, and every other tick.
    """
    values, texts, low, high = bar_ticks(style)
    if narrow:
        values, texts = values[::2], texts[::2]
    even = colorscale(Style(style.title, style.hint, 0, 1, log=False, reverse=style.reverse))
    bar = {
        "orientation": "h", "thickness": 10, "len": 1.0 if narrow else 0.6, "x": 0, "xanchor": "left", "y": 1.02,
        "yanchor": "bottom", "ypad": 4, "tickvals": values, "ticktext": texts, "outlinewidth": 0, "tickangle": 0,
        "tickfont": {"size": 10, "color": muted}, "ticks": "",
    }  # fmt: skip
    marker = {
        "color": [low],
        "cmin": low,
        "cmax": high,
        "colorscale": even,
        "showscale": True,
        "colorbar": bar,
        "opacity": 0,
    }
    return {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "hoverinfo": "skip", "marker": marker}
