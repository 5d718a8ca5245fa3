"""The findings as the dashboard shows them: evidence as pairs, and where in the charts it can be seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .common import number

if TYPE_CHECKING:
    from ampscope.analysis.finding import Finding

SIGNS = {"error": "✕ error", "warning": "▲ warning", "info": "● info"}


@dataclass(frozen=True)
class Link:
    """Where a finding's evidence is drawn: a tab, a metric and layer of the Layers tab ("" elsewhere), a range of steps."""

    tab: str
    metric: str
    layer: str
    span: list[float] | None
    words: str


@dataclass(frozen=True)
class Card:
    """One finding."""

    sign: str
    severity: str
    title: str
    rule: str
    facts: list[tuple[str, str]]
    evidence: list[tuple[str, str]]
    remedy: str
    link: Link | None


UNDERFLOW_RULES = (
    "gradient-underflow-no-scaling", "scale-stuck-low-underflow", "layer-underflow", "dead-units-zero-grad",
    "scale-runaway-zero-grads", "parameter-underflow-on-cast",
)  # fmt: skip
METRIC_OF = {
    "dead-units-zero-grad": "zero_ratio",
    "scale-runaway-zero-grads": "zero_ratio",
    "backward-overflow-depth": "grad_max",
    "weight-update-lost-to-rounding": "weight_norm",
}


def cards(findings: list[Finding]) -> list[Card]:
    """Return the findings in their order, most important first."""
    return [_card(f) for f in findings]


def _card(f: Finding) -> Card:
    first, last, count = [*f.steps, -1, -1, 0][:3] if f.steps else (-1, -1, 0)
    facts = [
        ("phase", "" if f.phase == "none" else f.phase),
        ("layers", ", ".join(f.layers[:8]) + (f" and {len(f.layers) - 8} more" if len(f.layers) > 8 else "")),
        ("op", f.op),
        ("where", f.where),
        ("steps", f"{first:,} to {last:,}, {count:,} in all" if count > 1 else f"{first:,}" if count == 1 else ""),
    ]
    return Card(
        SIGNS.get(f.severity, f.severity), f.severity, f.title, f.rule, [(k, v) for k, v in facts if v], evidence(f.evidence),
        f.remedy, link(f.rule, list(f.layers), first, last, count),
    )  # fmt: skip


def evidence(found: Any) -> list[tuple[str, str]]:
    """Return evidence as (name, value) pairs; numbers with significant digits."""
    if not isinstance(found, Mapping):
        return [("", str(found))] if found else []
    return [(str(k).replace("_", " "), _value(v)) for k, v in found.items()]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return number(float(value))
    if isinstance(value, (list, tuple)):
        return ", ".join(_value(v) for v in value[:12]) + (f" and {len(value) - 12} more" if len(value) > 12 else "")
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {_value(v)}" for k, v in list(value.items())[:12])
    return str(value)


def link(rule: str, layers: list[str], first: int, last: int, count: int) -> Link | None:
    """Return where the evidence of a rule is drawn, None where it is on no chart (a usage fault seen once)."""
    margin = max(5.0, (last - first) * 0.1)
    span = [first - margin, last + margin] if count else None
    if rule in UNDERFLOW_RULES or rule in METRIC_OF:
        metric = METRIC_OF.get(rule, "underflow_ratio")
        return Link("layers", metric, layers[0] if layers else "", span, "Show it on the layers")
    if layers and count:
        return Link("layers", "nonfinite_count", layers[0], span, "Show it on the layers")
    if count:
        return Link("overview", "", "", span, "Show it on the curves")
    return None
