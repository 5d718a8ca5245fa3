"""What other GradScaler settings would have done to a recorded run. docs/what-if.md says what that rests on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ampscope.analysis.formats import FP16
from ampscope.analysis.overflow import Limits, limits
from ampscope.analysis.policy import Intervention, Recorded, Settings, Simulation, recorded, simulate
from ampscope.analysis.shares import already, flushed
from ampscope.analysis.tally import tally
from ampscope.analysis.window import EXPONENTS, power
from ampscope.errors import AmpscopeError

if TYPE_CHECKING:
    from ampscope.run.run import Run

Array = np.ndarray[Any, Any]

TOO_MUCH = 1e-3
"""Share of all gradient elements that a better scale would have kept, from which a step counts as run at too low a
scale.
"""
NEIGHBOURS = 50
"""Steps before and after one that must bear a scale for it to count as safe there."""
HISTOGRAMS = 256
"""Steps whose histograms are read, spread evenly."""
INIT_SCALES = tuple(2.0**k for k in range(0, 25, 2))
INTERVALS = (20, 50, 100, 200, 500, 1000, 2000, 5000)
"""The grid searched for the best setting."""


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
    given = {
        "init_scale": init_scale, "growth_factor": growth_factor, "backoff_factor": backoff_factor, "growth_interval": growth_interval
    }  # fmt: skip
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
    best, best_out, best_wasted = (
        _search(found.limit, record, cost, settings, override) if search else (None, out, math.nan)
    )
    return Replay(
        settings if override or own is not None else None, run.steps, out.loss_scale, out.growth_tracker, out.skipped, too_low, wasted, record.scale, record.skipped, found.limit,
        int(out.skipped.sum()), int(record.skipped.sum()), int((out.skipped & (found.limit == 0)).sum()), int(too_low.sum()),
        float(seconds[too_low].sum()), float(seconds[out.skipped].sum()),
        bool(np.array_equal(out.loss_scale, record.scale) and np.array_equal(out.skipped, record.skipped)),
        record.interventions, best, int(best_out.skipped.sum()) if best else 0, best_wasted, _assumptions(found, record, override),
    )  # fmt: skip


def _check(override: dict[str, Any]) -> None:
    for name, value in override.items():
        integer = name == "growth_interval"
        kinds = (int, np.integer) if integer else (int, float, np.integer, np.floating)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise AmpscopeError(f"replay(): {name} must be {'an integer' if integer else 'a number'}, not {value!r}")
    Settings(**override).check()


class Cost:
    """What steps at a scale cost: 1 if skipped, else the share of gradient elements flushed that a safe scale keeps."""

    def __init__(self, run: Run, found: Limits) -> None:
        self._share = np.zeros(len(EXPONENTS))
        rows = run.histogram_rows()
        if found.format is FP16 and len(rows):
            rows = rows[np.unique(np.linspace(0, len(rows) - 1, HISTOGRAMS).astype(np.int64))]
            t = tally(run, rows, run.ranks[:1], found.limit)
            total = max(
                float((t.elements - t.nan - sum(t.infinite.values(), np.zeros(len(t.layers), np.int64))).sum()), 1.0
            )
            for i, j in enumerate(EXPONENTS):
                self._share[i] = (flushed(t, FP16, 2.0**j).value + already(t, FP16, 2.0**j)[0]).sum() / total
        self._safe = self._at(_least(np.where(found.limit > 0, found.limit, np.inf)) / 2)

    def _at(self, scale: Array) -> Array:
        """Return the share flushed at a scale, or at the next smaller power of two."""
        with np.errstate(divide="ignore"):
            k = np.floor(np.log2(scale))
        k = np.where(np.isfinite(k), k, np.where(scale > 1, EXPONENTS[-1], EXPONENTS[0]))
        return np.asarray(self._share[np.clip(k.astype(np.int64), EXPONENTS[0], EXPONENTS[-1]) - EXPONENTS[0]])

    def of(self, out: Simulation) -> Array:
        """Return the cost of each step of a simulation, float64 [T]."""
        return np.where(out.skipped, 1.0, np.maximum(self._at(out.loss_scale) - self._safe, 0.0))


def _least(limit: Array) -> Array:
    """Return the least limit among each step's neighbours."""
    width = 2 * NEIGHBOURS + 1
    padded = np.concatenate([np.full(NEIGHBOURS, np.inf), limit, np.full(NEIGHBOURS, np.inf)])
    out = np.full(len(limit), np.inf)
    reach = 1
    while 2 * reach <= width:  # minima of 1, 2, 4, … steps, then two that overlap
        padded = np.minimum(padded[:-reach], padded[reach:])
        reach *= 2
    rest = width - reach
    out = np.minimum(padded[: len(limit)], padded[rest : rest + len(limit)])
    return np.asarray(out)


def _search(
    limit: Array, record: Recorded, cost: Cost, own: Settings, override: dict[str, Any]
) -> tuple[Settings, Simulation, float]:
    """Try initial scales, then growth intervals at the best of them.

    Of equals the one nearest to the setting at hand wins.
    """
    out = simulate(limit, record, override)
    best, best_out, least = own, out, float(cost.of(out).sum())
    for name, values in (("init_scale", INIT_SCALES), ("growth_interval", INTERVALS)):
        base, now = best, math.log2(getattr(best, name))
        for value in sorted(values, key=lambda v: (abs(math.log2(v) - now), v)):
            one: dict[str, Any] = {name: value}
            tried = replace(base, **one)
            out = simulate(limit, record, asdict(tried))
            wasted = float(cost.of(out).sum())
            if wasted < least - 1e-9:
                best, best_out, least = tried, out, wasted
    return best, best_out, least


def _assumptions(found: Limits, record: Recorded, override: dict[str, Any]) -> tuple[str, ...]:
    name = "FP32" if found.format is None else found.format.name.upper()
    out = [
        "Training is taken to have gone as recorded: the same gradients come at every step, whatever was skipped.",
        "A step that was finite is finite at every smaller scale; one that overflowed because of the scale overflows at every "
        "larger one.",
        f"At a larger scale a step overflows where its largest gradient, times {found.gain:.3g}, leaves {name}'s range"
        + (" (what the recorded overflows tell of values inside backward)." if found.gain > 1 else "."),
    ]
    hopeless = int(found.hopeless.sum())
    if hopeless:
        out.append(
            f"{hopeless} skipped steps are taken to be non-finite at any scale: their loss was not finite, a trace says so, "
            "or the gradients around them are more than 2^6 below the limit."
        )
    if found.unknown:
        out.append(
            f"{found.unknown} skipped steps have no finite step near them; they are taken to be finite below the smallest "
            "scale tried."
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
