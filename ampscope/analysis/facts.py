"""What the rules look at: a run's scalars and events, sorted once, and layer metrics of as many steps as are needed.

A rule takes `Facts` and nothing else. Whole-run layer arrays can be gigabytes, so layer metrics are taken from at most `ROWS` steps,
spread evenly, that were neither skipped nor left unsampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ampscope.record.step import MEASURED, Event

if TYPE_CHECKING:
    from ampscope.run.run import Run

Array = np.ndarray[Any, Any]

ROWS = 400
"""Steps whose layer statistics are read: enough for any share to be known within a few per cent."""
START = 2
"""Steps after a session's first one within which a block of skips counts as the start of the run: some loops warm up with a step or
two that cannot overflow."""


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive skipped steps, as positions in `Facts.steps`: first and last."""

    first: int
    last: int
    at_start: bool
    """It begins with the session."""
    after_growth: bool
    """The loss scale was raised by the step before."""
    loss_finite: bool
    """The loss was finite in every step of it."""

    @property
    def count(self) -> int:
        """Steps in it."""
        return self.last - self.first + 1

    @property
    def positions(self) -> range:
        """Positions in `Facts.steps`."""
        return range(self.first, self.last + 1)


class Facts:
    """A run as rules see it. Arrays named here are [T], over the run's steps on its lowest rank."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.steps: Array = run.steps
        self.events: list[Event] = run.events
        self.scaler: dict[str, Any] = run.metadata.get("scaler", {})
        self.layers = run.layers

    # The scaler and its steps

    @property
    def enabled(self) -> bool:
        """Whether a GradScaler scaled at all (in the newest session)."""
        return bool(self.scaler.get("enabled"))

    @cached_property
    def scale(self) -> Array:
        """The loss scale gradients carried."""
        return self.run.scalar("loss_scale")

    @cached_property
    def skipped(self) -> Array:
        """Whether any optimizer skipped, bool."""
        return self.run.scalar("skipped") > 0

    @cached_property
    def loss_bad(self) -> Array:
        """Whether the loss was seen and not finite, bool."""
        out = np.zeros(len(self.steps), bool)
        for event in self.gradients:
            if not event.data.get("loss_finite", True):
                out[self.positions([event.step])] = True
        return out

    @cached_property
    def blocks(self) -> list[Block]:
        """Runs of consecutive skipped steps."""
        starts = {s.first_step for s in self.run.sessions}
        grown = {e.step for e in self.events if e.kind == "growth"}
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self.skipped, [False]]).astype(np.int8)))
        out = []
        for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            step = int(self.steps[first])
            at_start = any(s <= step <= s + START for s in starts)
            grew = first > 0 and int(self.steps[first - 1]) in grown
            out.append(Block(first, end - 1, at_start, grew, not self.loss_bad[first:end].any()))
        return out

    def positions(self, steps: Iterable[int]) -> Array:
        """Return the positions in `steps` of those of the given steps that were recorded."""
        wanted = np.unique(np.fromiter(steps, np.int64))
        at = np.searchsorted(self.steps, wanted)
        ok = at < len(self.steps)
        return at[ok][self.steps[at[ok]] == wanted[ok]]

    def span(self, steps: Iterable[int]) -> tuple[int, int, int]:
        """Return (first, last, count) of steps; (0, 0, 0) if there are none."""
        found = sorted({int(s) for s in steps})
        return (found[0], found[-1], len(found)) if found else (0, 0, 0)

    def steps_at(self, positions: Iterable[int] | Array) -> list[int]:
        """Return the step numbers at positions."""
        return [int(self.steps[i]) for i in positions]

    def whole(self) -> tuple[int, int, int]:
        """Return the span of the run."""
        return (int(self.steps[0]), int(self.steps[-1]), len(self.steps)) if len(self.steps) else (0, 0, 0)

    def observed(self, name: str) -> Array:
        """Return a value the probe noted now and then, NaN elsewhere; all NaN if it never did."""
        return self.run.scalar(name) if name in self._names else np.full(len(self.steps), np.nan)

    @cached_property
    def _names(self) -> set[str]:
        return set(self.run.scalars)

    def optimizer_flags(self) -> dict[str, Array]:
        """Return optimizer label → whether it skipped, NaN where it was not stepped."""
        return {n.removeprefix("skipped/"): self.run.scalar(n) for n in self.run.scalars if n.startswith("skipped/")}

    # Events

    def topic(self, name: str) -> list[Event]:
        """Return the events about `name`."""
        return self._by_topic.get(name, [])

    @cached_property
    def _by_topic(self) -> dict[str, list[Event]]:
        out: dict[str, list[Event]] = {}
        for event in self.events:
            out.setdefault(str(event.data.get("topic", "")), []).append(event)
        return out

    @cached_property
    def gradients(self) -> list[Event]:
        """What `probe.culprit` said of each skipped or non-finite step."""
        return self.topic("gradients")

    def culprits(self, positions: Iterable[int]) -> list[Event]:
        """Return the culprit events of steps at these positions."""
        wanted = {int(self.steps[i]) for i in positions}
        return [e for e in self.gradients if e.step in wanted]

    def traced(self, role: str) -> list[Event]:
        """Return what the tracer found: role "root", "hidden" or "eval"."""
        return [e for e in self.topic("trace") if e.data.get("role") == role]

    def usage(self, what: str) -> list[Event]:
        """Return what `probe.usage` wrote down under `what`."""
        return [e for e in self.topic("usage") if e.data.get("what") == what]

    @cached_property
    def matmuls(self) -> dict[str, int]:
        """Matrix products in the audited steps, by dtype name; {} if none was audited or none seen."""
        out: dict[str, int] = {}
        for event in self.topic("audit"):
            for dtype, count in dict(event.data.get("matmuls") or {}).items():
                out[dtype] = out.get(dtype, 0) + int(count)
        return out

    # Layers

    @cached_property
    def rows(self) -> Array:
        """Positions of the steps whose layer statistics rules use: sampled, not skipped, at most `ROWS`."""
        grad_norm = self.run.scalar("grad_norm")
        good = np.flatnonzero(~self.skipped & ~np.isnan(grad_norm))
        if len(good) <= ROWS:
            return good
        return good[np.linspace(0, len(good) - 1, ROWS).round().astype(np.int64)]

    def metric(self, name: str) -> Array:
        """Return a layer metric at `rows`, float32 [R, L]; NaN where a layer had no gradient."""
        if name not in self._metrics:
            self._metrics[name] = self.run.metric(name, rows=self.rows)
        return self._metrics[name]

    @cached_property
    def _metrics(self) -> dict[str, Array]:
        return {}

    @cached_property
    def columns(self) -> dict[str, Array]:
        """Columns of the log at `rows`, [R, L] each: state, low_bits, max_abs (scaled), sum_squares (scaled)."""
        return self.run.columns(("state", "low_bits", "max_abs", "sum_squares"), rows=self.rows)

    @cached_property
    def measured(self) -> Array:
        """Whether a layer had a gradient, bool [R, L]."""
        return self.columns["state"] == MEASURED

    @cached_property
    def numel(self) -> Array:
        """Elements a layer, int64 [L]."""
        return np.array([x.numel for x in self.layers], np.int64)

    @cached_property
    def order(self) -> list[int]:
        """Layer indices in backward order; layers whose place is not known are left out."""
        index = {x.name: i for i, x in enumerate(self.layers)}
        return [index[n] for n in self.run.backward_order if n in index]

    def grid(self, bits: int) -> Array:
        """Whether every gradient of a layer, in every row, fits a mantissa that leaves `bits` of FP32's 23 clear, bool [L].

        13 for FP16, 16 for BF16. Layers that never had a non-zero gradient are False.
        """
        low = self.columns["low_bits"]
        fits = (low & ((1 << bits) - 1)) == 0
        some = self.measured & (self.columns["sum_squares"] > 0)
        return (fits | ~some).all(0) & some.any(0)

    @cached_property
    def matrices(self) -> Array:
        """Whether a layer is a weight of a matrix product as far as its shape tells, bool [L]."""
        return np.array([len(x.shape) >= 2 for x in self.layers], bool)

    @cached_property
    def half(self) -> str:
        """The half precision the forward pass ran in: "float16", "bfloat16", or "" (none seen, or not known)."""
        if self.matmuls:
            return next((k for k in ("float16", "bfloat16") if self.matmuls.get(k)), "")
        if not len(self.rows) or not self.matrices.any():
            return ""
        if self.grid(16)[self.matrices].any():
            return "bfloat16"
        return "float16" if self.grid(13)[self.matrices].any() else ""


def modules(layers: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that parameters belong to, each once, in order ("fc1.weight", "fc1.bias" → "fc1")."""
    return tuple(dict.fromkeys(n.rpartition(".")[0] or n for n in layers))


def consecutive(flags: Array) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield first, end - 1
