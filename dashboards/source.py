"""One run as the dashboard reads it: refreshed as it grows, with summaries that answer any zoom quickly.

Every method may be called from any thread; the lock is held only while something is looked up or taken in.

Long because everything in it is behind that one lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ampscope.record.step import MEASURED, NO_GRADIENT, Event, Layer
from ampscope.run.run import Run

from .decimate import POINTS, bucket_edges, window
from .pyramid import BLOCK, HistogramSummary, LinePyramid, TablePyramid, reduce_rows

Array = np.ndarray[Any, Any]
T = TypeVar("T")

CHUNK = 32 * BLOCK
"""Rows read at a time by a scan: about one batch, so that viewers wait for it no longer than some 50 ms."""
RAW_CELLS = 400_000
"""Windows of up to this many cells (rows × layers) are read from the log itself, longer ones from the summaries."""
SMALL = 1_500_000
"""Cells up to which a summary is made at once rather than in the background: about 0.3 s."""
RAW_HISTOGRAM_ROWS = 32_768
"""Windows of up to this many rows show every histogram of a layer, read from the log; longer ones those of a summary."""
SAMPLED = 64
"""Histograms shown of a long run while their summary is being made: each may lie in another batch."""
HISTOGRAM_CELLS = 8_000
"""Histograms × layers read at a time: 16 MB, some 80 ms."""
HISTOGRAMS = "histograms"
"""The name of that summary, beside those of `FAMILIES`."""
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


@dataclass(frozen=True)
class Histograms:
    """Histograms of one layer: first step of each [H], how many are joined in each [H], counts int64 [H, 256].

    They rest on `read` of `of` histograms recorded in the range.
    """

    steps: Array
    many: Array
    counts: Array
    read: int
    of: int


class Grown:
    """An array that grows at its end, in place where there is room."""

    def __init__(self) -> None:
        self._room = np.zeros(0)
        self.n = 0
        self.revision = -1

    @property
    def values(self) -> Array:
        """float64 [n]; read only."""
        found = self._room[: self.n]
        found.setflags(write=False)
        return found

    def put(self, start: int, values: Array, revision: int) -> None:
        """Put values at `start` and end there."""
        n = start + len(values)
        if n > len(self._room):
            room = np.empty(n + n // 8)
            room[:start] = self._room[:start]
            self._room = room
        self._room[start:n] = values
        self.n, self.revision = n, revision


class _Family:
    """Progress of one family of metrics of one rank."""

    def __init__(self, family: str) -> None:
        names = FAMILIES[family]
        self.tables = {name: TablePyramid() for name in (*names, *(("flags",) if family == "flags" else ()))}
        self.bands = {name: Grown() for name in names if name in BANDS}
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
        self._lines: dict[tuple[int, str], LinePyramid] = {}
        self._families: dict[tuple[int, str], _Family] = {}
        self._scalars: dict[tuple[int, str], Grown] = {}
        self._kept: dict[Any, tuple[Any, Any]] = {}
        self._summed: dict[int, HistogramSummary] = {}
        self._cache: OrderedDict[Any, Any] = OrderedDict()
        self._seen_rows, self._seen_step, self._seen_sessions = 0, -1, 0
        self.generation = getattr(self, "generation", -1) + 1
        self._note_shape()

    def _note_shape(self) -> None:
        steps = self.run.steps
        self._seen_rows, self._seen_step = len(steps), int(steps[-1]) if len(steps) else -1
        self._steps = steps  # `Run` has a lock of its own, which a scan holds while it reads
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
                self._cache.clear()
            else:  # a later session took over steps, or layers were added: every row may have changed
                self._clear()
            self.revision += 1
            return True

    def note(self, redraw: bool = True) -> None:
        """Tell viewers at their next tick that there is more to see, although no row came.

        Args:
            redraw: whether what is remembered of the curves is out of date too.
        """
        with self._lock:
            self.notes += 1
            if redraw:
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

    def kept(self, what: Any, stamp: Any, make: Callable[[], T]) -> T:
        """Return `make()`, remembered under `what` until `stamp` changes: for what most new rows leave as it is."""
        with self._lock:
            found = self._kept.get(what)
        if found is None or found[0] != stamp:
            found = (stamp, make())
            with self._lock:
                self._kept[what] = found
        return found[1]

    # Scalars

    @property
    def steps(self) -> Array:
        """int64 [T]."""
        return self._steps

    @property
    def layers(self) -> list[Layer]:
        """The watched parameters."""
        return self.cached("layers", lambda: self.run.layers)

    @property
    def events(self) -> list[Event]:
        """Everything that happened, by step."""
        return self.kept("events", self.run.events_revision, lambda: self.run.events)

    def values(self, name: str, rank: int) -> Array:
        """Return a scalar (or one of `BANDS` over all elements), float64 [T]."""
        with self._lock:
            n = len(self._steps)
            if name in BANDS:
                return self._band(name, rank)
            grown = self._scalars.get((rank, name))
            if grown is None:
                grown = self._scalars[rank, name] = Grown()
            if grown.revision != self.revision:
                start = self._settled(min(grown.n, n))
                grown.put(start, self.run.scalar(name, rank, start)[: n - start], self.revision)
            return grown.values

    def line(
        self, name: str, rank: int, low: float | None, high: float | None, points: int = POINTS
    ) -> tuple[Array, Array]:
        """Return (steps, values) to draw of a scalar within [low, high]: all extremes and gaps, about `points` of them."""
        with self._lock:
            values, steps = self.values(name, rank), self._steps
            pyramid = self._lines.get((rank, name))
            if pyramid is None:
                pyramid = self._lines[rank, name] = LinePyramid()
            final = self._families[rank, FAMILY[name]].rows if name in BANDS else self._settled(len(values))
            pyramid.extend(values, final)
            part = window(steps, low, high)
            rows = pyramid.pick(values, part.start, part.stop, points)
            return steps[rows], values[rows]

    def _settled(self, rows: int) -> int:
        return max(0, rows - (LAG if len(self.run.ranks) > 1 else 0))

    # Layers

    def ensure(self, family: str, rank: int) -> float:
        """Make the summary of a family, at once if it is little work, else in the background; return the share done, 0..1."""
        settled = self._settled(len(self._steps)) // BLOCK * BLOCK
        with self._lock:
            state = self._families.setdefault((rank, family), _Family(family))
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
        if family == HISTOGRAMS:
            return self._scan_histograms(rank)
        with self._lock:
            generation = self.generation
            state = self._families.setdefault((rank, family), _Family(family))
            start = state.rows
            stop = min(start + CHUNK, self._settled(len(self._steps)) // BLOCK * BLOCK)
        if stop <= start:
            return False
        tables = self._read(family, rank, slice(start, stop))
        with self._lock:
            if generation != self.generation or state.rows != start:
                return True
            for name, pyramid in state.tables.items():
                pyramid.extend(tables[name])
            for name, band in state.bands.items():
                band.put(start, self._over_elements(tables[name]), -1)
            state.rows = stop
            return stop < self._settled(len(self._steps)) // BLOCK * BLOCK

    def _read(self, family: str, rank: int, rows: slice) -> dict[str, Array]:
        """Read a family's metrics of some rows, float32 [n, L] each; with "flags" also the flags, uint8 [n, L]."""
        names = FAMILIES[family]
        if rows.stop <= rows.start:
            empty = {name: np.zeros((0, len(self.layers)), np.float32) for name in names}
            return empty | ({"flags": np.zeros((0, len(self.layers)), np.uint8)} if family == "flags" else {})
        if family != "flags":
            return self.run.several(names, rank, rows)
        columns = self.run.columns(("state", "nan", "pos_inf", "neg_inf"), rank, rows)
        state = columns["state"]
        bad = columns["nan"] + columns["pos_inf"] + columns["neg_inf"]
        flags = (state == MEASURED) * np.uint8(WAS_MEASURED) + (state == NO_GRADIENT) * np.uint8(HAD_NO_GRADIENT)
        flags = (flags + (bad > 0) * np.uint8(WAS_NONFINITE)).astype(np.uint8)
        return {"flags": flags, "nonfinite_count": np.where(state == MEASURED, bad, np.nan).astype(np.float32)}

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
        band, n = state.bands[name], len(self._steps)
        stamp = self.revision
        if band.n != n or band.revision != stamp:
            rest = np.full(n - state.rows, np.nan)
            if 0 < len(rest) <= CHUNK:
                rest = self._over_elements(self._rows(family, name, rank, slice(state.rows, n)))
            band.put(state.rows, rest, stamp)
        return band.values

    def table(self, metric: str, rank: int, low: float | None, high: float | None, columns: int) -> Window:
        """Return a layer metric over the steps in [low, high] (None: no end), in at most `columns` columns."""
        part = self._inside(low, high)
        n = part.stop - part.start
        raw = n * max(1, len(self.layers)) <= RAW_CELLS
        if raw:
            low_table = high_table = self._rows(FAMILY[metric], metric, rank, part)
            flags = self._rows("flags", "flags", rank, part)
            at, done = np.arange(part.start, part.stop), 1.0
        else:
            at, low_table, high_table, flags, done = self._blocks(metric, rank, part)
        starts = bucket_edges(len(at), columns)[:-1] if len(at) else np.zeros(0, np.int64)
        stop = part.stop if done >= 1 else int(at[-1]) + BLOCK if len(at) else part.start
        return Window(
            self._edges(at[starts], min(stop, part.stop)), reduce_rows(low_table, starts, True),
            reduce_rows(high_table, starts, False), reduce_rows(flags, starts, False), done, raw and len(starts) == n,
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
            tables.append(marks.tables["flags"].table(False) if read else np.zeros((0, 0), np.uint8))
        n_layers = len(self.layers)
        parts = [t[first:last] if len(t) else np.zeros((0, n_layers), t.dtype) for t in tables]
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

    def _inside(self, low: float | None, high: float | None) -> slice:
        """Return the rows whose step lies in [low, high]."""
        start = 0 if low is None else int(np.searchsorted(self._steps, low, "left"))
        stop = len(self._steps) if high is None else int(np.searchsorted(self._steps, high, "right"))
        return slice(start, max(start, stop))

    def _rows(self, family: str, name: str, rank: int, rows: slice) -> Array:
        tables = self.cached(("rows", family, rank, rows.start, rows.stop), lambda: self._read(family, rank, rows))
        return tables[name]

    def layer_rows(
        self, layer: int, rank: int, low: float | None, high: float | None
    ) -> tuple[Array, dict[str, Array]] | None:
        """Return (steps [n], {metric: float32 [n]}) of one layer, every metric, read from the log; None if there is too much."""
        part = self._inside(low, high)
        if (part.stop - part.start) * max(1, len(self.layers)) > RAW_CELLS:
            return None
        names = tuple(name for family in FAMILIES.values() for name in family)
        found = self.cached(("several", rank, part.start, part.stop), lambda: self.run.several(names, rank, part))
        return self._steps[part], {name: values[:, layer] for name, values in found.items()}

    def exponents(self, layer: int, rank: int, low: float | None, high: float | None) -> Histograms:
        """Return a layer's histograms within [low, high], joined or thinned where the run is long."""
        part = self._inside(low, high)
        rows = self._histogram_rows(rank)
        inside = rows[(rows >= part.start) & (rows < part.stop)]
        if part.stop - part.start > RAW_HISTOGRAM_ROWS and len(inside) > SAMPLED:
            if self._ensure_histograms(rank) and len(inside):
                with self._lock:
                    steps = self._steps[inside[[0, -1]]]
                    first, many, counts = self._summed[rank].of(layer, float(steps[0]), float(steps[1]))
                    return Histograms(first, many, counts, len(inside), len(inside))
            inside = inside[bucket_edges(len(inside), SAMPLED)[:-1]]
        steps, counts = self.run.exponents(layer, rank, inside)
        of = int(((rows >= part.start) & (rows < part.stop)).sum())
        return Histograms(steps, np.ones(len(steps), np.int64), counts, len(inside), of)

    def _histogram_rows(self, rank: int) -> Array:
        return self.cached(("histogram rows", rank), lambda: self.run.histogram_rows(rank))

    def _ensure_histograms(self, rank: int) -> bool:
        """Make the summary of the histograms in the background; return whether it holds all but the newest."""
        with self._lock:
            have = self._summed.setdefault(rank, HistogramSummary(len(self.layers)))
        if self._settled_histograms(rank) - have.taken <= 0:
            return True
        if self._ask_scan is None:
            while self.scan_chunk(HISTOGRAMS, rank):
                pass
            return True
        self._ask_scan(self, HISTOGRAMS, rank)
        return have.taken > 0.99 * self._settled_histograms(rank)

    def _settled_histograms(self, rank: int) -> int:
        return int(np.searchsorted(self._histogram_rows(rank), self._settled(len(self._steps))))

    def _scan_histograms(self, rank: int) -> bool:
        with self._lock:
            generation = self.generation
            have = self._summed.setdefault(rank, HistogramSummary(len(self.layers)))
            start = have.taken
        end = self._settled_histograms(rank)
        each = max(1, HISTOGRAM_CELLS // max(1, len(self.layers)))
        rows = self._histogram_rows(rank)[start : min(start + each, end)]
        if not len(rows):
            return False
        counts = self.run.histograms(rows, rank)
        with self._lock:
            if generation == self.generation and have.taken == start:
                have.extend(self._steps[rows], counts)
            return have.taken < end

    def _edges(self, at: Array, stop: int) -> Array:
        """Return the steps at which columns begin, and the one after the last."""
        steps = self._steps
        if not len(at):
            return np.zeros(1, np.int64)
        return np.concatenate([steps[at], [steps[stop - 1] + 1]])
