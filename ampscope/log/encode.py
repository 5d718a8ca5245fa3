"""Step records → rows, and rows → Arrow record batches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ampscope.log.schema import SCALARS
from ampscope.record import derive, underflow
from ampscope.record.history import PROBED, History
from ampscope.record.step import Bins, Event, Layer, LayerStats, StepRecord

Array = np.ndarray[Any, Any]
Trimmed = tuple[Array, Array, Array, Array, Array]
"""layer, first bin, length (one entry a layer that has elements), counts, exact powers (concatenated)."""


@dataclass(slots=True)
class Row:
    """One encoded row; `columns` is None where no layer statistics were taken, `histogram` where none is kept."""

    row: int
    is_step: bool
    step: int
    scalars: dict[str, float]
    """Those that are known; the log has NaN for the others."""
    columns: dict[str, Array] | None = None
    flushed: Array | None = None
    """Free estimate of the share flushed to zero, [L]; not stored: the reader makes it from the columns."""
    weight_norm: Array | None = None
    probed_flushed: Array | None = None
    histogram: Trimmed | None = None
    custom: Mapping[str, float] | None = None
    observed: Mapping[str, float] | None = None
    events: Sequence[Event] = ()


def trim(bins: Bins) -> Trimmed:
    """Return histograms without empty layers."""
    layers = np.flatnonzero(bins.length)
    return layers, bins.first[layers], bins.length[layers], bins.exponents, bins.exact


def begin(record: StepRecord, row: int, n_layers: int) -> Row:
    """Encode one record but for what `complete` adds. One of fewer than `n_layers` layers (taken before the set grew) is padded."""
    scalars = {k: float(v) for k, v in record.scalars.items() if k in _KNOWN}
    scalars["time"] = record.time
    out = Row(row, True, record.step, scalars, custom=record.custom, observed=record.observed, events=record.events)
    out.weight_norm, out.probed_flushed = record.weight_norm, record.probed_flushed
    if record.layers is not None:
        stats = _pad(record.layers, n_layers)
        out.columns = derive.compact(stats, scalars.get("loss_scale", 1.0))
        if record.keep_exponents:
            out.histogram = trim(stats.bins())
    return out


def complete(rows: Sequence[Row], numel: Array, context: underflow.Context, history: History | None = None) -> None:
    """Add the free underflow estimate and the run-wide scalars to rows of the same layers: many at once, since one costs as much as ten.

    `history` is that of the rows before, of the same layers, and goes on with these; None: there are none.
    """
    rows = [row for row in rows if row.columns is not None]
    if not rows:
        return
    table = {name: np.stack([row.columns[name] for row in rows if row.columns]) for name in rows[0].columns or ()}
    scale, loss, micro_steps = (
        np.array([row.scalars.get(name, 1.0) for row in rows]) for name in ("loss_scale", "loss", "micro_steps")
    )
    own = underflow.estimate(table, context, scale, loss, micro_steps)
    reference = np.array([row.histogram is not None or PROBED in (row.observed or ()) for row in rows])
    flushed = (history or History()).judge(own, table, numel, reference, _probed(rows, len(numel)))[0]
    found = derive.totals(table, numel, scale, flushed)
    for i, row in enumerate(rows):
        row.flushed = flushed[i]
        row.scalars.update({name: float(values[i]) for name, values in found.items()})


def _probed(rows: Sequence[Row], n_layers: int) -> Array | None:
    """Return what probes counted, float64 [T, L], NaN where none did; None if none did at all."""
    if all(row.probed_flushed is None for row in rows):
        return None
    out = np.full((len(rows), n_layers), np.nan)
    for values, row in zip(out, rows, strict=True):
        if row.probed_flushed is not None:
            found = np.asarray(row.probed_flushed, np.float64)[:n_layers]
            values[: len(found)] = np.where(found < 0, np.nan, found)
    return out


def encode(
    record: StepRecord, row: int, layers: Sequence[Layer], numel: Array, context: underflow.Context | None = None
) -> Row:
    """Encode one record by itself."""
    out = begin(record, row, len(layers))
    complete([out], numel, context or underflow.Context.of(layers))
    return out


_KNOWN = frozenset(SCALARS)


def encode_events(events: Iterable[Event], row: int, time: float) -> Row:
    """Encode events that belong to no step row."""
    events = tuple(events)
    return Row(row, False, events[0].step if events else -1, {"time": time}, events=events)


def _pad(stats: LayerStats, n: int) -> LayerStats:
    have = len(stats.state)
    if have == n:
        return stats
    out = LayerStats.empty(n)
    for name in LayerStats.__dataclass_fields__:
        getattr(out, name)[:have] = getattr(stats, name)
    return out


def event_dict(event: Event) -> dict[str, Any]:
    """Return an event as the log's struct."""
    return {
        "step": event.step, "kind": event.kind, "rank": event.rank, "phase": event.phase, "layers": list(event.layers),
        "op": event.op, "where": event.where, "message": event.message,
        "data": json.dumps(dict(event.data), default=str),
    }  # fmt: skip


def to_batch(chunk: Mapping[str, Any], schema: pa.Schema) -> pa.RecordBatch:
    """Return a record batch.

    Args:
        chunk: column name → [n] or [n, L] array; for a list column (offsets [n + 1], values); for a map column
            (offsets, keys, values); for `events` n lists of dicts. `row` must be there; an absent column is empty or 0.
        schema: of the stream.
    """
    n = len(chunk["row"])
    return pa.RecordBatch.from_arrays(
        [_column(chunk.get(field.name), field.type, n) for field in schema], schema=schema
    )


def _column(value: Any, kind: pa.DataType, n: int) -> pa.Array:
    if pa.types.is_fixed_size_list(kind):
        width = kind.list_size
        if not width:
            return pa.array([[]] * n, kind)
        dtype = kind.value_type.to_pandas_dtype()
        flat = np.zeros(n * width, dtype) if value is None else np.asarray(value, dtype).reshape(-1)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat, kind.value_type), width)
    if pa.types.is_map(kind):
        offsets, keys, items = value if value is not None else (np.zeros(n + 1, np.int32), [], [])
        return pa.MapArray.from_arrays(
            pa.array(offsets, pa.int32()), pa.array(keys, kind.key_type), pa.array(items, kind.item_type)
        )
    if pa.types.is_list(kind):
        if value is None or isinstance(value, tuple):
            offsets, values = value if value is not None else (np.zeros(n + 1, np.int32), [])
            return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, kind.value_type))
        return pa.array(value, kind)
    if value is None:
        value = (
            np.full(n, np.nan)
            if pa.types.is_floating(kind)
            else np.zeros(n, bool if pa.types.is_boolean(kind) else np.int64)
        )
    return pa.array(np.asarray(value), kind)
