"""The diagnosis: every rule, root cause first, consequences folded into it."""

from __future__ import annotations

from ampscope.analysis.finding import Finding, digits
from ampscope.analysis.rules import RULES
from ampscope.analysis.rules.context import Facts, count
from ampscope.run.run import Run


def diagnose(run: Run) -> list[Finding]:
    """Return what is wrong with a run, most important first; [] where nothing is worth saying.

    The first finding is the root cause. What follows from it is not listed: a rule names the rules it explains, and findings of
    those are left out.

    Raises:
        LogError: the log cannot be read.

    """
    facts = Facts(run)
    found: list[Finding] = []
    explained: set[str] = set()
    for rule in RULES:
        if explained.issuperset(rule.ids):
            continue
        finding = rule.look(facts)
        if finding is not None and finding.rule not in explained:
            found.append(finding)
            if finding.rank:  # a remark explains nothing
                explained |= rule.explains
    return sorted((f for f in found if f.rule not in explained), key=lambda f: -f.rank)


def summary(run: Run) -> str:
    """Return one sentence of facts for a run without findings above info."""
    facts = Facts(run)
    if not facts.n:
        return "No step was recorded yet." if not run.finished else "No step was recorded."
    skipped = int(facts.skipped.sum())
    start = sum(len(b) for b in facts.blocks if b.at_start)
    probes = sum(len(b) for b in facts.blocks if b.after_growth and not b.at_start)
    growths = sum(e.kind == "growth" for e in facts.events)
    of = count(facts.n, "step")
    if skipped == facts.n and facts.enabled:
        scale = digits(float(facts.scale[-1]))
        return f"Undecided: all of {of} skipped while the loss scale came down, now {scale}; no step has trained yet."
    kinds = ((start, "finding the scale"), (probes, "after a doubling"), (skipped - start - probes, "in between"))
    why = ", ".join(f"{n} {what}" if n < skipped else what for n, what in kinds if n)
    parts = [f"{skipped:,} of {of} skipped ({why})" if skipped else f"none of {of} skipped"]
    if facts.enabled:
        grown = f", doubled {growths} times" if growths > 1 else ", doubled once" if growths else ""
        parts.append(f"loss scale {digits(float(facts.scale[-1]))}{grown}")
    else:
        parts.append("no loss scaling")
    return f"Healthy: {'; '.join(parts)}."
