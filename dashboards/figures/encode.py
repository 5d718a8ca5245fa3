"""Arrays → what plotly.js reads: typed arrays in base64, which keep NaN and are a third of the size of JSON numbers."""

from __future__ import annotations

import base64
import html
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_SAFE = 1e37
"""Beyond this (and its inverse) float32 would turn a finite value into inf, or into zero."""


def array(values: Any) -> dict[str, Any]:
    """Return a typed array of plotly's (`dtype`, `bdata`, and `shape` if it has two dimensions).

    Floats become float32 where their range allows it, integers int32 (float64 beyond); both keep the picture exact to
    seven digits. Values that lie close together far from zero (Unix times) stay float64: float32 would make them one.
    """
    a = np.asarray(values)
    if a.dtype.kind in "bu" and a.dtype.itemsize == 1:
        a = a.astype(np.uint8)
    elif a.dtype.kind in "iu":
        small = not a.size or (int(a.min()) >= -(2**31) and int(a.max()) < 2**31)
        a = a.astype(np.int32 if small else np.float64)
    else:
        size = np.abs(a[np.isfinite(a) & (a != 0)])
        fits = not size.size or (size.max() < _SAFE and size.min() > 1 / _SAFE and _fine(a, float(size.max())))
        a = a.astype(np.float32 if fits else np.float64)
    name = {"u1": "u1", "i4": "i4", "f4": "f4", "f8": "f8"}[a.dtype.str[1:]]
    out = {
        "dtype": name,
        "bdata": base64.b64encode(np.ascontiguousarray(a).astype(f"<{name}", copy=False).tobytes()).decode(),
    }
    if a.ndim > 1:
        out["shape"] = ", ".join(map(str, a.shape))
    return out


def _fine(a: Array, largest: float) -> bool:
    """Whether float32 keeps a thousandth of the values' spread apart."""
    known = a[np.isfinite(a)]
    spread = float(known.max() - known.min())
    return spread == 0 or spread / 1000 > largest * 2.0**-23


def decode(encoded: Any) -> Array:
    """Return the NumPy array of what `array` made (or of a plain list)."""
    if not isinstance(encoded, dict):
        return np.asarray(encoded)
    flat = np.frombuffer(base64.b64decode(encoded["bdata"]), f"<{encoded['dtype']}")
    return flat.reshape([int(n) for n in encoded["shape"].split(",")]) if "shape" in encoded else flat


def text(value: object) -> str:
    """Return `value` as plotly text that shows what it holds: plotly reads a little HTML in every label.

    Control characters become a visible sign; "<", ">" and "&" become entities.
    """
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))
    return html.escape(shown, quote=False)


def shorten(name: str, width: int) -> str:
    """Return `name` cut in its middle to `width` characters; the ends of a layer's name tell most."""
    if len(name) <= width:
        return name
    head = max(1, (width - 1) // 3)
    return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"
