"""A finding about the training loop."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.analysis.finding import Finding, Severity
from ampscope.analysis.rules.context import finding, span


def loop(
    rule: str,
    title: str,
    evidence: str,
    remedy: str,
    steps: Sequence[int],
    op: str,
    *,
    severity: Severity = "error",
    layers: Sequence[str] = (),
    where: str = "",
    numbers: dict[str, object] | None = None,
) -> Finding:
    """Return a finding about the training loop; `steps` are those it was seen at."""
    return finding(
        rule,
        severity,
        title,
        "usage",
        layers=layers,
        op=op,
        where=where,
        steps=span(steps),
        evidence=evidence,
        numbers=numbers,
        remedy=remedy,
    )
