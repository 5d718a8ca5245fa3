"""The rows of one batch: what every view needs is decoded at once, layer columns when they are asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa

from ampscope.log import frames
from ampscope.log.schema import SCALARS
from ampscope.record.step import Event, EventKind

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Block:
    """The rows of one batch that are steps; `frame` tells where layer columns are, for a tail `batch` holds them."""

    rows: Array
    """int64: row numbers in the stream."""
    take: Array
    """int64: positions of those rows in the batch."""
    steps: Array
    scalars: dict[str, Array]
    extra: dict[str, tuple[Array, Array]]
    """name → (positions among `rows`, values) of `.log()` and observed values."""
    histograms: Array
    """bool: whether a row holds histograms."""
    events: list[tuple[int, Event]]
    """(row number, event)."""
    last_row: int
    """Greatest row number in the batch, step or not; -1 where it is empty."""
    frame: frames.Frame | None = None
    batch: pa.RecordBatch | None = None
    damaged: bool = False
    """Whether its layer columns turned out unreadable."""


def make_block(batch: pa.RecordBatch, frame: frames.Frame | None, keep: pa.RecordBatch | None) -> Block:
    """Take the base columns out of a batch. Columns that it lacks (an older version's) are empty."""
    names = set(batch.schema.names)
    rows = _plain(batch, "row")
    is_step = _plain(batch, "is_step").astype(bool)
    take = np.flatnonzero(is_step)
    scalars = {name: _plain(batch, name)[take] for name in SCALARS if name in names}
    move = np.cumsum(is_step) - 1
    extra: dict[str, tuple[Array, Array]] = {}
    for column in ("observed", "custom"):
        if column in names:
            for name, (at, values) in _map_column(batch.column(column)).items():
                steps_only = is_step[at]
                extra[name] = (move[at[steps_only]], values[steps_only])
    histograms = (
        _plain(batch, "has_histograms").astype(bool)[take] if "has_histograms" in names else np.zeros(len(take), bool)
    )
    events = _events(batch, rows) if "events" in names else []
    last = int(rows.max()) if len(rows) else -1
    return Block(rows[take], take, _plain(batch, "step")[take], scalars, extra, histograms, events, last, frame, keep)


def after(block: Block, last: int) -> Block | None:
    """Return the rows and events of a block beyond row `last`, or None if there are none."""
    if block.last_row <= last:
        return None
    keep = block.rows > last
    events = [(r, e) for r, e in block.events if r > last]
    if keep.all() and len(events) == len(block.events):
        return block
    move = np.cumsum(keep) - 1
    extra = {k: (move[p[keep[p]]], v[keep[p]]) for k, (p, v) in block.extra.items()}
    scalars = {k: v[keep] for k, v in block.scalars.items()}
    return Block(
        block.rows[keep], block.take[keep], block.steps[keep], scalars, extra, block.histograms[keep], events,
        block.last_row, block.frame, block.batch,
    )  # fmt: skip


def _plain(batch: pa.RecordBatch, name: str) -> Array:
    return cast(Array, batch.column(name).to_numpy(zero_copy_only=False))


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
    return [(int(rows[i]), _event(e)) for i in np.flatnonzero(lengths) for e in column[int(i)].as_py()]


def _event(e: dict[str, Any]) -> Event:
    try:
        data = json.loads(e.get("data") or "{}")
    except ValueError:
        data = {}
    return Event(
        e["step"], cast(EventKind, e["kind"]), e["rank"], e["phase"], tuple(e["layers"] or ()), e["op"] or "",
        e["where"] or "", e["message"] or "", data if isinstance(data, dict) else {},
    )  # fmt: skip
