"""One run as the dashboard reads it: refreshed as it grows, with summaries that answer any zoom quickly.

Every method may be called from any thread; the lock is held only while something is looked up or taken in.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ampscope.record.step import MEASURED, NO_GRADIENT, Event, Layer
from ampscope.run import metrics as derived
from ampscope.run.run import Run

from .decimate import POINTS, bucket_edges, window
from .pyramid import BLOCK, LinePyramid, TablePyramid, reduce_rows

Array = np.ndarray[Any, Any]
T = TypeVar("T")

CHUNK = 64 * BLOCK
"""Rows read at a time by a scan: about four batches."""
RAW_ROWS = 16_384
"""Windows up to this many rows are read from the log itself, longer ones from the summaries."""
SMALL = 1_500_000
"""Cells (rows × layers) up to which a summary is made at once rather than in the background: about 0.3 s."""
LAG = 1024
"""Rows of a distributed run that may still be filled in by a slower rank, and are not summarised yet."""

WAS_MEASURED, HAD_NO_GRADIENT, WAS_NONFINITE = 1, 2, 4
"""Bits of the flags a cell of a heatmap has."""

FAMILIES: dict[str, tuple[str, ...]] = {
    "flags": ("nonfinite_count",),
    "underflow": ("underflow_ratio", "underflow_ratio_low", "underflow_ratio_high", "underflow_ratio_unscaled"),
    "norm": ("grad_norm",),
    "max": ("grad_max", "headroom_bits"),
    "zeros": ("zero_ratio",),
    "subnormal": ("subnormal_ratio",),
    "measured": ("underflow_ratio_measured",),
    "weights": ("weight_norm",),
}
"""Metrics that are read together, because they need the same columns."""
FAMILY = {metric: family for family, names in FAMILIES.items() for metric in names}
BANDS = ("underflow_ratio_low", "underflow_ratio_high", "underflow_ratio_measured")
"""Layer metrics that are also wanted over all elements, a value a step."""


@dataclass(frozen=True)
class Window:
    """A metric of all layers over a range of steps, in at most so many columns.

    `edges`: int64 [C + 1] steps, column i holds steps edges[i] <= step < edges[i + 1]. `low`, `high`: float32 [C, L] least
    and greatest value (NaN: none). `flags`: uint8 [C, L]. `done`: share of the rows read so far, 0..1. `raw`: a column a row.
    """

    edges: Array
    low: Array
    high: Array
    flags: Array
    done: float
    raw: bool


class _Family:
    """Progress of one family of metrics of one rank."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.tables = {name: TablePyramid() for name in names}
        self.bands: dict[str, list[Array]] = {name: [] for name in names if name in BANDS}
        self.rows = 0


