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
from ampscope.record.step import Event, Layer, LayerStats, StepRecord

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


def trim(exponents: Array, exact: Array) -> Trimmed:
    """Return [L, BINS] histograms without their empty ends and without empty layers."""
    used = exponents > 0
    layers = np.flatnonzero(used.any(-1))
    used = used[layers]
    bins = np.arange(used.shape[1])
    first = used.argmax(-1) if len(layers) else np.zeros(0, np.int64)
    last = used.shape[1] - 1 - used[:, ::-1].argmax(-1) if len(layers) else first
    inside = (bins >= first[:, None]) & (bins <= last[:, None])
    return layers, first, last - first + (1 if len(layers) else 0), exponents[layers][inside], exact[layers][inside]


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
            out.histogram = trim(stats.exponents, stats.exact)
    return out


def complete(rows: Sequence[Row], numel: Array, context: underflow.Context) -> None:
    """Add the free underflow estimate and the run-wide scalars to rows of the same layers: many at once, since one costs as much as ten."""
    rows = [row for row in rows if row.columns is not None]
    if not rows:
        return
    table = {name: np.stack([row.columns[name] for row in rows if row.columns]) for name in rows[0].columns or ()}
    scale, loss, micro_steps = (
        np.array([row.scalars.get(name, 1.0) for row in rows]) for name in ("loss_scale", "loss", "micro_steps")
    )
    flushed = underflow.estimate(table, context, scale, loss, micro_steps)[0]
    found = derive.totals(table, numel, scale, flushed)
    for i, row in enumerate(rows):
        row.flushed = flushed[i]
        row.scalars.update({name: float(values[i]) for name, values in found.items()})


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
