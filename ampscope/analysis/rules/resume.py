"""The rule on a scaler whose state was not restored."""

from __future__ import annotations

from ampscope.analysis.finding import Finding
from ampscope.analysis.rules.context import Facts, count, power
from ampscope.analysis.rules.loop import loop


def not_restored(f: Facts) -> Finding | None:
    """A resumed session starts from the initial scale again."""
    found = _restart(f) or _resumed_optimizer(f)
    if found is None:
        return None
    at, before, told = found
    burst = next((b.last + 1 - at for b in f.blocks if b.first <= at <= b.last), 0)
    if not burst and before is None:
        return None
    known = f", although the session before had settled at {power(before)}" if before is not None else ""
    return loop(
        "scaler-state-not-restored",
        "A resumed run starts from a fresh loss scale: the scaler's state was not restored",
        f"""At step {int(f.steps[at])} the scale was {power(f.scale[at])}{known}; {count(burst, "step")} in a row
            {"was" if burst == 1 else "were"} skipped until it fitted again. {told}""",
        "Save scaler.state_dict() in the checkpoint, and call scaler.load_state_dict(...) where model and optimizer are restored.",
        f.steps[at : at + max(burst, 1)].tolist(),
        "load_state_dict",
        severity="warning",
        numbers={"loss_scale": float(f.scale[at]), "scale_before": before, "skipped_in_a_row": burst},
    )


def _restart(f: Facts) -> tuple[int, float | None, str] | None:
    """A session that began at its own initial scale, far above the one the session before had left."""
    sessions = f.run.sessions
    tracker = f.scalar("growth_tracker")
    for previous, session in zip(sessions, sessions[1:], strict=False):
        at = f.position(session.first_step)
        if session.first_step < 0 or previous.first_step < 0 or not 0 < at < f.n:
            continue
        left = float(f.scale[at - 1]) * (float(f.scaler.get("backoff_factor", 0.5)) if f.skipped[at - 1] else 1.0)
        initial = f.run.session(session.index).metadata.get("scaler", {}).get("init_scale")
        if tracker[at] == 0 and f.scale[at] == initial and f.scale[at] > 2 * left:
            told = f.usage("optimizer_resumed")
            return at, left, f"{told.first.message}." if told else ""
    return None


def _resumed_optimizer(f: Facts) -> tuple[int, float | None, str] | None:
    """An optimizer with steps behind it beside a scaler at its start (the session before was not recorded)."""
    notes = f.usage("optimizer_resumed")
    if not notes:
        return None
    at = f.position(notes.first.step)
    return (at, None, f"{notes.first.message}.") if at < f.n and f.skipped[at : at + 2].any() else None
