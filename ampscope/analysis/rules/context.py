"""What the rules look at: a run's scalars and events, gathered once, and layer metrics of as many steps as are needed.

Arrays named here are over the run's *steps*: records in which something was scaled, stepped or skipped. A record that only holds a
call of `update(new_scale)` is none. Their length is `Facts.n`; they are of the lowest rank unless said.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ampscope.analysis.finding import Finding, Severity, digits
from ampscope.record.step import MEASURED, Event
from ampscope.run.run import Run

Array = np.ndarray[Any, Any]
MAX_ROWS = 600
"""Steps of layer metrics a rule reads at most: the first and last 200, and an even sample between."""
DTYPE_ROWS = 50
"""Steps whose mantissa bits are read to tell what gradients passed through."""
START = 2
"""Steps after a session's first one within which skips count as its start: some loops begin with a step or two that cannot overflow."""


def finding(
    rule: str,
    severity: Severity,
    title: str,
    phase: str = "none",
    *,
    layers: Sequence[str] = (),
    op: str = "",
    where: str = "",
    steps: tuple[int, int, int] = (0, 0, 0),
    evidence: str = "",
    numbers: Mapping[str, Any] | None = None,
    remedy: str = "",
) -> Finding:
    """Return a finding. `evidence` says what was seen in words, with steps and numbers of the run; `numbers` holds them by name."""
    told = {"summary": " ".join(evidence.split()), **(numbers or {})}
    return Finding(rule, severity, title, phase, tuple(layers)[:8], op, where, steps, told, " ".join(remedy.split()))


def span(steps: Iterable[int]) -> tuple[int, int, int]:
    """Return (first, last, count) of steps; (0, 0, 0) if there are none."""
    found = {int(s) for s in steps}
    return (min(found), max(found), len(found)) if found else (0, 0, 0)


def power(x: float) -> str:
    """Return a loss scale for people, as "2^k" where it is a power of two."""
    return digits(float(x))


def listing(items: Iterable[Any], most: int = 6) -> str:
    """Return steps or names for people: "2, 3, 6, … (9 in all)"."""
    found = [s if isinstance(s, str) else int(s) for s in items]
    text = ", ".join(map(str, found[:most]))
    return text if len(found) <= most else f"{text}, … ({len(found)} in all)"


def count(number: int, noun: str) -> str:
    """Return "1 step", "3 steps"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def modules(layers: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that own parameters, each once, in order."""
    return tuple(dict.fromkeys(n.rpartition(".")[0] or n for n in layers))


@dataclass(frozen=True)
class Notes:
    """The notes of one kind that the usage observers wrote down."""

    events: tuple[Event, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.events)

    @property
    def first(self) -> Event:
        """The first one."""
        return self.events[0]

    @property
    def data(self) -> Mapping[str, Any]:
        """The first one's data; {} if there is none."""
        return self.events[0].data if self.events else {}

    @property
    def where(self) -> str:
        """The user's line; "" if not known."""
        return next((e.where for e in self.events if e.where), "")


@dataclass(frozen=True)
class Block:
    """Consecutive skipped steps, as positions among the steps."""

    first: int
    last: int
    at_start: bool
    """It begins with a session."""
    after_growth: bool
    """The loss scale was raised by the step before."""
    loss_finite: bool
    """The loss was finite throughout."""

    @property
    def positions(self) -> range:
        """Positions of its steps."""
        return range(self.first, self.last + 1)

    def __len__(self) -> int:
        return self.last - self.first + 1


