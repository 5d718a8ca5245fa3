"""The rows of one batch: what every view needs is decoded at once, layer columns when they are asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
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
    event_rows: Array
    """int64: row number of each event."""
    event_items: pa.StructArray | None
    """The events; decoded when they are asked for (a run that skips every step has hundreds of thousands)."""
    last_row: int
    """Greatest row number in the batch, step or not; -1 where it is empty."""
    frame: frames.Frame | None = None
    batch: pa.RecordBatch | None = None
    damaged: bool = False
    """Whether its layer columns turned out unreadable."""
    decoded: list[Event] | None = None
    """The events, once they were asked for."""


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
    event_rows, items = np.zeros(0, np.int64), None
    if "events" in names:
        column = batch.column("events")
        event_rows, items = np.repeat(rows, np.diff(column.offsets.to_numpy(zero_copy_only=False))), column.flatten()
    last = int(rows.max()) if len(rows) else -1
    steps = _plain(batch, "step")[take]
    return Block(rows[take], take, steps, scalars, extra, histograms, event_rows, items, last, frame, keep)


def after(block: Block, last: int) -> Block | None:
    """Return the rows and events of a block beyond row `last`, or None if there are none."""
    if block.last_row <= last:
        return None
    keep, told = block.rows > last, block.event_rows > last
    if keep.all() and told.all():
        return block
    move = np.cumsum(keep) - 1
    extra = {k: (move[p[keep[p]]], v[keep[p]]) for k, (p, v) in block.extra.items()}
    scalars = {k: v[keep] for k, v in block.scalars.items()}
    items = block.event_items
    return Block(
        block.rows[keep], block.take[keep], block.steps[keep], scalars, extra, block.histograms[keep],
        block.event_rows[told], None if items is None else items.filter(pa.array(told)), block.last_row, block.frame,
        block.batch,
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


def events(block: Block) -> list[Event]:
    """Return the events of a block, in order; decoded once."""
    if block.decoded is None:
        block.decoded = _decode(block)
    return block.decoded


def _decode(block: Block) -> list[Event]:
    if block.event_items is None or not len(block.event_rows):
        return []
    columns = {f.name: block.event_items.field(f.name).to_pylist() for f in block.event_items.type}
    return [
        Event(
            step,
            cast(EventKind, kind),
            rank,
            phase,
            tuple(layers or ()),
            op or "",
            where or "",
            message or "",
            _data(data),
        )
        for step, kind, rank, phase, layers, op, where, message, data in zip(
            *(columns[f.name] for f in fields(Event)), strict=True
        )
    ]


def _data(text: str | None) -> dict[str, Any]:
    try:
        data = json.loads(text or "{}")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}
