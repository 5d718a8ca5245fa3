"""One stream of a run (a session, rank and part) with its tail: rows in order, read as they come."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ampscope.log.rundir import DEAD_AFTER
from ampscope.log.schema import BASE, LAYER_COLUMNS, Header, make_schema
from ampscope.log.streams import Stream, tail_of
from ampscope.record.step import MEASURED, Event
from ampscope.run.block import Block, after, events, make_block
from ampscope.run.histograms import INDEX, VALUES, spread

Array = np.ndarray[Any, Any]

ALL = tuple(make_schema(Header(())).names)
LISTS = ("weight_norm", "probed_flushed")
"""Layer columns that are there at some steps only; NaN elsewhere."""
DTYPES: dict[str, Any] = {
    **{name: np.int64 if kind is None else kind.to_pandas_dtype() for name, kind in LAYER_COLUMNS},
    **dict.fromkeys(LISTS, np.float64),
}
"""Type of each layer column as it is read."""


class Series:
    """A main stream and its tail."""

    def __init__(self, path: Path, session: int, rank: int, part: int) -> None:
        self.path, self.session, self.rank, self.part = path, session, rank, part
        self._main, self._tail = Stream(path), Stream(tail_of(path))
        self._main_blocks: list[Block] = []
        self._tail_blocks: list[Block] = []
        self._settle()

    @property
    def header(self) -> Header | None:
        """The header, None while the file is still empty."""
        return self._main.header or self._tail.header

    @property
    def finished(self) -> bool:
        """Whether the writer closed the stream."""
        return self._main.finished

    @property
    def damage(self) -> list[str]:
        """What was left out, a line each."""
        return [*self._main.damage, *self._tail.damage, *self._cut()]

    def _cut(self) -> list[str]:
        """Say that a file ends inside a batch that no writer will complete, and whose rows stand nowhere else."""
        if self.finished or self._tail_blocks or (self.steps.size and not self._main.torn):
            return []
        try:
            stat = self.path.stat()
        except OSError:
            return []
        if time.time() - stat.st_mtime < DEAD_AFTER:
            return []
        if not stat.st_size:
            return [f"{self.path.name} is empty"]
        if not self._main.torn:
            return []
        return [
            f"{self.path.name} ends inside a batch: its last {self._main.torn:,} bytes are of no use (was it copied whole?)"
        ]

    @property
    def files(self) -> tuple[Path, Path]:
        """The main file and its tail (which a finished stream has not)."""
        return self._main.path, self._tail.path

    def read_header(self) -> None:
        """Read the header alone.

        Raises:
            LogError: a newer version, or not an ampscope log.
        """
        self._main.read_header()

    def refresh(self) -> bool:
        """Read what was appended; return whether anything changed.

        Raises:
            LogError: a newer version, or not an ampscope log.
        """
        before = (len(self.steps), self.event_count, self.finished, self.header, len(self.damage))
        # The tail goes first: what it held may move to the main file meanwhile.
        anew, fresh = self._tail.read_new(ALL)
        if anew:
            self._tail_blocks.clear()
        self._tail_blocks += [make_block(b, None, b) for _, b in fresh if b is not None and b.num_rows]
        anew, fresh = self._main.read_new(BASE)
        if anew:
            self._main_blocks.clear()
        self._main_blocks += [make_block(b, f, None) for f, b in fresh if b is not None and b.num_rows]
        last = max((b.last_row for b in self._main_blocks), default=-1)
        self._tail_blocks = [c for b in self._tail_blocks if (c := after(b, last)) is not None]
        self._settle()
        return anew or before != (len(self.steps), self.event_count, self.finished, self.header, len(self.damage))

    def _settle(self) -> None:
        self.blocks = [*self._main_blocks, *self._tail_blocks]
        counts = [len(b.rows) for b in self.blocks]
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        none = np.zeros(0, np.int64)
        self.steps: Array = np.concatenate([b.steps for b in self.blocks]) if self.blocks else none
        self.event_count = sum(len(b.event_rows) for b in self.blocks)

    def scalar(self, name: str, first: int = 0, stop: int | None = None) -> Array:
        """Return a scalar of rows `first` to before `stop`, float64 [stop - first]; NaN where it was not recorded."""
        stop = len(self.steps) if stop is None else stop
        a = max(0, int(np.searchsorted(self._starts, first, "right")) - 1)
        b = int(np.searchsorted(self._starts, stop, "left"))
        begin, end = int(self._starts[min(a, len(self._starts) - 1)]), int(self._starts[min(b, len(self._starts) - 1)])
        out = np.full(end - begin, np.nan)
        for start, block in zip((self._starts[a:b] - begin).tolist(), self.blocks[a:b], strict=False):
            if name in block.scalars:
                out[start : start + len(block.rows)] = block.scalars[name]
            elif name in block.extra:
                where, found = block.extra[name]
                out[start + where] = found
        return out[first - begin : stop - begin]

    @property
    def events(self) -> list[Event]:
        """Every event, in order."""
        return [e for b in self.blocks for e in events(b)]

    @property
    def extra(self) -> set[str]:
        """Names of `.log()` and observed values."""
        return {name for b in self.blocks for name in b.extra}

    @property
    def histogram_rows(self) -> Array:
        """int64: positions of the rows that hold histograms."""
        parts = [b.histograms for b in self.blocks]
        return np.flatnonzero(np.concatenate(parts)) if parts else np.zeros(0, np.int64)

    @property
    def n_layers(self) -> int:
        """Layers of this stream."""
        return len(self.header.layers) if self.header else 0

    def parts(self, names: Sequence[str], rows: Array) -> Iterator[tuple[slice, dict[str, Array]]]:
        """Yield layer columns block by block: (which of `rows`, {name: [n, L]}).

        A damaged batch yields nothing: its rows count as not sampled.

        Args:
            names: layer columns.
            rows: int64, ascending positions among this series' rows.
        """
        for to, take, batch in self._batches(names, rows):
            yield to, {name: self._layer_column(batch, name, take) for name in names}

    def _batches(self, names: Sequence[str], rows: Array) -> Iterator[tuple[slice, Array, pa.RecordBatch]]:
        edges = np.searchsorted(rows, self._starts)
        for i, block in enumerate(self.blocks):
            a, b = int(edges[i]), int(edges[i + 1])
            if a == b or block.damaged:
                continue
            batch = block.batch
            if batch is None:
                assert block.frame is not None
                batch = self._main.load(block.frame, names)
            if batch is None:  # from now on its layers count as not sampled, whichever column is asked for
                block.damaged = True
                block.histograms = np.zeros_like(block.histograms)
            else:
                yield slice(a, b), block.take[rows[a:b] - self._starts[i]], batch

    def _layer_column(self, batch: pa.RecordBatch, name: str, take: Array) -> Array:
        n = self.n_layers
        if name in LISTS:
            return _lists(batch, name, take, n)
        if name not in batch.schema.names or not n:
            return np.zeros((len(take), n), DTYPES[name])
        table = batch.column(name).flatten().to_numpy(zero_copy_only=False).reshape(-1, n)
        whole = len(take) == len(table) and (not len(take) or int(take[-1] - take[0]) == len(table) - 1)
        return np.asarray(table if whole else table[take], DTYPES[name])

    def histograms(self, which: str, rows: Array) -> Array:
        """Return histograms ("exponents") or exact powers ("exact") of rows, int64 [n, L, 256]; 0 where damaged."""
        out = np.zeros((len(rows), self.n_layers, 256), np.int64)
        for to, take, batch in self._batches((*INDEX, VALUES[which]), rows):
            out[to] = spread(batch, which, take, self.n_layers)
        return out

    def layer_histograms(self, which: str, rows: Array, layer: int) -> tuple[Array, Array]:
        """Return (bool [n]: which of some rows have a histogram of this layer, int64 [n, 256])."""
        had = np.zeros(len(rows), bool)
        out = np.zeros((len(rows), 256), np.int64)
        for to, take, batch in self._batches(("state", *INDEX, VALUES[which]), rows):
            had[to] = self._layer_column(batch, "state", take)[:, layer] == MEASURED
            out[to] = spread(batch, which, take, self.n_layers, layer)
        return had, out


def _lists(batch: pa.RecordBatch, name: str, take: Array, n: int) -> Array:
    """Return a list column as [rows, n]; NaN where a list is empty or an entry is -1 (not probed)."""
    out = np.full((len(take), n), np.nan)
    if name not in batch.schema.names:
        return out
    column = batch.column(name)
    offsets = column.offsets.to_numpy(zero_copy_only=False)
    width = np.diff(offsets)[take]
    rows = np.flatnonzero((width > 0) & (width <= n))
    if len(rows):
        values = column.values.to_numpy(zero_copy_only=False).astype(np.float64)
        if pa.types.is_integer(column.type.value_type):
            values[values < 0] = np.nan
        for row in rows.tolist():
            begin = int(offsets[take[row]])
            out[row, : width[row]] = values[begin : begin + width[row]]
    return out
