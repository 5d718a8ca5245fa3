"""Runs a case (tests/cases) or any other training script, watched, and judges what the diagnosis says of it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import ampscope
from ampscope.analysis.diagnose import diagnose


@dataclass
class Outcome:
    """What came of a watched script."""

    run: Any
    findings: list[Any]
    error: BaseException | None
    modules: set[str] = field(default_factory=set)

    @property
    def serious(self) -> list[Any]:
        """Findings above info."""
        return [f for f in self.findings if f.rank]

    @property
    def first(self) -> Any:
        """The finding a person reads first, None if there is none."""
        return next(iter(self.serious or self.findings), None)


def play(main, logs, **variant) -> Outcome:
    """Run `main(watch, **variant)` with a log under `logs`; a second watch goes on with the same run, as after a restart."""
    watched: list[Any] = []
    modules: set[str] = set()

    def watch(scaler, model, **kwargs):
        for old in watched:
            ampscope.unwatch(old)
        watched[:] = [ampscope.watch(scaler, model, log_dir=logs, run="case", tensorboard=False, **kwargs)]
        parts = model.values() if isinstance(model, dict) else model if isinstance(model, (list, tuple)) else [model]
        modules.update(name for part in parts for name, _ in part.named_modules() if name)
        return watched[0]

    error = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="ampscope")  # a probe that switches itself off must fail the test
        try:
            main(watch, **variant)
        except (RuntimeError, ValueError, AssertionError) as raised:
            error = raised
        finally:
            for scaler in watched:
                ampscope.unwatch(scaler)
    run = ampscope.open_run(f"{logs}/case")
    return Outcome(run, diagnose(run), error, modules)


def wrong(truth: dict[str, Any], outcome: Outcome) -> str:
    """Return what of the truth the diagnosis missed, "" if nothing."""
    told = ", ".join(f"{f.rule} {f.layers[:3]}" for f in outcome.serious or outcome.findings) or "nothing"
    if truth.get("raises"):
        if truth["raises"] not in str(outcome.error):
            return f"the script should raise {truth['raises']!r}, not {outcome.error!r}"
    elif outcome.error is not None:
        return f"the script raised {outcome.error!r}"
    if truth.get("control"):
        return f"a healthy run is accused: {told}" if outcome.serious else ""
    right = {truth["rule"], *truth.get("also", ())}
    first = outcome.first
    if first is None or first.rule not in right:
        return f"not {truth['rule']} but {told}"
    if truth.get("phase") and first.phase != truth["phase"]:
        return f"phase {first.phase}, not {truth['phase']}"
    places = truth.get("where", ())
    if places and not any(_same(said, place) for said in first.layers[:3] for place in places):
        return f"{first.rule} in {first.layers[:3]}, not in {places}"
    return ""


def _same(said: str, place: str) -> bool:
    return said == place or said.startswith(place + ".") or place.startswith(said + ".")
