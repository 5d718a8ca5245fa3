"""`Run`: a recorded run, read as it grows. Every view takes one of these."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ampscope.errors import AmpscopeError, LogError
from ampscope.log.schema import SCALARS
from ampscope.log.streams import stream_files
from ampscope.record.step import NOT_SAMPLED, Event, Layer
from ampscope.run import metrics
from ampscope.run.series import Series

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Session:
    """One start of the training script."""

    index: int
    first_step: int
    """First and last recorded step; -1 where none was."""
    last_step: int
    created: float
    """Unix seconds."""
    finished: bool


class Run:
    """A recorded run.

    Steps are those of all sessions; where sessions overlap, the later one wins. `rank` selects one process of a distributed run; values
    of a step that this rank has not recorded are NaN. Reading is lazy: layer columns are read from disk when a metric is asked for.
    """

    def __init__(self, path: str | os.PathLike[str], session: int | None = None) -> None:
        """Open a run's folder (`session` restricts it to one session).

        Raises:
            LogError: there is no run there, or its log is of a newer version.
        """
        self.path = Path(path)
        self._session = session
        self._lock = threading.RLock()
        self._series: dict[tuple[int, int, int], Series] = {}
        self._merged: dict[int, tuple[Array, Array, Array]] = {}
        self._steps = np.zeros(0, np.int64)
        self._layers: list[Layer] = []
        self._errors: list[str] = []
        if not stream_files(self.path):
            raise LogError(f"{str(self.path)!r} is not a run's folder")
        self.refresh()
        if self._errors and not any(s.header for s in self._series.values()):
            raise LogError(self._errors[0])

    def __repr__(self) -> str:
        return f"<Run {self.name!r}: {len(self._steps)} steps, {len(self._layers)} layers>"

    @property
    def name(self) -> str:
        """The run's folder name."""
        return self.path.name

    def refresh(self) -> bool:
        """Read what was appended since; return whether anything changed."""
        with self._lock:
            changed = False
            self._errors = []
            for session, rank, part, path in stream_files(self.path):
                if self._session is not None and session != self._session:
                    continue
                key = (session, rank, part)
                series = self._series.get(key)
                if series is None:
                    series = self._series[key] = Series(path, session, rank, part)
                    changed = True
                try:
                    changed |= series.refresh()
                except LogError as error:
                    self._errors.append(str(error))
            if changed:
                self._merge()
            return changed

    def _merge(self) -> None:
        """Join parts and sessions: (series, position) of every step, a rank each; the later session wins."""
        self._order = sorted(self._series)
        ranks = self.ranks or [0]
        self._merged = {}
        for rank in ranks:
            steps, which, at = [], [], []
            for i, key in enumerate(self._order):
                if key[1] != rank:
                    continue
                blocks = self._series[key].all_blocks
                found = np.concatenate([b.steps for b in blocks]) if blocks else np.zeros(0, np.int64)
                steps.append(found)
                which.append(np.full(len(found), i))
                at.append(np.arange(len(found)))
            if not steps:
                continue
            all_steps, all_which, all_at = np.concatenate(steps), np.concatenate(which), np.concatenate(at)
            if len(all_steps) and (np.diff(all_steps) > 0).all():
                self._merged[rank] = (all_steps, all_which, all_at)
                continue
            _, last = np.unique(all_steps[::-1], return_index=True)
            keep = len(all_steps) - 1 - last
            self._merged[rank] = (all_steps[keep], all_which[keep], all_at[keep])
        parts = [m[0] for m in self._merged.values()]
        self._steps = parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
        self._collect_layers()

    def _collect_layers(self) -> None:
        found: dict[str, Layer] = {}
        for key in self._order:
            header = self._series[key].header
            for layer in header.layers if header else ():
                known = found.get(layer.name)
                if known is None or layer.optimizer or not known.optimizer:
                    found[layer.name] = layer
        self._layers = list(found.values())
        self._index = {layer.name: i for i, layer in enumerate(self._layers)}
        self._numel = np.array([layer.numel for layer in self._layers], np.int64)
        self._maps = []
        for key in self._order:
            header = self._series[key].header
            self._maps.append(np.array([self._index[x.name] for x in header.layers] if header else [], np.int64))

    # What is known of the run

    @property
    def layers(self) -> list[Layer]:
        """The watched parameters of all sessions and parts, in model order."""
        return list(self._layers)

    @property
    def steps(self) -> Array:
        """int64 [T], ascending."""
        return self._steps

    @property
    def ranks(self) -> list[int]:
        """Ranks that wrote this run."""
        return sorted({rank for _, rank, _ in self._series})

    @property
    def metadata(self) -> dict[str, Any]:
        """What the newest session's header says: scaler settings, versions, device, world size, watch settings."""
        for key in reversed(sorted(self._series)):
            header = self._series[key].header
            if header is not None and key[1] == self.ranks[0]:
                names = ("session", "world_size", "scaler", "versions", "device", "device_name", "gradients", "settings", "created", "pid", "host", "version")
                return {k: getattr(header, k) for k in names}
        return {}

    def session_metadata(self, session: int) -> dict[str, Any]:
        """Return the metadata of one session."""
        return self.session(session).metadata

    @property
    def finished(self) -> bool:
        """Whether the newest session was closed properly on every rank."""
        newest = max((k[0] for k in self._series), default=-1)
        last = {}
        for key in sorted(k for k in self._series if k[0] == newest):
            last[key[1]] = self._series[key]
        return bool(last) and all(s.finished for s in last.values())

    @property
    def last_seen(self) -> float:
        """Unix seconds of the last sign of life (the writer touches its files every 5 s)."""
        newest = 0.0
        for series in self._series.values():
            for path in (series.path, series.path.with_name(series.path.name.removesuffix(".arrows") + ".tail.arrows")):
                try:
                    newest = max(newest, path.stat().st_mtime)
                except OSError:
                    continue
        return newest

    @property
    def damage(self) -> list[str]:
        """What could not be read and was left out, a line each; empty for a sound log."""
        with self._lock:
            return [*self._errors, *(line for key in sorted(self._series) for line in self._series[key].damage)]

    @property
    def sessions(self) -> list[Session]:
        """The starts of the training script, in order."""
        out = []
        for index in sorted({k[0] for k in self._series}):
            mine = [self._series[k] for k in sorted(self._series) if k[0] == index]
            steps = [b.steps for s in mine for b in s.all_blocks if len(b.steps)]
            header = next((s.header for s in mine if s.header), None)
            first = min((int(s[0]) for s in steps), default=-1)
            last = max((int(s[-1]) for s in steps), default=-1)
            out.append(Session(index, first, last, header.created if header else 0.0, mine[-1].finished))
        return out

    def session(self, index: int) -> Run:
        """Return one session of the run, whole.

        Raises:
            AmpscopeError: there is no such session.
        """
        known = sorted({k[0] for k in self._series})
        if index not in known:
            raise AmpscopeError(f"run {self.name!r} has no session {index}; it has {', '.join(map(str, known))}")
        return Run(self.path, session=index)

    # Numbers

    @property
    def scalars(self) -> list[str]:
        """Names of all scalars: those of every run, then what `.log()` added and what was observed beside."""
        extra = {name for s in self._series.values() for b in s.all_blocks for name in b.extra}
        return [*SCALARS, *sorted(extra)]

    def scalar(self, name: str, rank: int | None = None) -> Array:
        """Return a scalar, float64 [T]; NaN where it was not recorded.

        Args:
            name: a name in `scalars`.
            rank: which process; default the lowest.

        Raises:
            AmpscopeError: no such scalar or rank.
        """
        with self._lock:
            if name not in SCALARS and name not in self.scalars:
                raise AmpscopeError(f"no scalar {name!r} in run {self.name!r}; there are {', '.join(self.scalars)}")
            out = np.full(len(self._steps), np.nan)
            at, which, positions = self._rows(rank)
            for i, key in enumerate(self._order):
                mine = which == i
                if not mine.any():
                    continue
                blocks = self._series[key].all_blocks
                if name in SCALARS:
                    values = np.concatenate([b.scalars[name] for b in blocks])
                else:
                    values = np.full(sum(len(b.rows) for b in blocks), np.nan)
                    start = 0
                    for block in blocks:
                        if name in block.extra:
                            where, found = block.extra[name]
                            values[start + where] = found
                        start += len(block.rows)
                out[at[mine]] = values[positions[mine]]
            return out

    def _rows(self, rank: int | None) -> tuple[Array, Array, Array]:
        """Return (position in `steps`, series, position in series) of every row of a rank."""
        chosen = self._check_rank(rank)
        if chosen not in self._merged:
            empty = np.zeros(0, np.int64)
            return empty, empty, empty
        steps, which, at = self._merged[chosen]
        place = np.arange(len(steps)) if len(steps) == len(self._steps) else np.searchsorted(self._steps, steps)
        return place, which, at

    def _check_rank(self, rank: int | None) -> int:
        ranks = self.ranks or [0]
        if rank is None:
            return ranks[0]
        if rank not in ranks:
            if rank == 0:
                return ranks[0]
            raise AmpscopeError(f"run {self.name!r} has no rank {rank}; it has {', '.join(map(str, ranks))}")
        return rank

    @property
    def metrics(self) -> list[str]:
        """Names of the layer metrics."""
        return list(metrics.METRICS)

    def metric(self, name: str, rank: int | None = None, rows: slice | Array | None = None) -> Array:
        """Return a layer metric, float32 [T, L]; NaN where the layer had no gradient or was not sampled.

        Args:
            name: a name in `metrics`.
            rank: which process; default the lowest.
            rows: positions in `steps` (ascending) or a slice of them; default all. Only their batches are read.

        Raises:
            AmpscopeError: no such metric or rank.
        """
        if name not in metrics.METRICS:
            raise AmpscopeError(f"no metric {name!r}; there are {', '.join(metrics.METRICS)}")
        with self._lock:
            columns = self.columns(metrics.columns_of(name), rank, rows)
            scale = self.scalar("loss_scale", rank)
            scale = scale if rows is None else scale[rows]
            return metrics.compute(name, columns, scale, self._numel)

    def columns(self, names: Sequence[str], rank: int | None = None, rows: slice | Array | None = None) -> dict[str, Array]:
        """Return columns of the log (docs/log-format.md), [T, L] each; zeros (lists: NaN) where nothing was recorded."""
        with self._lock:
            wanted = np.arange(len(self._steps))
            if rows is not None:
                wanted = wanted[rows]
            n = len(self._layers)
            out: dict[str, Array] = {}
            place, which, positions = self._rows(rank)
            inside = np.full(len(self._steps), -1, np.int64)
            inside[wanted] = np.arange(len(wanted))
            for i, key in enumerate(self._order):
                mine = np.flatnonzero((which == i) & (inside[place] >= 0))
                if not len(mine):
                    continue
                order = mine[np.argsort(positions[mine])]
                got = self._series[key].columns(names, positions[order])
                for name, values in got.items():
                    if name not in out:
                        fill = np.nan if values.dtype.kind == "f" and name in ("weight_norm", "probed_flushed") else 0
                        out[name] = np.full((len(wanted), n), fill, values.dtype)
                    if len(self._maps[i]):
                        out[name][inside[place[order]][:, None], self._maps[i][None, :]] = values
            for name in names:
                out.setdefault(name, np.zeros((len(wanted), n)))
            return out

    @property
    def sampled(self) -> Array:
        """bool [T, L]: whether the layer was looked at in that step (rank 0)."""
        return self.columns(("state",))["state"] != NOT_SAMPLED

    def exponents(self, layer: str | int | Layer, rank: int | None = None) -> tuple[Array, Array]:
        """Return (steps int64 [H], counts int64 [H, 256]): finite non-zero |g_s| by biased FP32 exponent (2^k at index k + 127).

        Raises:
            AmpscopeError: no such layer.
        """
        steps, counts, _ = self._histograms(layer, rank)
        return steps, counts

    def exact_powers(self, layer: str | int | Layer, rank: int | None = None) -> tuple[Array, Array]:
        """Return (steps int64 [H], counts int64 [H, 256]): those elements of `exponents` that are exactly 2^k."""
        steps, _, exact = self._histograms(layer, rank)
        return steps, exact

    def _histograms(self, layer: str | int | Layer, rank: int | None) -> tuple[Array, Array, Array]:
        with self._lock:
            index = self.layer_index(layer)
            place, which, positions = self._rows(rank)
            steps, counts, exact = [], [], []
            for i, key in enumerate(self._order):
                local = np.flatnonzero(self._maps[i] == index)
                mine = which == i
                if not len(local) or not mine.any():
                    continue
                at, c, e = self._series[key].histograms(int(local[0]))
                table = np.full(int(positions[mine].max()) + 1, -1, np.int64)
                table[positions[mine]] = place[mine]
                ok = at < len(table)
                ok[ok] = table[at[ok]] >= 0
                steps.append(self._steps[table[at[ok]]])
                counts.append(c[ok])
                exact.append(e[ok])
            if not steps:
                empty = np.zeros((0, 256), np.int64)
                return np.zeros(0, np.int64), empty, empty
            s, c, e = np.concatenate(steps), np.concatenate(counts), np.concatenate(exact)
            order = np.argsort(s, kind="stable")
            return s[order], c[order], e[order]

    def layer_index(self, layer: str | int | Layer) -> int:
        """Return the index of a layer given by name, index or `Layer`.

        Raises:
            AmpscopeError: no such layer.
        """
        if isinstance(layer, Layer):
            layer = layer.name
        if isinstance(layer, str):
            if layer in self._index:
                return self._index[layer]
        elif 0 <= int(layer) < len(self._layers):
            return int(layer)
        raise AmpscopeError(f"no layer {layer!r} in run {self.name!r}")

    @property
    def events(self) -> list[Event]:
        """Everything that happened, by step; of overlapping sessions only what the later one says."""
        with self._lock:
            first: dict[int, int] = {}
            for session in self.sessions:
                if session.first_step >= 0:
                    first[session.index] = session.first_step
            out = []
            for key in self._order:
                cut = min((f for s, f in first.items() if s > key[0]), default=None)
                for block in self._series[key].all_blocks:
                    out += [e for _, e in block.events if cut is None or e.step < cut]
            return sorted(out, key=lambda e: (e.step, e.rank))

    @property
    def backward_order(self) -> list[str]:
        """Layer names in the order backward reaches them, as learned in the first steps; [] if it was not."""
        for event in reversed(self.events):
            if event.data.get("topic") == "backward_order":
                return [str(x) for x in event.data.get("layers", event.layers)]
        return []

    # Whole tables

    def to_arrow(self, metrics: Sequence[str] = (), rank: int | None = None) -> pa.Table:
        """Return one row a step: `step`, every scalar, and for each of `metrics` a column `METRIC/LAYER` a layer."""
        with self._lock:
            data: dict[str, Any] = {"step": self._steps}
            data |= {name: self.scalar(name, rank) for name in self.scalars}
            for metric in metrics:
                values = self.metric(metric, rank)
                data |= {f"{metric}/{layer.name}": values[:, i] for i, layer in enumerate(self._layers)}
            return pa.table(data)

    def to_pandas(self, metrics: Sequence[str] = (), rank: int | None = None) -> Any:
        """Return `to_arrow` as a pandas DataFrame indexed by step.

        Raises:
            AmpscopeError: pandas is not installed.
        """
        try:
            import pandas  # noqa: F401, ICN001
        except ImportError:
            raise AmpscopeError("to_pandas() needs pandas: pip install pandas") from None
        return self.to_arrow(metrics, rank).to_pandas().set_index("step")