class Facts:
    """A run as the rules see it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._known = set(run.scalars)
        self._metrics: dict[str, Array] = {}
        micro, flags = run.scalar("micro_steps"), run.scalar("skipped") > 0
        measured = np.isfinite(run.scalar("grad_norm"))
        counted = np.isfinite(micro).any()
        self._keep = np.flatnonzero((micro > 0) | flags | measured) if counted else np.arange(len(run.steps))
        self.steps: Array = run.steps[self._keep]
        self.n = len(self.steps)
        self.layers = run.layers
        self.names = [layer.name for layer in self.layers]
        self.scaler: Mapping[str, Any] = run.metadata.get("scaler", {})
        self.enabled = bool(self.scaler.get("enabled", False))

    # Scalars

    def scalar(self, name: str, rank: int | None = None) -> Array:
        """Return a scalar, float64 [n]; NaN where it was not recorded."""
        if name not in self._known:
            return np.full(self.n, np.nan)
        return self.run.scalar(name, rank=rank)[self._keep]

    @cached_property
    def scale(self) -> Array:
        """The loss scale gradients carried."""
        return self.scalar("loss_scale")

    @cached_property
    def loss(self) -> Array:
        """The unscaled loss."""
        return self.scalar("loss")

    @cached_property
    def skipped(self) -> Array:
        """Whether any optimizer skipped, bool [n]."""
        return self.scalar("skipped") > 0

    @cached_property
    def loss_bad(self) -> Array:
        """Whether a loss was back-propagated that was not finite, bool [n]."""
        return (self.scalar("micro_steps") > 0) & ~np.isfinite(self.loss)

    @cached_property
    def bad_layers(self) -> Array:
        """Layers with NaN or inf, float64 [n]."""
        return np.nan_to_num(self.scalar("nonfinite_layers"))

    def observed(self, name: str) -> Array:
        """Return a number the probe noted now and then, float64 [n], 0 elsewhere."""
        return np.nan_to_num(self.scalar(name))

    def observed_like(self, prefix: str) -> dict[str, Array]:
        """Return every observed number whose name begins with `prefix`, by the rest of the name; NaN where it was not noted."""
        return {s.removeprefix(prefix): self.scalar(s) for s in sorted(self._known) if s.startswith(prefix)}

    def at(self, flags: Array) -> list[int]:
        """Return the step numbers where `flags` is true."""
        return [int(s) for s in self.steps[flags]]

    def position(self, step: int) -> int:
        """Return the position of a step, or of the next one that was recorded (`n` if there is none)."""
        return int(np.searchsorted(self.steps, step))

    @cached_property
    def skipped_steps(self) -> list[int]:
        """Steps that were skipped."""
        return self.at(self.skipped)

    @cached_property
    def lost_loss_steps(self) -> list[int]:
        """Steps with a non-finite loss."""
        return self.at(self.loss_bad)

    @cached_property
    def whole(self) -> tuple[int, int, int]:
        """The span of the run."""
        return span(self.steps.tolist())

    # Skips

    @cached_property
    def blocks(self) -> list[Block]:
        """Runs of consecutive skipped steps."""
        starts = [s.first_step for s in self.run.sessions if s.first_step >= 0]
        grown = {e.step for e in self.events if e.kind == "growth"}
        out = []
        for first, last in consecutive(self.skipped):
            step = int(self.steps[first])
            at_start = any(s <= step <= s + START for s in starts)
            grew = first > 0 and int(self.steps[first - 1]) in grown
            out.append(Block(first, last, at_start, grew, not self.loss_bad[first : last + 1].any()))
        return out

    @cached_property
    def calibration(self) -> Array:
        """Skips that belong to an ordinary search for the scale, bool [n].

        They begin a session or follow a doubling, the loss is finite, and a good step follows.
        """
        out = np.zeros(self.n, bool)
        for block in self.blocks:
            if (block.at_start or block.after_growth) and block.loss_finite and block.last < self.n - 1:
                out[block.first : block.last + 1] = True
        return out

    @cached_property
    def unfinished_skips(self) -> bool:
        """Whether the run ends in skips: it never found a scale, or lost it."""
        return self.n > 0 and bool(self.skipped[-1])

    # Events

    @cached_property
    def events(self) -> list[Event]:
        """Everything that happened, by step."""
        return self.run.events

    @cached_property
    def by_topic(self) -> dict[str, list[Event]]:
        """Events by `data["topic"]`."""
        out: dict[str, list[Event]] = {}
        for e in self.events:
            out.setdefault(str(e.data.get("topic", "")), []).append(e)
        return out

    def traced(self, role: str) -> list[Event]:
        """Return what the tracer found: "root" (what a non-finite loss or gradient goes back to), "hidden" (healed) or "eval"."""
        return [e for e in self.by_topic.get("trace", []) if e.data.get("role") == role]

    @cached_property
    def inputs(self) -> list[Event]:
        """Non-finite model inputs."""
        return self.by_topic.get("input", [])

    @cached_property
    def roots(self) -> list[Event]:
        """Traced births that a non-finite loss or gradient goes back to; steps with a bad input excepted: that is their root."""
        bad = {e.step for e in self.inputs}
        return [e for e in self.traced("root") if e.step not in bad]

    @cached_property
    def culprits(self) -> dict[int, Event]:
        """Step → what the free record says of its non-finite gradients or loss."""
        return {e.step: e for e in self.by_topic.get("gradients", [])}

    def usage(self, what: str) -> Notes:
        """Return the notes of one kind of the usage observers."""
        return Notes(tuple(e for e in self.by_topic.get("usage", []) if e.data.get("what") == what))

    def raised(self, text: str, call: str = "") -> Event | None:
        """Return the first error of GradScaler's that contains `text`."""
        for e in self.usage("raised").events:
            if text in str(e.data.get("text")) and call in ("", e.data.get("call")):
                return e
        return None

    @cached_property
    def audits(self) -> list[Event]:
        """Audits of healthy steps."""
        return self.by_topic.get("audit", [])

    @cached_property
    def matmuls(self) -> Counter[str]:
        """Matrix products seen by the audits, by dtype."""
        total: Counter[str] = Counter()
        for e in self.audits:
            total.update({str(k): int(v) for k, v in dict(e.data.get("matmuls") or {}).items()})
        return total

    # Layers

    @cached_property
    def rows(self) -> Array:
        """Positions among the steps whose layer metrics are read."""
        if self.n <= MAX_ROWS:
            return np.arange(self.n)
        third = MAX_ROWS // 3
        middle = np.linspace(third, self.n - third - 1, MAX_ROWS - 2 * third).astype(np.int64)
        return np.unique(np.concatenate([np.arange(third), middle, np.arange(self.n - third, self.n)]))

    def metric(self, name: str) -> Array:
        """Return a layer metric over `rows`, float64 [R, L]; NaN where a layer had no gradient."""
        if name not in self._metrics:
            self._metrics[name] = self.run.metric(name, rows=self._keep[self.rows]).astype(np.float64)
        return self._metrics[name]

    def typical(self, name: str) -> Array:
        """Return a metric's median a layer over steps that were not skipped, float64 [L]; NaN where it was never measured."""
        values = self.metric(name)[~self.skipped[self.rows]]
        if not len(values) or not values.shape[1]:
            return np.full(len(self.names), np.nan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a layer that is NaN throughout
            return np.asarray(np.nanmedian(values, axis=0))

    @cached_property
    def order(self) -> list[int]:
        """Layer indices in backward order; layers whose place is not known are left out."""
        index = {name: i for i, name in enumerate(self.names)}
        return [index[n] for n in self.run.backward_order if n in index]

    def owned(self, optimizer: str) -> list[str]:
        """Return the names of an optimizer's layers."""
        return [layer.name for layer in self.layers if layer.optimizer == optimizer]

    # Precision

    @cached_property
    def dtype_of_gradients(self) -> str:
        """What the mantissa bits of weight matrices' gradients say: "float16", "bfloat16" or "float32"; "" if nothing is known.

        Only steps of one backward count: sums of FP16 gradients are FP32-born.
        """
        matrices = [i for i, x in enumerate(self.layers) if len(x.shape) >= 2 and x.dtype == "float32"]
        micro = self.scalar("micro_steps")
        rows = np.flatnonzero((micro <= 1) | np.isnan(micro))[:DTYPE_ROWS]
        if not len(rows) or not matrices:
            return ""
        columns = self.run.columns(("state", "low_bits"), rows=self._keep[rows])
        bits = columns["low_bits"][:, matrices][columns["state"][:, matrices] == MEASURED].astype(np.int64)
        bits = bits[bits > 0]
        if not len(bits):
            return ""
        if np.mean((bits & 0xFFFF) == 0) > 0.5:
            return "bfloat16"
        return "float16" if np.mean((bits & 0x1FFF) == 0) > 0.5 else "float32"

    @cached_property
    def fp16(self) -> bool:
        """Whether any of the training runs in FP16."""
        if self.matmuls:
            return self.matmuls.get("float16", 0) > 0
        return self.dtype_of_gradients == "float16"

    @cached_property
    def headroom(self) -> float:
        """Doublings of the scale that 95 % of the good steps would have survived; NaN if it is not known."""
        values = self.scalar("headroom_bits")[~self.skipped]
        values = values[np.isfinite(values)]
        return float(np.quantile(values, 0.05)) if len(values) else float("nan")


def consecutive(flags: Array) -> list[tuple[int, int]]:
    """Return (first, last) of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]
