"""What the rules look at: a run's scalars and events, gathered once."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ampscope.analysis.finding import Finding
from ampscope.record.step import Event
from ampscope.run.run import Run

Array = np.ndarray[Any, Any]
MAX_ROWS = 1200
"""Steps of layer metrics a rule reads at most: the first and last hundreds, and an even sample between."""


def finding(
    rule: str, severity: str, title: str, phase: str = "none", layers: tuple[str, ...] = (), op: str = "", where: str = "",
    steps: tuple[int, int, int] = (0, 0, 0), evidence: str = "", remedy: str = "",
) -> Finding:  # fmt: skip
    """Return a finding whose evidence is a sentence that quotes steps and numbers of the run."""
    return Finding(rule, severity, title, phase, layers, op, where, steps, {"summary": evidence}, remedy)  # type: ignore[arg-type]


def span(steps: Iterable[int]) -> tuple[int, int, int]:
    """Return (first, last, count)."""
    found = [int(s) for s in steps]
    return (min(found), max(found), len(found)) if found else (0, 0, 0)


def power(x: float) -> str:
    """Return a scale as "2^k" where it is a power of two."""
    if x > 0 and np.isfinite(x):
        k = float(np.log2(x))
        if k == round(k):
            return f"2^{round(k)}"
    return f"{x:.4g}"


def listing(steps: Iterable[Any], most: int = 6) -> str:
    """Return steps for people: "2, 3, 6, … (9 in all)"."""
    found = [s if isinstance(s, str) else int(s) for s in steps]
    text = ", ".join(map(str, found[:most]))
    return text if len(found) <= most else f"{text}, … ({len(found)} in all)"


def modules(layers: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that own parameters, in order."""
    return tuple(dict.fromkeys(n.rpartition(".")[0] or n for n in layers))


@dataclass(frozen=True)
class Usage:
    """One kind of note of the usage observer: when, with what."""

    events: tuple[Event, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.events)

    @property
    def data(self) -> Mapping[str, Any]:
        """Return the first note's data."""
        return self.events[0].data if self.events else {}


