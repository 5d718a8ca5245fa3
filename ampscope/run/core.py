"""What every reading of a run rests on: its streams found, read as they grow, and joined."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ampscope.errors import AmpscopeError, LogError
from ampscope.log.schema import SCALARS
from ampscope.log.streams import stream_files
from ampscope.record.step import Event, Layer
from ampscope.run.merge import Key, Merged, by_series, events, merge
from ampscope.run.series import DTYPES, LISTS, Series

if TYPE_CHECKING:
    from typing_extensions import Self

Array = np.ndarray[Any, Any]
LayerKey = str | int | Layer

HEADER_FIELDS = (
    "session", "rank", "world_size", "scaler", "versions", "device", "device_name", "gradients", "settings", "created",
    "pid", "host", "version",
)  # fmt: skip


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


class RunCore:
    """A recorded run's streams, joined; `Run` adds what is derived from them.

    Methods may be called from any thread.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        session: int | None = None,
        *,
        lazy: bool = False,
        kind: str = "gradients",
    ) -> None:
        """Open a run's folder.

        Args:
            path: the folder.
            session: only this session of the run.
            lazy: read the headers alone now, and rows when they are first asked for.
            kind: which of the run's streams: "gradients" or "activations".

        Raises:
            LogError: there is no run there, or its log is of a newer version.
        """
        self.path = Path(path)
        self._session, self._kind = session, kind
        self._lock = threading.RLock()
        self._series: dict[Key, Series] = {}
        self._merged: Merged | None = None
        self._events: list[Event] | None = None
        self._backward: list[str] | None = None
        self._told: Any = None
        self.events_revision = 0
        """Grows whenever `events` may have changed: most refreshes bring rows and no event."""
        self._errors: list[str] = []
        self._sizes: dict[Path, int] = {}
        self._discover()
        if not self._series:
            raise LogError(f"{str(self.path)!r} is not a run's folder")
        for series in self._series.values():
            self._attempt(series.read_header)
        if self._errors and not any(s.header for s in self._series.values()):
            raise LogError(self._errors[0])
        if lazy:
            self._sizes = self._measure()
        else:
            self.refresh()

    def __repr__(self) -> str:
        return f"<Run {self.name!r}: {len(self.steps)} steps, {len(self.layers)} layers>"

    @property
    def name(self) -> str:
        """The run's folder name."""
        return self.path.name or self.path.resolve().name

    def refresh(self) -> bool:
        """Read what was appended since; return whether anything changed."""
        with self._lock:
            first = self._merged is None
            changed = self._discover()
            self._errors = []
            for key in sorted(self._series):
                changed |= bool(self._attempt(self._series[key].refresh))
            if changed or first:
                self._merged = merge(self.ordered)
                self._merged.steps.setflags(write=False)
                told = self._event_counts()
                if told != self._told:
                    self._told, self._events, self._backward = told, None, None
                    self.events_revision += 1
            return changed if not (first and self._sizes) else self._measure() != self._sizes

    def _event_counts(self) -> Any:
        """Return what changes with the events; where sessions overlap, also with how far the later ones have come."""
        counts = [(key, self._series[key].event_count) for key in sorted(self._series)]
        several = len({key[0] for key in self._series}) > 1
        return counts, [len(self._series[key].steps) for key in sorted(self._series)] if several else []

    def _discover(self) -> bool:
        found = False
        for session, rank, part, path in stream_files(self.path, self._kind):
            key = (session, rank, part)
            if key not in self._series and self._session in (None, session):
                self._series[key] = Series(path, session, rank, part)
                found = True
        return found

    def _attempt(self, do: Any) -> Any:
        try:
            return do()
        except LogError as error:
            if str(error) not in self._errors:
                self._errors.append(str(error))
            return False

    def _measure(self) -> dict[Path, int]:
        found = {path: _stat(path) for series in self._series.values() for path in series.files}
        return {path: stat.st_size for path, stat in found.items() if stat is not None}

    @property
    def ordered(self) -> list[Series]:
        """The streams by session, rank and part."""
        return [self._series[key] for key in sorted(self._series)]

    @property
    def now(self) -> Merged:
        """What is known; reads the rows if nobody has yet."""
        with self._lock:
            if self._merged is None:
                self.refresh()
            assert self._merged is not None
            return self._merged

    # What is known of the run

    @property
    def layers(self) -> list[Layer]:
        """The watched parameters of all sessions and parts, in model order."""
        return list(self.now.layers)

    @property
    def steps(self) -> Array:
        """int64 [T], ascending."""
        return self.now.steps

    @property
    def ranks(self) -> list[int]:
        """Ranks that wrote this run."""
        return sorted({key[1] for key in self._series})

    @property
    def metadata(self) -> dict[str, Any]:
        """What the newest session's header says: scaler settings, versions, device, world size, `watch` settings."""
        for key in sorted(self._series, key=lambda k: (k[0], -k[1], k[2]), reverse=True):
            header = self._series[key].header
            if header is not None:
                return {name: getattr(header, name) for name in HEADER_FIELDS}
        return {}

    @property
    def finished(self) -> bool:
        """Whether the newest session was closed properly on every rank."""
        _ = self.now
        newest = max((key[0] for key in self._series), default=-1)
        last = {key[1]: self._series[key] for key in sorted(self._series) if key[0] == newest}
        return bool(last) and all(s.finished for s in last.values())

    @property
    def last_seen(self) -> float:
        """Unix seconds of the last sign of life (the writer touches its files every 5 s); 0 if the files are gone."""
        found = [_stat(path) for series in self.ordered for path in series.files]
        return max((stat.st_mtime for stat in found if stat is not None), default=0.0)

    @property
    def damage(self) -> list[str]:
        """What could not be read and was left out, a line each; empty for a sound log."""
        with self._lock:
            _ = self.now
            return [*self._errors, *(line for series in self.ordered for line in series.damage)]

    @property
    def sessions(self) -> list[Session]:
        """The starts of the training script, in order."""
        with self._lock:
            _ = self.now
            out = []
            for index in sorted({key[0] for key in self._series}):
                mine = [s for s in self.ordered if s.session == index]
                steps = [s.steps for s in mine if len(s.steps)]
                header = next((s.header for s in mine if s.header), None)
                first, last = min((int(s[0]) for s in steps), default=-1), max((int(s[-1]) for s in steps), default=-1)
                done = all({s.rank: s for s in mine}[rank].finished for rank in {s.rank for s in mine})
                out.append(Session(index, first, last, header.created if header else 0.0, done))
            return out

    def session(self, index: int) -> Self:
        """Return one session of the run, whole.

        Raises:
            AmpscopeError: there is no such session.
        """
        known = sorted({key[0] for key in self._series})
        if index not in known:
            raise AmpscopeError(f"run {self.name!r} has no session {index}; it has {', '.join(map(str, known))}")
        return type(self)(self.path, session=index, kind=self._kind)

    @property
    def events(self) -> list[Event]:
        """Everything that happened, by step; of overlapping sessions only what the later one says."""
        with self._lock:
            _ = self.now
            if self._events is None:
                self._events = events(self.ordered)
            return list(self._events)

    @property
    def backward_order(self) -> list[str]:
        """Layer names in the order backward reaches them, as learned in the first steps; [] if it was not."""
        with self._lock:
            if self._backward is None:
                told = [e for e in self.events if e.data.get("topic") == "backward_order"]
                self._backward = [str(x) for x in told[-1].data.get("layers", told[-1].layers)] if told else []
            return list(self._backward)

    # Numbers

    @property
    def scalars(self) -> list[str]:
        """Names of all scalars: those of every run, then what `.log()` added and what was observed beside."""
        with self._lock:
            _ = self.now
            extra = {name for s in self.ordered for name in s.extra} - set(SCALARS)
            return [*SCALARS, *sorted(extra)]

    def scalar(self, name: str, rank: int | None = 0, start: int = 0, stop: int | None = None) -> Array:
        """Return a scalar of one rank, float64; `Run.scalar` says more."""
        with self._lock:
            now, rows = self.now, self.now.rows[self.check_rank(rank)]
            series = self.ordered
            if name not in SCALARS and not any(name in s.extra for s in series):
                raise AmpscopeError(f"no scalar {name!r} in run {self.name!r}; there are {', '.join(self.scalars)}")
            stop = len(now.steps) if stop is None else min(stop, len(now.steps))
            out = np.full(max(stop - start, 0), np.nan)
            part = slice(*np.searchsorted(rows.place, [start, stop]).tolist())  # places ascend
            which, place, at = rows.series[part], rows.place[part], rows.at[part]
            for i in np.unique(which).tolist():
                mine = which == i
                first, last = int(at[mine].min()), int(at[mine].max())
                out[place[mine] - start] = series[i].scalar(name, first, last + 1)[at[mine] - first]
            return out

    def check_rank(self, rank: int | None) -> int:
        """Return a rank that there is; for 0 and None the lowest.

        Raises:
            AmpscopeError: there is no such rank.
        """
        ranks = self.ranks
        if rank in ranks:
            return rank
        if rank == 0 or rank is None:
            return ranks[0]
        raise AmpscopeError(f"run {self.name!r} has no rank {rank}; it has {', '.join(map(str, ranks))}")

    def columns(
        self, names: Sequence[str], rank: int | None = 0, rows: slice | Sequence[int] | Array | None = None
    ) -> dict[str, Array]:
        """Return layer columns of the log (docs/log-format.md), [T, L] each; 0 (lists: NaN) where nothing was recorded.

        Args:
            names: columns.
            rank: which process.
            rows: positions in `steps` (ascending) or a slice of them; default all.

        Raises:
            AmpscopeError: no such rank.
        """
        with self._lock:
            wanted = self.wanted(rows)
            shape = (len(wanted), len(self.now.layers))
            out = {n: np.full(shape, np.nan if n in LISTS else 0, DTYPES.get(n, np.float64)) for n in names}
            for _, to, layers, columns in self.parts(names, rank, wanted):
                for name, values in columns.items():
                    out[name][cells(to, layers, shape[1])] = values
            return out

    def wanted(self, rows: slice | Sequence[int] | Array | None) -> Array:
        """Return positions in `steps`, int64, of what a caller asks for."""
        every = np.arange(len(self.now.steps))
        return every if rows is None else every[rows if isinstance(rows, slice) else np.asarray(rows, np.int64)]

    def parts(
        self, names: Sequence[str], rank: int | None, wanted: Array
    ) -> Iterator[tuple[Series, Array, Array, dict[str, Array]]]:
        """Yield, batch by batch, (series, positions among `wanted`, layer indices, columns [n, l])."""
        now, ordered = self.now, self.ordered
        for i, (at, to) in by_series(now.rows[self.check_rank(rank)], wanted).items():
            for part, columns in ordered[i].parts(names, at):
                yield ordered[i], to[part], now.maps[i], columns

    def layer_index(self, layer: LayerKey) -> int:
        """Return the index of a layer given by name, index or `Layer`.

        Raises:
            AmpscopeError: no such layer.
        """
        name = layer.name if isinstance(layer, Layer) else layer
        now = self.now
        if isinstance(name, str):
            if name in now.index:
                return now.index[name]
        elif 0 <= int(name) < len(now.layers):
            return int(name)
        raise AmpscopeError(f"no layer {name!r} in run {self.name!r}")


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def cells(rows: Array, layers: Array, n: int) -> Any:
    """Return an index for [rows, layers] of a table of n layers, the plain one where it can be."""
    whole = len(layers) == n and (layers == np.arange(n)).all()
    if len(rows) and int(rows[-1] - rows[0]) == len(rows) - 1 and (np.diff(rows) > 0).all():
        where: Any = slice(int(rows[0]), int(rows[-1]) + 1)
        return where if whole else (where, layers)
    return rows if whole else (rows[:, None], layers[None, :])
