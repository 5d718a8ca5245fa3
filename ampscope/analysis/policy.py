"""GradScaler's policy in NumPy, and what a recorded run says of the scaler that drove it.

The policy is torch's `_amp_update_scale_`: a step with inf or NaN multiplies the scale by the backoff factor and zeroes
the growth tracker; `growth_interval` other steps in a row multiply it by the growth factor, unless FP32 would overflow.
Products are taken in double and stored as FP32, as torch does.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ampscope.errors import AmpscopeError

if TYPE_CHECKING:
    from ampscope.run.run import Run

Array = np.ndarray[Any, Any]
SCAN = 4096
"""Steps searched at a time for the next overflow."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A GradScaler's settings."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def check(self) -> None:
        """Refuse what GradScaler refuses.

        Raises:
            AmpscopeError: a setting out of range.
        """
        wrong = (
            ("init_scale", self.init_scale, "a positive number", 0 < self.init_scale < math.inf),
            ("growth_factor", self.growth_factor, "greater than 1", 1 < self.growth_factor < math.inf),
            ("backoff_factor", self.backoff_factor, "between 0 and 1", 0 < self.backoff_factor < 1),
            ("growth_interval", self.growth_interval, "an integer of at least 1", self.growth_interval >= 1),
        )
        for name, value, want, good in wrong:
            if not good:
                raise AmpscopeError(f"replay(): {name} must be {want}, not {value!r}")


def grown(scale: float, factor: float) -> float:
    """Return the scale after growth: FP32, unchanged where it would leave FP32's range."""
    with np.errstate(over="ignore"):
        new = float(np.float32(scale * factor))
    return new if math.isfinite(new) else scale


def shrunk(scale: float, factor: float) -> float:
    """Return the scale after a skipped step, FP32."""
    return float(np.float32(scale * factor))


@dataclass(frozen=True, slots=True)
class Intervention:
    """Something beside the policy that changed the recorded scaler before step `position` (an index of `run.steps`).

    `kind` is "restart" (a new session that did not restore the scaler), "gap" (steps that were not recorded),
    "no_update" (`update()` was not called after the step before), "new_scale" (`update(new_scale)`), "set" (the scale
    was changed by hand) or "loaded" (scale and growth tracker were: `load_state_dict`).
    """

    position: int
    kind: str
    scale: float
    tracker: int


@dataclass(frozen=True)
class Recorded:
    """The scaler of a recorded run. Arrays are [T]."""

    scale: Array
    tracker: Array
    skipped: Array
    phases: tuple[tuple[int, Settings | None], ...]
    """(first position, settings from there on); None where the scaler was disabled or absent."""
    interventions: tuple[Intervention, ...]

    @property
    def enabled(self) -> bool:
        """Whether there was a scaler at all."""
        return any(settings is not None for _, settings in self.phases)


def recorded(run: Run) -> Recorded:
    """Read a run's scaler: its settings over time, and where it did not follow its policy."""
    steps, scale = run.steps, run.scalar("loss_scale")
    tracker, skipped = np.nan_to_num(run.scalar("growth_tracker")).astype(np.int64), run.scalar("skipped") > 0
    session = _session_of(run)
    phases = _phases(run, session)
    return Recorded(
        scale, tracker, skipped, phases, tuple(_interventions(steps, scale, tracker, skipped, session, phases))
    )


def _session_of(run: Run) -> Array:
    """Return the session each step came from; where sessions overlap the later one wins."""
    out = np.zeros(len(run.steps), np.int64)
    for s in run.sessions:
        out[(run.steps >= s.first_step) & (run.steps <= s.last_step)] = s.index
    return out


def _phases(run: Run, session: Array) -> tuple[tuple[int, Settings | None], ...]:
    starts = np.flatnonzero(np.diff(session, prepend=-1)) if len(session) else np.zeros(1, np.int64)
    one = len(run.sessions) <= 1
    changes = [e for e in run.events if e.kind == "settings" and e.data.get("topic") == "scaler"]
    out: list[tuple[int, Settings | None]] = []
    for k, start in enumerate(starts.tolist()):
        index = int(session[start]) if len(session) else 0
        now = _settings((run if one else run.session(index)).metadata.get("scaler", {}))
        out.append((start, now))
        end = int(starts[k + 1]) if k + 1 < len(starts) else len(session)
        for event in changes:
            at = int(np.searchsorted(run.steps, event.step))
            if start <= at < end:
                now = _settings({**_as_dict(now), **event.data})
                out.append((at, now))
    return tuple(out)


def _as_dict(settings: Settings | None) -> dict[str, Any]:
    return {"enabled": settings is not None, **asdict(settings or Settings())}


def _settings(scaler: dict[str, Any]) -> Settings | None:
    if not scaler.get("enabled"):
        return None
    default = Settings()
    return Settings(
        init_scale=float(scaler.get("init_scale", default.init_scale)),
        growth_factor=float(scaler.get("growth_factor", default.growth_factor)),
        backoff_factor=float(scaler.get("backoff_factor", default.backoff_factor)),
        growth_interval=int(scaler.get("growth_interval", default.growth_interval)),
    )