class Facts:
    """A run as the rules see it (rank 0 unless said)."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.steps = run.steps
        self.n = len(self.steps)
        self.scale = run.scalar("loss_scale")
        self.loss = run.scalar("loss")
        self.skipped = run.scalar("skipped") > 0
        self.tracker = run.scalar("growth_tracker")
        self.lr = run.scalar("lr")
        self.bad_layers = np.nan_to_num(run.scalar("nonfinite_layers"))
        self.events = run.events
        self.enabled = bool(run.metadata.get("scaler", {}).get("enabled", False))
        self.names = [layer.name for layer in run.layers]
        self._metrics: dict[str, Array] = {}

    @cached_property
    def by_topic(self) -> dict[str, list[Event]]:
        """Events by `data["topic"]`."""
        out: dict[str, list[Event]] = {}
        for e in self.events:
            out.setdefault(str(e.data.get("topic", "")), []).append(e)
        return out

    def _traced(self, role: str) -> list[Event]:
        return [e for e in self.by_topic.get("trace", []) if e.data.get("role") == role]

    @cached_property
    def roots(self) -> list[Event]:
        """Traced births that a non-finite loss or gradient goes back to."""
        return self._traced("root")

    @cached_property
    def hidden(self) -> list[Event]:
        """Traced births that were healed before the loss."""
        return self._traced("hidden")

    @cached_property
    def evaluations(self) -> list[Event]:
        """Traced births in evaluation forwards."""
        return self._traced("eval")

    @cached_property
    def inputs(self) -> list[Event]:
        """Non-finite model inputs."""
        return self.by_topic.get("input", [])

    @cached_property
    def buffers(self) -> list[Event]:
        """Poisoned buffers."""
        return self.by_topic.get("buffers", [])

    @cached_property
    def audits(self) -> list[Event]:
        """Audits."""
        return self.by_topic.get("audit", [])

    @cached_property
    def culprits(self) -> dict[int, Event]:
        """Step → what the free record says of its non-finite gradients or loss."""
        return {e.step: e for e in self.by_topic.get("gradients", [])}

    def usage(self, what: str) -> Usage:
        """Return the notes of one kind."""
        return Usage(tuple(e for e in self.by_topic.get("usage", []) if e.data.get("what") == what))

    def observed(self, name: str) -> Array:
        """Return an observed number, float64 [T], 0 where it was not."""
        if name not in self.run.scalars:
            return np.zeros(self.n)
        return np.nan_to_num(self.run.scalar(name))

    def observed_like(self, prefix: str) -> dict[str, Array]:
        """Return every observed number whose name begins with `prefix`, by the rest of the name."""
        return {s.removeprefix(prefix): self.observed(s) for s in self.run.scalars if s.startswith(prefix)}

    @cached_property
    def rows(self) -> Array:
        """Positions of the steps whose layer metrics are read."""
        if self.n <= MAX_ROWS:
            return np.arange(self.n)
        third = MAX_ROWS // 3
        middle = np.linspace(third, self.n - third - 1, MAX_ROWS - 2 * third).astype(np.int64)
        return np.unique(np.concatenate([np.arange(third), middle, np.arange(self.n - third, self.n)]))

    def metric(self, name: str) -> Array:
        """Return a layer metric over `rows`, float64 [R, L]."""
        if name not in self._metrics:
            self._metrics[name] = self.run.metric(name, rows=self.rows).astype(np.float64)
        return self._metrics[name]

    def typical(self, name: str) -> Array:
        """Return a metric's median a layer over unskipped steps, float64 [L]; NaN where it was never measured."""
        values = self.metric(name)[~self.skipped[self.rows]]
        if not len(values) or not values.shape[1]:
            return np.full(len(self.names), np.nan)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)  # a layer that is NaN throughout
            return np.asarray(np.nanmedian(values, axis=0))

    @cached_property
    def skipped_steps(self) -> list[int]:
        """Steps that were skipped."""
        return [int(s) for s in self.steps[self.skipped]]

    @cached_property
    def leading(self) -> int:
        """How many steps at the start of the run were skipped without a break."""
        good = np.flatnonzero(~self.skipped)
        return int(good[0]) if len(good) else self.n

    @cached_property
    def loss_bad(self) -> Array:
        """bool [T]: the loss was back-propagated and was not finite."""
        known = self.run.scalar("micro_steps") > 0
        return known & ~np.isfinite(self.loss)

    @cached_property
    def lost_loss_steps(self) -> list[int]:
        """Steps with a non-finite loss."""
        return [int(s) for s in self.steps[self.loss_bad]]

    @cached_property
    def matmuls(self) -> Counter[str]:
        """Matrix products seen by the audits, by dtype."""
        total: Counter[str] = Counter()
        for e in self.audits:
            total.update({str(k): int(v) for k, v in e.data.get("matmuls", {}).items()})
        return total

    @cached_property
    def dtype_of_gradients(self) -> str:
        """The dtype that the low mantissa bits of weight matrices' gradients tell: "float16", "bfloat16", "float32", or "" if nothing does."""
        if not self.n:
            return ""
        rows = self.rows[: min(len(self.rows), 50)]
        columns = self.run.columns(("state", "low_bits"), rows=rows)
        matrices = [i for i, layer in enumerate(self.run.layers) if len(layer.shape) >= 2 and layer.dtype == "float32"]
        single = (self.run.scalar("micro_steps")[rows] <= 1)[:, None]
        on = (columns["state"][:, matrices] == 2) & single
        bits = columns["low_bits"][:, matrices][on].astype(np.int64)
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
    def unfinished_skips(self) -> bool:
        """Whether the run ends in skips: it never found a scale, or lost it."""
        return self.n > 0 and bool(self.skipped[-1])

    @cached_property
    def settled(self) -> bool:
        """Whether training ran on after its skips."""
        return self.n > 0 and not self.unfinished_skips and int((~self.skipped).sum()) >= max(2, int(self.skipped.sum()) // 4)