class Source:
    """A run with its summaries. `ask_scan` is called with (source, family, rank) when a summary should be made in the background."""

    def __init__(self, key: str, run: Run, ask_scan: Callable[[Source, str, int], None] | None = None) -> None:
        self.key, self.run = key, run
        self.revision = 0
        """Grows with every change of the run."""
        self.notes = 0
        """Grows when something beside the log changed what a viewer would see: a summary was finished, a diagnosis made."""
        self._ask_scan = ask_scan
        self._lock = threading.RLock()
        self._clear()

    def _clear(self) -> None:
        self._values: dict[tuple[int, str], Array] = {}
        self._lines: dict[tuple[int, str], LinePyramid] = {}
        self._families: dict[tuple[int, str], _Family] = {}
        self._cache: OrderedDict[Any, Any] = OrderedDict()
        self._seen_rows, self._seen_step, self._seen_sessions = 0, -1, 0
        self.generation = getattr(self, "generation", -1) + 1
        self._note_shape()

    def _note_shape(self) -> None:
        steps = self.run.steps
        self._seen_rows, self._seen_step = len(steps), int(steps[-1]) if len(steps) else -1
        self._seen_sessions, self._seen_layers = len(self.run.sessions), len(self.run.layers)

    def refresh(self) -> bool:
        """Read what was appended; return whether anything changed."""
        with self._lock:
            if not self.run.refresh():
                return False
            steps, old = self.run.steps, self._seen_rows
            grown = len(steps) >= old and (old == 0 or steps[old - 1] == self._seen_step)
            if grown and self._seen_sessions == len(self.run.sessions) and self._seen_layers == len(self.run.layers):
                self._note_shape()
                self._values.clear()
                self._cache.clear()
            else:  # a later session took over steps, or layers were added: every row may have changed
                self._clear()
            self.revision += 1
            return True

    def note(self) -> None:
        """Tell viewers at their next tick that there is more to see, although no row came."""
        with self._lock:
            self.notes += 1
            self._cache.clear()

    @property
    def stamp(self) -> list[int]:
        """What changes whenever a viewer would see something else."""
        return [self.generation, self.revision, self.notes]

    def cached(self, what: Any, make: Callable[[], T]) -> T:
        """Return `make()`, remembered under `what` until the run changes (ten viewers ask for the same)."""
        with self._lock:
            key = (self.revision, what)
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]  # type: ignore[no-any-return]  # one kind of value a key
        made = make()
        with self._lock:
            self._cache[key] = made
            while len(self._cache) > 64:
                self._cache.popitem(last=False)
        return made

    # Scalars

    @property
    def steps(self) -> Array:
        """int64 [T]."""
        return self.run.steps

    @property
    def layers(self) -> list[Layer]:
        """The watched parameters."""
        return self.cached("layers", lambda: self.run.layers)

    @property
    def events(self) -> list[Event]:
        """Everything that happened, by step."""
        return self.cached("events", lambda: self.run.events)

    def values(self, name: str, rank: int) -> Array:
        """Return a scalar (or one of `BANDS` over all elements), float64 [T]."""
        with self._lock:
            known = self._values.get((rank, name))
            n = len(self.run.steps)
            if known is None or len(known) != n:
                known = self._band(name, rank) if name in BANDS else self.run.scalar(name, rank)
                self._values[rank, name] = known
            return known

    def line(
        self, name: str, rank: int, low: float | None, high: float | None, points: int = POINTS
    ) -> tuple[Array, Array]:
        """Return (steps, values) to draw of a scalar within [low, high]: all extremes and gaps, about `points` of them."""
        with self._lock:
            values, steps = self.values(name, rank), self.run.steps
            pyramid = self._lines.get((rank, name))
            if pyramid is None or name in BANDS:  # bands change behind the front of the scan
                pyramid = self._lines[rank, name] = LinePyramid()
            pyramid.extend(values, self._settled(len(values)))
            part = window(steps, low, high)
            rows = pyramid.pick(values, part.start, part.stop, points)
            return steps[rows], values[rows]

    def _settled(self, rows: int) -> int:
        return max(0, rows - (LAG if len(self.run.ranks) > 1 else 0))

    # Layers

    def ensure(self, family: str, rank: int) -> float:
        """Make the summary of a family, at once if it is little work, else in the background; return the share done, 0..1."""
        settled = self._settled(len(self.run.steps)) // BLOCK * BLOCK
        with self._lock:
            state = self._families.setdefault((rank, family), _Family(FAMILIES[family]))
            missing = settled - state.rows
        if missing <= 0:
            return 1.0
        if missing * max(1, len(self.run.layers)) > SMALL and self._ask_scan is not None:
            self._ask_scan(self, family, rank)
        else:
            while self.scan_chunk(family, rank):
                pass
        return state.rows / settled if settled else 1.0

    def scan_chunk(self, family: str, rank: int) -> bool:
        """Take the next rows into a family's summary; return whether there are more."""
        with self._lock:
            generation = self.generation
            state = self._families.setdefault((rank, family), _Family(FAMILIES[family]))
            start = state.rows
            stop = min(start + CHUNK, self._settled(len(self.run.steps)) // BLOCK * BLOCK)
        if stop <= start:
            return False
        tables = self._read(family, rank, slice(start, stop))
        with self._lock:
            if generation != self.generation or state.rows != start:
                return True
            for name, pyramid in state.tables.items():
                pyramid.extend(tables[name])
            if family == "flags":
                state.tables.setdefault("flags", TablePyramid()).extend(tables["flags"])
            for name, parts in state.bands.items():
                parts.append(self._over_elements(tables[name]))
                self._values.pop((rank, name), None)
            state.rows = stop
            return stop < self._settled(len(self.run.steps)) // BLOCK * BLOCK

    def _read(self, family: str, rank: int, rows: slice) -> dict[str, Array]:
        """Read a family's metrics of some rows, float32 [n, L] each; with "flags" also the flags, uint8 [n, L]."""
        names = FAMILIES[family]
        if rows.stop <= rows.start:
            empty = {name: np.zeros((0, len(self.layers)), np.float32) for name in names}
            return empty | ({"flags": np.zeros((0, len(self.layers)), np.uint8)} if family == "flags" else {})
        needed = tuple(dict.fromkeys(c for name in names for c in derived.columns_of(name)))
        columns = self.run.columns(needed, rank, rows)
        scale = self.values("loss_scale", rank)[rows]
        numel = np.array([layer.numel for layer in self.layers], np.int64)
        out = {name: derived.compute(name, columns, scale, numel) for name in names}
        if family == "flags":
            state = columns["state"]
            flags = (state == MEASURED) * np.uint8(WAS_MEASURED) + (state == NO_GRADIENT) * np.uint8(HAD_NO_GRADIENT)
            out["flags"] = (flags + (out["nonfinite_count"] > 0) * np.uint8(WAS_NONFINITE)).astype(np.uint8)
        return out

    def _over_elements(self, table: Array) -> Array:
        """Return the mean of a share over all elements that have one, float64 [n]."""
        numel = np.array([layer.numel for layer in self.layers], np.float64)
        known = np.isfinite(table)
        weight = known @ numel
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.where(known, table, 0.0) @ numel / weight)

    def _band(self, name: str, rank: int) -> Array:
        """Return one of `BANDS` over all elements, float64 [T]; NaN where the scan has not been yet."""
        family = FAMILY[name]
        self.ensure(family, rank)
        state = self._families[rank, family]
        n = len(self.run.steps)
        out = np.full(n, np.nan)
        done = np.concatenate([np.zeros(0), *state.bands[name]])
        out[: len(done)] = done
        if n - len(done) <= CHUNK and n > len(done):
            out[len(done) :] = self._over_elements(self._read(family, rank, slice(len(done), n))[name])
        return out

    def table(self, metric: str, rank: int, low: float | None, high: float | None, columns: int) -> Window:
        """Return a layer metric over the steps in [low, high] (None: no end), in at most `columns` columns."""
        steps = self.run.steps
        part = window(steps, low, high)
        if low is not None and part.start < part.stop and steps[part.start] < low:
            part = slice(part.start + 1, part.stop)
        if high is not None and part.start < part.stop and steps[part.stop - 1] > high:
            part = slice(part.start, part.stop - 1)
        n = part.stop - part.start
        if n <= RAW_ROWS:
            low_table = high_table = self._rows(FAMILY[metric], metric, rank, part)
            flags = self._rows("flags", "flags", rank, part)
            at, done = np.arange(part.start, part.stop), 1.0
        else:
            at, low_table, high_table, flags, done = self._blocks(metric, rank, part)
        starts = bucket_edges(len(at), columns)[:-1] if len(at) else np.zeros(0, np.int64)
        stop = part.stop if done >= 1 else int(at[-1]) + BLOCK if len(at) else part.start
        return Window(
            self._edges(at[starts], min(stop, part.stop)), reduce_rows(low_table, starts, True),
            reduce_rows(high_table, starts, False), reduce_rows(flags, starts, False), done, n <= RAW_ROWS and len(starts) == n,
        )  # fmt: skip

    def _blocks(self, metric: str, rank: int, part: slice) -> tuple[Array, Array, Array, Array, float]:
        """Return (first row, least, greatest, flags) of each block in a range of rows, and the share of the run read so far."""
        family = FAMILY[metric]
        done = min(self.ensure(family, rank), self.ensure("flags", rank))
        with self._lock:
            state, marks = self._families[rank, family], self._families[rank, "flags"]
            read = min(state.rows, marks.rows)
            first, last = part.start // BLOCK, max(part.start // BLOCK, min(-(-part.stop // BLOCK), read // BLOCK))
            tables = [state.tables[metric].table(True), state.tables[metric].table(False)]
            tables.append(marks.tables["flags"].table(False) if read else np.zeros((0, tables[0].shape[1]), np.uint8))
        parts = [t[first:last] for t in tables]
        at = np.arange(first, last, dtype=np.int64) * BLOCK
        if done >= 1 and read < part.stop:  # the newest rows fill no block yet
            tail = slice(max(read, part.start), part.stop)
            value, flag = self._rows(family, metric, rank, tail), self._rows("flags", "flags", rank, tail)
            starts = np.arange(0, tail.stop - tail.start, BLOCK)
            fresh = [
                reduce_rows(value, starts, True),
                reduce_rows(value, starts, False),
                reduce_rows(flag, starts, False),
            ]
            parts = [np.concatenate([p, f]) if len(p) else f for p, f in zip(parts, fresh, strict=True)]
            at = np.concatenate([at, tail.start + starts])
        return at, parts[0], parts[1], parts[2], done

    def _rows(self, family: str, name: str, rank: int, rows: slice) -> Array:
        tables = self.cached(("rows", family, rank, rows.start, rows.stop), lambda: self._read(family, rank, rows))
        return tables[name]

    def exponents(self, layer: int, rank: int, low: float | None, high: float | None) -> tuple[Array, Array]:
        """Return (steps int64 [H], counts int64 [H, 256]) of a layer's histograms within [low, high]."""
        steps, counts = self.cached(("exponents", layer, rank), lambda: self.run.exponents(layer, rank))
        start = 0 if low is None else int(np.searchsorted(steps, low, "left"))
        stop = len(steps) if high is None else int(np.searchsorted(steps, high, "right"))
        return steps[start:stop], counts[start:stop]

    def _edges(self, at: Array, stop: int) -> Array:
        """Return the steps at which columns begin, and the one after the last."""
        steps = self.run.steps
        if not len(at):
            return np.zeros(1, np.int64)
        return np.concatenate([steps[at], [steps[stop - 1] + 1]])