def _interventions(
    steps: Array,
    scale: Array,
    tracker: Array,
    skipped: Array,
    session: Array,
    phases: tuple[tuple[int, Settings | None], ...],
) -> list[Intervention]:
    """Compare each step's state with what the policy makes of the step before."""
    out = []
    for (start, settings), end in zip(phases, [*(p for p, _ in phases[1:]), len(steps) - 1], strict=True):
        if settings is None or end <= start:
            continue
        s, k, bad = scale[start:end], tracker[start:end], skipped[start:end]
        grows = ~bad & (k + 1 == settings.growth_interval)
        with np.errstate(over="ignore"):
            up = np.float32(s * settings.growth_factor).astype(np.float64)
            down = np.float32(s * settings.backoff_factor).astype(np.float64)
        scale_then = np.where(bad, down, np.where(grows & np.isfinite(up), up, s))
        tracker_then = np.where(bad | grows, 0, k + 1)
        after_s, after_k = scale[start + 1 : end + 1], tracker[start + 1 : end + 1]
        for i in np.flatnonzero((after_s != scale_then) | (after_k != tracker_then)).tolist():
            t = start + i
            if session[t + 1] != session[t]:
                kind = "restart"
            elif steps[t + 1] != steps[t] + 1:
                kind = "gap"
            elif after_k[i] == k[i]:
                kind = "no_update" if after_s[i] == s[i] else "new_scale"
            else:
                kind = "set" if after_k[i] == tracker_then[i] else "loaded"
            out.append(Intervention(t + 1, kind, float(after_s[i]), int(after_k[i])))
    return out


@dataclass
class Simulation:
    """A scaler run over the steps' limits; arrays [T] as they come out."""

    loss_scale: Array
    growth_tracker: Array
    skipped: Array


def simulate(limit: Array, record: Recorded, override: dict[str, Any]) -> Simulation:
    """Run a scaler over a recorded run.

    Args:
        limit: [T], smallest scale at which each step overflows (`ampscope.analysis.overflow`).
        record: the recorded scaler.
        override: settings (fields of `Settings`) that replace the recorded ones, all through; empty: the recorded ones.
    """
    n = len(limit)
    out = Simulation(np.zeros(n), np.zeros(n), np.zeros(n, bool))
    if not n:
        return out
    fresh = bool(override) and not record.enabled
    phases = [(0, Settings(**override))] if fresh else [(p, _replaced(s, override)) for p, s in record.phases]
    marks: dict[int, Intervention] = {} if fresh else {i.position: i for i in record.interventions}
    first = float(
        np.float32(override.get("init_scale", phases[0][1].init_scale if fresh and phases[0][1] else record.scale[0]))
    )
    state = [first, 0 if fresh else int(record.tracker[0])]
    for (start, settings), end in zip(phases, [*(p for p, _ in phases[1:]), n], strict=True):
        cuts = sorted({start, end, *(p for p in marks if start < p < end)})
        for a, b in pairwise(cuts):
            mark = marks.get(a)
            if mark is not None:
                _apply(mark, state, override)
            if settings is None:
                state[:] = [float(record.scale[a]), 0]
                _hold(out, limit, a, b, state)
                continue
            follows = marks.get(b)
            frozen = follows is not None and follows.kind in ("no_update", "new_scale")
            _advance(out, limit, a, b - 1 if frozen else b, state, settings)
            if frozen:
                _hold(out, limit, b - 1, b, state)
    return out


def _replaced(settings: Settings | None, override: dict[str, Any]) -> Settings | None:
    return settings if settings is None else replace(settings, **override)


def _apply(mark: Intervention, state: list[Any], override: dict[str, Any]) -> None:
    if mark.kind == "restart" and "init_scale" in override:
        state[:] = [float(np.float32(override["init_scale"])), 0]
    elif mark.kind in ("restart", "loaded") or (mark.kind == "gap" and not override):
        state[:] = [mark.scale, mark.tracker]
    elif mark.kind in ("set", "new_scale"):
        state[0] = mark.scale


def _hold(out: Simulation, limit: Array, a: int, b: int, state: list[Any]) -> None:
    """Fill steps without an update."""
    out.loss_scale[a:b], out.growth_tracker[a:b] = state
    out.skipped[a:b] = limit[a:b] <= state[0]


def _advance(out: Simulation, limit: Array, t: int, end: int, state: list[Any], settings: Settings) -> None:
    """Fill steps t to `end`, from one growth or overflow to the next."""
    scale, tracker = state
    while t < end:
        left = settings.growth_interval - 1 - tracker
        stop = min(end, t + SCAN, t + left + 1 if left >= 0 else end)
        hits = limit[t:stop] <= scale
        hit = int(hits.argmax()) if hits.any() else -1
        last = stop if hit < 0 else t + hit + 1
        count = last - t
        out.loss_scale[t:last] = scale
        out.growth_tracker[t:last] = tracker + np.arange(count)
        t = last
        if hit >= 0:
            out.skipped[last - 1] = True
            scale, tracker = shrunk(scale, settings.backoff_factor), 0
        elif count == left + 1:
            scale, tracker = grown(scale, settings.growth_factor), 0
        else:
            tracker += count
    state[:] = [scale, tracker]
