"""One sentence of health: the first finding with its remedy, or the facts that say all is well."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..background import Verdict
from ..source import Source
from .common import percent, power
from .overview import latest

if TYPE_CHECKING:
    from ampscope.analysis.finding import Finding

Level = Literal["good", "info", "warning", "error", "unknown"]

WARM_UP = 0.02
"""Share of the run, and at least 50 steps, within which skips count as the scale finding its level."""


@dataclass(frozen=True)
class Health:
    """`level` with a sentence, what to do, and the rule it rests on ("" where it rests on the facts alone)."""

    level: Level
    sentence: str
    remedy: str = ""
    rule: str = ""


@dataclass(frozen=True)
class Facts:
    """What the sentence of a healthy run is made of."""

    steps: int
    skipped: int
    last_skip: int
    all_in_warm_up: bool
    scale: float
    worst_layer: str
    worst_underflow: float


def facts(source: Source, rank: int) -> Facts:
    """Return the facts of a run."""
    steps = source.steps
    skipped = source.values("skipped", rank) > 0
    at = np.flatnonzero(skipped)
    warm_up = max(50, int(len(steps) * WARM_UP))
    grown = len(steps) // max(32, len(steps) // 100)  # a per cent more of a run changes no median that matters
    stamp = (source.generation, source.notes, grown, source.run.finished)
    layer, share = source.kept(("worst", rank), stamp, lambda: worst_underflow(source, rank))
    return Facts(
        len(steps), len(at), int(steps[at[-1]]) if len(at) else -1, bool(len(at)) and int(at[-1]) < warm_up,
        latest(source.values("loss_scale", rank)), layer, share,
    )  # fmt: skip


def worst_underflow(source: Source, rank: int) -> tuple[str, float]:
    """Return the layer that loses the largest share in its median column, and that share; ("", NaN) while it is unknown."""
    if not len(source.steps) or not source.layers:
        return "", math.nan
    table = source.table("underflow_ratio", rank, None, None, 100)
    if table.done < 1 or not table.high.size:
        return "", math.nan
    known = np.isfinite(table.high)
    columns = known.any(0)
    if not columns.any():
        return "", math.nan
    middle = np.full(table.high.shape[1], -1.0)
    middle[columns] = np.nanmedian(np.where(known, table.high, np.nan)[:, columns], axis=0)
    worst = int(middle.argmax())
    return source.layers[worst].name, float(middle[worst])


def health(source: Source, rank: int, verdict: Verdict[list[Finding]]) -> Health:
    """Return the sentence."""
    if not len(source.steps):
        return Health("unknown", "No step is recorded yet.")
    known = source.cached(("facts", rank), lambda: facts(source, rank))
    findings = verdict.value
    serious = [f for f in findings or [] if f.severity in ("warning", "error")]
    if serious:
        return of_finding(serious[0])
    sentence = "; ".join(_phrases(known)) + "."
    if findings is None:
        level: Level = "unknown"
        lead = "Diagnosis under way" if not verdict.problem else f"No diagnosis: {verdict.problem}"
        return Health(level, f"{lead}. {sentence[0].upper()}{sentence[1:]}")
    if known.skipped == known.steps:
        return Health("info", f"Undecided: no step has trained yet; {sentence}")
    return Health("good", f"Healthy: {sentence}")


def of_finding(finding: Finding) -> Health:
    """Return the sentence of a finding."""
    level: Level = "error" if finding.severity == "error" else "warning" if finding.severity == "warning" else "info"
    return Health(level, finding.title, finding.remedy, finding.rule)


def _phrases(f: Facts) -> list[str]:
    if not f.skipped:
        skips = f"no step of {f.steps:,} skipped"
    else:
        where = ", all in warm-up" if f.all_in_warm_up else f", the last at step {f.last_skip:,}"
        skips = f"{f.skipped:,} of {f.steps:,} steps skipped{where}"
    phrases = [skips]
    if math.isfinite(f.scale):
        phrases.append(f"scale {power(f.scale)}")
    if f.worst_layer and f.worst_underflow == 0:
        phrases.append("no layer's gradients are flushed to zero")
    elif f.worst_layer:
        phrases.append(f"worst underflow {percent(f.worst_underflow)} in {f.worst_layer}")
    return phrases
