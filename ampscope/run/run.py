"""`Run`: a recorded run. Every view takes one of these."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ampscope.errors import AmpscopeError
from ampscope.log.streams import stream_files
from ampscope.record import underflow
from ampscope.record.step import NOT_SAMPLED
from ampscope.run import estimates, metrics, shards
from ampscope.run.core import LayerKey, RunCore, Session, cells
from ampscope.run.merge import by_series
from ampscope.run.series import Series

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Run", "Session"]

Array = np.ndarray[Any, Any]
RowKey = slice | Sequence[int] | Array


class Run(RunCore):
    """A recorded run.

    Steps are those of all sessions; where sessions overlap, the later one wins. `rank` selects one process of a
    distributed run (0 means the lowest there is); values of a step that this rank has not recorded are NaN. Reading is
    lazy: layer columns are read from disk when a metric is asked for. Methods may be called from any thread.
    """

    _activations: Run | None = None

    @property
    def activations(self) -> Run | None:
        """The run's activation statistics (`watch(activations=True)`), None if there are none.

        Its layers are "MODULE:output" and "MODULE:grad".
        """
        with self._lock:
            if self._activations is None and stream_files(self.path, "activations"):
                self._activations = Run(self.path, self._session, kind="activations")
            elif self._activations is not None:
                self._activations.refresh()
            return self._activations

    @property
    def metrics(self) -> list[str]:
        """Names of the layer metrics."""
        return list(metrics.METRICS)

    def metric(self, name: str, rank: int | None = 0, rows: RowKey | None = None) -> Array:
        """Return a layer metric, float32 [T, L]; NaN where the layer had no gradient or was not sampled.

        Args:
            name: a name in `metrics`.
            rank: which process; None: all together (added up where gradients are sharded).
            rows: positions in `steps` (ascending) or a slice of them; default all. Only their batches are read.

        Raises:
            AmpscopeError: no such metric or rank.
        """
        return self.several((name,), rank, rows)[name]

    def several(self, names: Sequence[str], rank: int | None = 0, rows: RowKey | None = None) -> dict[str, Array]:
        """Return several layer metrics, float32 [T, L] each: what they share is read and computed once.

        Args:
            names: names in `metrics`.
            rank: which process; None: all together (added up where gradients are sharded).
            rows: positions in `steps` (ascending) or a slice of them; default all. Only their batches are read.

        Raises:
            AmpscopeError: no such metric or rank.
        """
        for name in names:
            if name not in metrics.METRICS:
                raise AmpscopeError(f"no metric {name!r}; there are {', '.join(metrics.METRICS)}")
        with self._lock:
            wanted = self.wanted(rows)
            if self.joins(rank):
                return shards.several(self, names, wanted)
            first, stop = (int(wanted[0]), int(wanted[-1]) + 1) if len(wanted) else (0, 0)
            scale = self.scalar("loss_scale", rank, first, stop)[wanted - first]
            shape = (len(wanted), len(self.now.layers))
            out = {name: np.full(shape, np.nan, np.float32) for name in names}
            needed = tuple(dict.fromkeys(c for name in names for c in metrics.columns_of(name)))
            estimated = any(metrics.needs_estimate(name) for name in names)
            parts = self._estimated_parts if estimated else self.parts
            for series, to, layers, columns in parts(needed, rank, wanted):
                numel = np.array([x.numel for x in series.header.layers] if series.header else [], np.int64)
                carried = scale[to]
                if series.header and series.header.kind == "activations":  # outputs carry no scale, their gradients do
                    plain = np.array([x.name.endswith(":output") for x in series.header.layers], bool)
                    carried = np.where(plain, 1.0, carried[:, None])
                for name in names:
                    out[name][cells(to, layers, shape[1])] = metrics.compute(name, columns, carried, numel)
            return out

    def _estimated_parts(
        self, names: Sequence[str], rank: int | None, wanted: Array
    ) -> Iterator[tuple[Series, Array, Array, dict[str, Array]]]:
        """Yield what `parts` does, with the underflow estimate among the columns."""
        now, ordered = self.now, self.ordered
        for i, (at, to) in by_series(now.rows[self.check_rank(rank)], wanted).items():
            for part, columns in estimates.parts(ordered[i], names, at, self._context(ordered[i])):
                yield ordered[i], to[part], now.maps[i], columns

    def _context(self, series: Series) -> underflow.Context:
        header = series.header
        if header is None:
            return underflow.Context.of(())
        tables = header.settings.get("tables", ())
        return underflow.Context.of(header.layers, self.backward_order, tables, header.gradients == "replicated")

    def joins(self, rank: int | None) -> bool:
        """Whether this `rank` means all ranks added up."""
        return rank is None and len(self.ranks) > 1 and self.metadata.get("gradients") == "sharded"

    def scalar(self, name: str, rank: int | None = 0, start: int = 0, stop: int | None = None) -> Array:
        """Return a scalar, float64 [T]; NaN where it was not recorded.

        Args:
            name: a name in `scalars`.
            rank: which process; None: all together (added up where gradients are sharded).
            start: only from this position in `steps` on (who follows a long run reads what is new).
            stop: only to before this position.

        Raises:
            AmpscopeError: no such scalar or rank.
        """
        with self._lock:
            if self.joins(rank):
                return shards.scalar(self, name)[start:stop]
            return super().scalar(name, rank, start, stop)

    @property
    def sampled(self) -> Array:
        """Bool [T, L]: whether the layer was looked at in that step (lowest rank)."""
        return np.asarray(self.columns(("state",))["state"] != NOT_SAMPLED)

    def exponents(self, layer: LayerKey, rank: int | None = 0, rows: RowKey | None = None) -> tuple[Array, Array]:
        """Return (steps int64 [H], counts int64 [H, 256]): finite non-zero |g_s| by biased exponent (2^k at k + 127).

        H are the steps whose histograms were kept and where the layer had a gradient.

        Args:
            layer: which one.
            rank: which process; None: all together (added up where gradients are sharded).
            rows: only these positions in `steps` (ascending) or a slice of them; only their batches are read.

        Raises:
            AmpscopeError: no such layer or rank.
        """
        return self._of_layer("exponents", layer, rank, rows)

    def exact_powers(self, layer: LayerKey, rank: int | None = 0) -> tuple[Array, Array]:
        """Return (steps int64 [H], counts int64 [H, 256]): those elements of `exponents` that are exactly 2^k.

        Raises:
            AmpscopeError: no such layer or rank.
        """
        return self._of_layer("exact", layer, rank)

    def _of_layer(
        self, which: str, layer: LayerKey, rank: int | None, only: RowKey | None = None
    ) -> tuple[Array, Array]:
        with self._lock:
            if self.joins(rank):
                return shards.add_up([self._of_layer(which, layer, r, only) for r in self.ranks])
            now, index, ordered = self.now, self.layer_index(layer), self.ordered
            steps, tables = [np.zeros(0, np.int64)], [np.zeros((0, 256), np.int64)]
            rows = self.histogram_rows(rank)
            if only is not None:
                rows = np.intersect1d(rows, self.wanted(only), assume_unique=True)
            for i, (at, to) in by_series(now.rows[self.check_rank(rank)], rows).items():
                local = np.flatnonzero(now.maps[i] == index)
                if len(local):
                    had, counts = ordered[i].layer_histograms(which, at, int(local[0]))
                    steps.append(now.steps[rows[to[had]]])
                    tables.append(counts[had])
            out = np.concatenate(steps)
            order = np.argsort(out, kind="stable")
            return out[order], np.concatenate(tables)[order]

    def histogram_rows(self, rank: int | None = 0) -> Array:
        """Return the positions in `steps` of the steps whose histograms were kept, int64 [H].

        Raises:
            AmpscopeError: no such rank.
        """
        with self._lock:
            now, ordered = self.now, self.ordered
            if self.joins(rank):
                return np.unique(np.concatenate([self.histogram_rows(r) for r in self.ranks]))
            rows = now.rows[self.check_rank(rank)]
            has = np.zeros(len(rows.at), bool)
            for i in np.unique(rows.series).tolist():
                mine = rows.series == i
                table = np.zeros(len(ordered[i].steps), bool)
                table[ordered[i].histogram_rows] = True
                has[mine] = table[rows.at[mine]]
            return rows.place[has]

    def histograms(self, rows: RowKey, rank: int | None = 0, exact: bool = False) -> Array:
        """Return the histograms of all layers at some steps, int64 [n, L, 256]; 0 where none was kept.

        Ask for a few rows at a time: 100 rows of 200 layers are 41 MB.

        Args:
            rows: positions in `steps` (ascending) or a slice; see `histogram_rows`.
            rank: which process; None: all together (added up where gradients are sharded).
            exact: the exact powers of two among them instead.

        Raises:
            AmpscopeError: no such rank.
        """
        with self._lock:
            now, ordered, wanted = self.now, self.ordered, self.wanted(rows)
            if self.joins(rank):
                return np.asarray(np.sum([self.histograms(wanted, r, exact) for r in self.ranks], axis=0))
            out = np.zeros((len(wanted), len(now.layers), 256), np.int64)
            for i, (at, to) in by_series(now.rows[self.check_rank(rank)], wanted).items():
                found = ordered[i].histograms("exact" if exact else "exponents", at)
                out[to[:, None], now.maps[i][None, :]] = found
            return out

    def to_arrow(self, metrics: Sequence[str] = (), rank: int | None = 0) -> pa.Table:
        """Return one row a step: `step`, every scalar, and for each of `metrics` a column `METRIC/LAYER` a layer.

        Raises:
            AmpscopeError: no such metric or rank.
        """
        import pyarrow as pa

        with self._lock:
            data: dict[str, Any] = {"step": self.steps}
            data |= {name if name != "step" else "log/step": self.scalar(name, rank) for name in self.scalars}
            for metric in metrics:
                values = self.metric(metric, rank)
                data |= {f"{metric}/{layer.name}": values[:, i] for i, layer in enumerate(self.layers)}
            return pa.table(data)

    def to_pandas(self, metrics: Sequence[str] = (), rank: int | None = 0) -> Any:
        """Return `to_arrow` as a pandas DataFrame.

        Raises:
            AmpscopeError: pandas is not installed; no such metric or rank.
        """
        try:
            importlib.import_module("pandas")  # pyarrow needs it; its own error would not name the remedy
        except ImportError:
            raise AmpscopeError("to_pandas() needs pandas: pip install pandas") from None
        return self.to_arrow(metrics, rank).to_pandas()
