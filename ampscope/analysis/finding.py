"""A finding: one thing that is wrong (or worth knowing) about a run, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["info", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")
"""From harmless to serious. A healthy run has nothing above "info"."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found in a run.

    Attributes:
        rule: an id of design.md §7; docs/rules.md explains each.
        severity: "info", "warning" or "error".
        title: one sentence for people.
        phase: "data", "forward", "backward", "optimizer", "usage" or "none".
        layers: names of modules or parameters, most to blame first; empty where no layer owns the fault.
        op: the operation, e.g. "mm", or "".
        where: "file.py:line" in the user's code, or "".
        steps: first and last step concerned, and how many.
        evidence: numbers of this run, name → JSON value (non-finite floats are the strings "inf", "-inf", "nan").
        remedy: what to change, in one or two sentences.
    """

    rule: str
    severity: Severity
    title: str
    phase: str = "none"
    layers: tuple[str, ...] = ()
    op: str = ""
    where: str = ""
    steps: tuple[int, int, int] = (0, 0, 0)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""

    @property
    def rank(self) -> int:
        """0 for info, 1 for warning, 2 for error."""
        return SEVERITIES.index(self.severity)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, with the keys of `ampscope check --json`."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "title": self.title,
            "phase": self.phase,
            "layers": list(self.layers),
            "op": self.op,
            "where": self.where,
            "steps": list(self.steps),
            "evidence": {k: plain(v) for k, v in self.evidence.items()},
            "remedy": self.remedy,
        }


def plain(value: Any) -> Any:
    """Return `value` as a JSON value: NumPy scalars become Python's, non-finite floats become strings, tuples lists."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    return value


def digits(x: float) -> str:
    """Return a number with few significant digits, powers of two from 64 on and below 1 as such: 65536 → "2^16", 1200 → "1200"."""
    if not math.isfinite(x):
        return "NaN" if x != x else "inf" if x > 0 else "-inf"
    if x > 0 and (x >= 64 or x < 1):
        mantissa, exponent = math.frexp(x)
        if mantissa == 0.5:
            return f"2^{exponent - 1}"
    return f"{x:.0f}" if 100 <= abs(x) < 1e6 else f"{x:.3g}"
