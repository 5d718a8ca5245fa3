"""One stream of a run (a session, rank and part) with its tail: rows in order, read as they come."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from ampscope.log import frames
from ampscope.log.schema import BASE, LAYER_COLUMNS, SCALARS, Header, make_schema
from ampscope.log.streams import Stream, tail_of
from ampscope.record.step import Event, EventKind

_LISTS = {"weight_norm": (np.float64, np.nan), "probed_flushed": (np.float64, np.nan)}
_DTYPES = {name: kind.to_pandas_dtype() for name, kind in LAYER_COLUMNS}

ALL = tuple(make_schema(Header(())).names)
Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Block:
    """The rows of one batch that are steps; `frame` tells where its layer columns are, `batch` holds them for a tail."""

    rows: Array
    """int64: row numbers in the stream."""
    take: Array
    """int64: positions of those rows in the batch."""
    steps: Array
    scalars: dict[str, Array]
    extra: dict[str, tuple[Array, Array]]
    """name → (positions among `rows`, values) of `.log()` and observed values."""
    events: list[tuple[int, Event]]
    """(row number, event)."""
    frame: frames.Frame | None = None
    batch: pa.RecordBatch | None = None


@dataclass
class Series:
    """A main stream and its tail."""

    path: Path
    session: int
    rank: int
    part: int
    blocks: list[Block] = field(default_factory=list)
    tail_blocks: list[Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._main, self._tail = Stream(self.path), Stream(tail_of(self.path))
        self.version = 0

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
        return [*self._main.damage, *self._tail.damage]

    def refresh(self) -> bool:
        """Read what was appended; return whether anything changed. The tail goes first: what it held may move to the main file meanwhile.

        Raises:
            LogError: a newer version, or not an ampscope log.
        """
        before = (len(self.blocks), len(self.tail_blocks), self.finished)
        anew, fresh = self._tail.read_new(ALL)
        if anew:
            self.tail_blocks.clear()
        self.tail_blocks += [make_block(b, None, b) for _, b in fresh if b is not None and b.num_rows]
        changed_tail = anew or bool(fresh)
        anew, fresh = self._main.read_new(BASE)
        if anew:
            self.blocks.clear()
        self.blocks += [make_block(b, f, None) for f, b in fresh if b is not None and b.num_rows]
        if self.blocks:
            last = max((int(b.rows[-1]) for b in self.blocks if len(b.rows)), default=-1)
            last = max([last, *(r for b in self.blocks for r, _ in b.events)])
            self.tail_blocks = [c for b in self.tail_blocks if (c := after(b, last)) is not None]
        changed = changed_tail or anew or before != (len(self.blocks), len(self.tail_blocks), self.finished)
        self.version += changed
        return changed

    @property
    def all_blocks(self) -> list[Block]:
        """Every block, in row order."""
        return [*self.blocks, *self.tail_blocks]

    def columns(self, names: Sequence[str], rows: Array | None = None) -> dict[str, Array]:
        """Return layer columns, [n, L] each, of the step rows (`rows`: sorted positions among all step rows; None is all).

        Where a batch turns out damaged, its rows are unsampled (state 0).
        """
        n_layers = len(self.header.layers) if self.header else 0
        blocks = self.all_blocks
        counts = np.array([len(b.rows) for b in blocks], np.int64)
        starts = np.concatenate([[0], np.cumsum(counts)])
        total = int(starts[-1]) if rows is None else len(rows)
        out: dict[str, Array] = {}
        for name in names:
            dtype, fill = _LISTS.get(name, (_DTYPES.get(name, np.float64), 0))
            out[name] = np.full((total, n_layers), fill, dtype)
        for i, block in enumerate(blocks):
            if rows is None:
                local, to = np.arange(counts[i]), slice(int(starts[i]), int(starts[i + 1]))
            else:
                a, b = np.searchsorted(rows, [starts[i], starts[i + 1]])
                if a == b:
                    continue
                local, to = rows[a:b] - starts[i], slice(int(a), int(b))
            batch = self._batch(block, names)
            if batch is None:
                continue
            take = block.take[local]
            for name in names:
                column = batch.column(name)
                if name in _LISTS:
                    _spread(column, take, out[name], to.start)
                elif n_layers:
                    out[name][to] = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, n_layers)[take]
        return out

    def histograms(self, layer: int) -> tuple[Array, Array, Array]:
        """Return (positions among all step rows [H], counts [H, 256], exact powers [H, 256]) of one layer."""
        at: list[int] = []
        counts: list[Array] = []
        exact: list[Array] = []
        start = 0
        names = ("hist_layer", "hist_first", "hist_length", "hist_counts", "hist_exact")
        for block in self.all_blocks:
            batch = self._batch(block, names)
            if batch is not None:
                for position, row in enumerate(block.take.tolist()):
                    layers = batch.column("hist_layer")[row].values.to_numpy(zero_copy_only=False)
                    found = np.flatnonzero(layers == layer)
                    if not len(layers):
                        continue
                    full, powers = np.zeros(256, np.int64), np.zeros(256, np.int64)
                    if len(found):
                        k = int(found[0])
                        length = batch.column("hist_length")[row].values.to_numpy(zero_copy_only=False).astype(np.int64)
                        first = int(batch.column("hist_first")[row].values[k].as_py())
                        begin = int(length[:k].sum())
                        span = slice(first, first + int(length[k]))
                        full[span] = batch.column("hist_counts")[row].values.to_numpy(zero_copy_only=False)[begin : begin + length[k]]
                        powers[span] = batch.column("hist_exact")[row].values.to_numpy(zero_copy_only=False)[begin : begin + length[k]]
                    at.append(start + position)
                    counts.append(full)
                    exact.append(powers)
            start += len(block.rows)
        empty = np.zeros((0, 256), np.int64)
        return np.array(at, np.int64), np.stack(counts) if counts else empty, np.stack(exact) if exact else empty

    def _batch(self, block: Block, names: Sequence[str]) -> pa.RecordBatch | None:
        if block.batch is not None:
            return block.batch
        assert block.frame is not None
        return self._main.load(block.frame, names)


def after(block: Block, last: int) -> Block | None:
    """Return the rows and events of a block beyond row `last`, or None if there are none."""
    keep = block.rows > last
    events = [(r, e) for r, e in block.events if r > last]
    if keep.all() and len(events) == len(block.events):
        return block
    if not keep.any() and not events:
        return None
    move = np.cumsum(keep) - 1
    extra = {k: (move[p[keep[p]]], v[keep[p]]) for k, (p, v) in block.extra.items()}
    scalars = {k: v[keep] for k, v in block.scalars.items()}
    return Block(block.rows[keep], block.take[keep], block.steps[keep], scalars, extra, events, block.frame, block.batch)


def make_block(batch: pa.RecordBatch, frame: frames.Frame | None, keep: pa.RecordBatch | None) -> Block:
    """Take the base columns out of a batch."""
    rows = batch.column("row").to_numpy(zero_copy_only=False)
    is_step = batch.column("is_step").to_numpy(zero_copy_only=False).astype(bool)
    take = np.flatnonzero(is_step)
    scalars = {name: batch.column(name).to_numpy(zero_copy_only=False)[take] for name in SCALARS}
    move = np.cumsum(is_step) - 1
    extra: dict[str, tuple[Array, Array]] = {}
    for column in ("custom", "observed"):
        for name, (at, values) in _map_column(batch.column(column)).items():
            steps_only = is_step[at]
            extra[name] = (move[at[steps_only]], values[steps_only])
    return Block(rows[take], take, batch.column("step").to_numpy(zero_copy_only=False)[take], scalars, extra, _events(batch, rows), frame, keep)


def _map_column(column: pa.MapArray) -> dict[str, tuple[Array, Array]]:
    offsets = column.offsets.to_numpy(zero_copy_only=False)
    if offsets[-1] == offsets[0]:
        return {}
    lengths = np.diff(offsets)
    at = np.repeat(np.arange(len(lengths)), lengths)
    keys = column.keys[int(offsets[0]) : int(offsets[-1])].dictionary_encode()
    values = column.items[int(offsets[0]) : int(offsets[-1])].to_numpy(zero_copy_only=False)
    codes = keys.indices.to_numpy(zero_copy_only=False)
    return {name: (at[codes == i], values[codes == i]) for i, name in enumerate(keys.dictionary.to_pylist())}


def _events(batch: pa.RecordBatch, rows: Array) -> list[tuple[int, Event]]:
    column = batch.column("events")
    lengths = np.diff(column.offsets.to_numpy(zero_copy_only=False))
    out = []
    for i in np.flatnonzero(lengths):
        for e in column[int(i)].as_py():
            try:
                data = json.loads(e["data"] or "{}")
            except ValueError:
                data = {}
            event = Event(
                e["step"], cast(EventKind, e["kind"]), e["rank"], e["phase"], tuple(e["layers"] or ()), e["op"], e["where"], e["message"],
                data if isinstance(data, dict) else {},
            )  # fmt: skip
            out.append((int(rows[i]), event))
    return out


def _spread(column: pa.ListArray, take: Array, out: Array, start: int) -> None:
    """Write the non-empty lists of a column into rows of `out`; -1 (not probed) becomes NaN for counts."""
    offsets = column.offsets.to_numpy(zero_copy_only=False)
    values = column.values.to_numpy(zero_copy_only=False).astype(np.float64)
    counts = pa.types.is_integer(column.type.value_type)
    for i, row in enumerate(take.tolist()):
        part = values[offsets[row] : offsets[row + 1]]
        if len(part):
            out[start + i, : len(part)] = np.where(part < 0, np.nan, part) if counts else part
