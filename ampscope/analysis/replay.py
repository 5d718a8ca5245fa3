"""What other GradScaler settings would have done to a recorded run. docs/what-if.md says what that rests on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ampscope.analysis.overflow import Limits, limits
from ampscope.analysis.policy import Intervention, Recorded, Settings, recorded, simulate
from ampscope.analysis.waste import Cost, search_best
from ampscope.analysis.window import power
from ampscope.errors import AmpscopeError

if TYPE_CHECKING:
    from ampscope.run.run import Run

Array = np.ndarray[Any, Any]

TOO_MUCH = 1e-3
"""Share of all gradient elements that a better scale would have kept, from which a step counts as run at too low a
scale.
"""


@dataclass(frozen=True)
class Replay:
    """A simulated scaler on a recorded run. Arrays are [T], over `steps`."""

    settings: Settings | None
    """The settings simulated: those given, else the last recorded ones.

    None where the run had no scaler and none was given.
    """
    steps: Array
    """int64."""
    loss_scale: Array
    """float64: the scale of each step."""
    growth_tracker: Array
    """float64."""
    skipped: Array
    """bool: the step overflows at that scale."""
    too_low: Array
    """bool: the step was made, at a scale so low that more than 0.1 % of all gradient elements flushed which a safe
    scale keeps.
    """
    wasted: Array
    """float64: what the step lost, in steps: 1 if skipped, else the share of gradient elements that a safe scale would
    have kept.
    """
    recorded_loss_scale: Array
    recorded_skipped: Array
    limit: Array
    """float64: smallest loss scale at which the step overflows; 0 where every scale does, inf where none does."""
    skipped_steps: int
    recorded_skipped_steps: int
    hopeless_steps: int
    """Skipped steps that no scale would have saved."""
    too_low_steps: int
    too_low_seconds: float
    wasted_seconds: float
    """Time of skipped steps."""
    matches_record: bool
    """Whether scale and skips are those recorded, in every step."""
    interventions: tuple[Intervention, ...]
    """Where something else than the policy changed the recorded scaler."""
    best: Settings | None
    """Of a small grid, the setting that wastes least (sum of `wasted`); None where the search was not asked for."""
    best_skipped_steps: int
    best_wasted: float
    """Sum of `wasted` with that setting, in steps; NaN without one."""
    assumptions: tuple[str, ...]

    def __str__(self) -> str:
        """Return a few lines for people: these settings, the recorded ones, the best found, the assumption."""
        n = len(self.steps)
        lines = [
            f"replayed {n} steps with {_words(self.settings)}: {self.skipped_steps} skipped "
            f"({self.recorded_skipped_steps} recorded, {self.hopeless_steps} at any scale), "
            f"{self.too_low_steps} at too low a scale, {np.nansum(self.wasted):.2f} steps wasted"
        ]
        if self.best is not None:
            lines.append(
                f"least waste: {_words(self.best)}: {self.best_skipped_steps} skipped, {self.best_wasted:.2f} steps wasted"
            )
        return "\n".join([*lines, *self.assumptions[:1]])


def _words(settings: Settings | None) -> str:
    if settings is None:
        return "no scaler"
    return (
        f"init_scale {power(settings.init_scale)}, growth_factor {settings.growth_factor:g}, "
        f"backoff_factor {settings.backoff_factor:g}, growth_interval {settings.growth_interval}"
    )


def replay(
    run: Run,
    init_scale: float | None = None,
    growth_factor: float | None = None,
    backoff_factor: float | None = None,
    growth_interval: int | None = None,
    *,
    search: bool = True,
) -> Replay:
    """Simulate GradScaler's policy with other settings on the overflows and maxima of a recorded run.

    Settings that are not given are those of the run, with every change it made midway. With none given the recorded
    scale curve comes out.

    Args:
        run: a recorded run.
        init_scale: first loss scale; also that of later sessions that did not restore the scaler.
        growth_factor: what the scale is multiplied by after `growth_interval` steps without overflow; above 1.
        backoff_factor: what it is multiplied by after an overflow; between 0 and 1.
        growth_interval: steps.
        search: also look for the setting that would have wasted least.

    Returns:
        The simulated curve, its skips, its cost, and what the simulation rests on (`assumptions`).

    Raises:
        AmpscopeError: a setting out of range, or a run without steps.
    """
    given = {"init_scale": init_scale, "growth_factor": growth_factor}
    given |= {"backoff_factor": backoff_factor, "growth_interval": growth_interval}
    override: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    _check(override)
    if not len(run.steps):
        raise AmpscopeError(f"run {run.name!r} has no step yet: there is nothing to replay")
    record, found = recorded(run), limits(run)
    cost = Cost(run, found)
    out = simulate(found.limit, record, override)
    own = next((s for _, s in reversed(record.phases) if s is not None), None)
    base = Settings() if own is None else replace(own, init_scale=float(record.scale[0]))
    settings = replace(base, **override)
    wasted = cost.of(out)
    too_low = ~out.skipped & (wasted > TOO_MUCH)
    seconds = np.nan_to_num(run.scalar("step_seconds"))
    best, best_out, least = None, out, math.nan
    if search:
        best, best_out, least = search_best(found.limit, record, cost, settings, override)
    return Replay(
        settings=settings if override or own is not None else None,
        steps=run.steps,
        loss_scale=out.loss_scale,
        growth_tracker=out.growth_tracker,
        skipped=out.skipped,
        too_low=too_low,
        wasted=wasted,
        recorded_loss_scale=record.scale,
        recorded_skipped=record.skipped,
        limit=found.limit,
        skipped_steps=int(out.skipped.sum()),
        recorded_skipped_steps=int(record.skipped.sum()),
        hopeless_steps=int((out.skipped & (found.limit == 0)).sum()),
        too_low_steps=int(too_low.sum()),
        too_low_seconds=float(seconds[too_low].sum()),
        wasted_seconds=float(seconds[out.skipped].sum()),
        matches_record=bool(
            np.array_equal(out.loss_scale, record.scale) and np.array_equal(out.skipped, record.skipped)
        ),
        interventions=record.interventions,
        best=best,
        best_skipped_steps=int(best_out.skipped.sum()),
        best_wasted=least,
        assumptions=_assumptions(found, record, override),
    )


def _check(override: dict[str, Any]) -> None:
    for name, value in override.items():
        integer = name == "growth_interval"
        kinds = (int, np.integer) if integer else (int, float, np.integer, np.floating)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise AmpscopeError(f"replay(): {name} must be {'an integer' if integer else 'a number'}, not {value!r}")
    Settings(**override).check()


def _assumptions(found: Limits, record: Recorded, override: dict[str, Any]) -> tuple[str, ...]:
    name = "FP32" if found.format is None else found.format.name.upper()
    out = [
        "Training is taken to have gone as recorded: the same gradients come at every step, whatever was skipped.",
        "A step that was finite is finite at every smaller scale; one that overflowed because of the scale overflows at "
        "every larger one.",
        f"At a larger scale a step overflows where its largest gradient, times {found.gain:.3g}, leaves {name}'s range"
        + (" (what the recorded overflows tell of values inside backward)." if found.gain > 1 else "."),
    ]
    hopeless = int(found.hopeless.sum())
    if hopeless:
        out.append(
            f"{hopeless} skipped steps are taken to be non-finite at any scale: their loss was not finite, a trace says "
            "so, or the gradients around them are more than 2^6 below the limit."
        )
    if found.unknown:
        out.append(
            f"{found.unknown} skipped steps have no finite step near them; they are taken to be finite below the "
            "smallest scale tried."
        )
    if not record.enabled:
        out.append(
            "The run had no scaler"
            + ("; settings not given are torch's defaults." if override else ": its scale is constant.")
        )
    by_hand = [i for i in record.interventions if i.kind in ("set", "new_scale", "loaded")]
    if by_hand:
        out.append(
            f"The scale was set by hand {len(by_hand)} times (first at {power(by_hand[0].scale)}); so it is here."
        )
    for kind, text in (
        ("no_update", "steps were not followed by update(); they are not followed by it here"),
        ("restart", "later sessions began with a scaler that was not restored; so they do here"),
        ("gap", "gaps in the record are passed over"),
    ):
        count = sum(i.kind == kind for i in record.interventions)
        if count:
            out.append(f"{count} {text}.")
    return tuple(out)
