"""Step records → Arrow record batches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ampscope.log.schema import LAYER_COLUMNS, SCALARS
from ampscope.record import derive
from ampscope.record.step import Event, Layer, LayerStats, StepRecord


@dataclass(slots=True)
class Row:
    """One encoded row; `columns` is None where no layer statistics were taken."""

    row: int
    is_step: bool
    step: int
    scalars: dict[str, float]
    columns: dict[str, Any] | None
    weight_norm: Any
    probed: Any
    histogram: tuple[list[int], list[int], list[int], Any, Any]
    custom: list[tuple[str, float]]
    observed: list[tuple[str, float]]
    events: list[dict[str, Any]]


def trim(exponents: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> tuple[list[int], list[int], list[int], Any, Any]:
    """Return (layer, first bin, length) lists and the concatenated counts of [L, BINS] histograms, without empty ends."""
    used = exponents > 0
    layers = np.flatnonzero(used.any(-1))
    if not len(layers):
        return [], [], [], np.zeros(0, np.int64), np.zeros(0, np.int64)
    first = used[layers].argmax(-1)
    last = used.shape[1] - 1 - used[layers][:, ::-1].argmax(-1)
    spans = [(int(i), slice(int(a), int(b) + 1)) for i, a, b in zip(layers, first, last, strict=True)]
    counts = np.concatenate([exponents[i, s] for i, s in spans])
    exacts = np.concatenate([exact[i, s] for i, s in spans])
    return layers.tolist(), first.tolist(), (last - first + 1).tolist(), counts, exacts


def event_dict(event: Event) -> dict[str, Any]:
    """Return an event as the log's struct."""
    return {
        "step": event.step, "kind": event.kind, "rank": event.rank, "phase": event.phase, "layers": list(event.layers),
        "op": event.op, "where": event.where, "message": event.message, "data": json.dumps(dict(event.data), default=str),
    }  # fmt: skip


def encode(record: StepRecord, row: int, layers: Sequence[Layer], numel: np.ndarray[Any, Any]) -> Row:
    """Encode one record. A record of fewer layers than `layers` (taken before the set grew) is padded."""
    scale = record.scalars.get("loss_scale", 1.0)
    columns = None
    histogram: tuple[list[int], list[int], list[int], Any, Any] = trim(np.zeros((0, 1)), np.zeros((0, 1)))
    scalars = {name: float("nan") for name in SCALARS}
    scalars.update({k: float(v) for k, v in record.scalars.items() if k in scalars})
    scalars["time"] = record.time
    if record.layers is not None:
        columns = derive.compact(_pad(record.layers, len(layers)), scale)
        scalars.update(derive.totals(columns, numel, scale))
        if record.keep_exponents:
            histogram = trim(record.layers.exponents, record.layers.exact)
    return Row(
        row, True, record.step, scalars, columns, record.weight_norm, record.probed_flushed, histogram,
        [(str(k), float(v)) for k, v in record.custom.items()],
        [(str(k), float(v)) for k, v in record.observed.items()],
        [event_dict(e) for e in record.events],
    )  # fmt: skip


def encode_events(events: Iterable[Event], row: int, time: float) -> Row:
    """Encode events that belong to no step row."""
    events = list(events)
    scalars = {name: float("nan") for name in SCALARS} | {"time": time}
    empty: tuple[list[int], list[int], list[int], Any, Any] = trim(np.zeros((0, 1)), np.zeros((0, 1)))
    step = events[0].step if events else -1
    return Row(row, False, step, scalars, None, None, None, empty, [], [], [event_dict(e) for e in events])


def _pad(stats: LayerStats, n: int) -> LayerStats:
    have = len(stats.state)
    if have == n:
        return stats
    out = LayerStats.empty(n)
    for name in LayerStats.__dataclass_fields__:
        getattr(out, name)[:have] = getattr(stats, name)
    return out


def to_batch(rows: Sequence[Row], schema: pa.Schema, n_layers: int) -> pa.RecordBatch:
    """Return one record batch of the rows."""
    arrays: list[pa.Array] = [
        pa.array([r.row for r in rows], pa.int64()),
        pa.array([r.is_step for r in rows], pa.bool_()),
        pa.array([r.step for r in rows], pa.int64()),
    ]
    arrays += [pa.array(np.array([r.scalars[name] for r in rows], np.float64)) for name in SCALARS]
    for name, kind in LAYER_COLUMNS:
        dtype = kind.to_pandas_dtype()
        flat = np.zeros((len(rows), n_layers), dtype)
        for i, r in enumerate(rows):
            if r.columns is not None:
                flat[i] = r.columns[name]
        values = pa.array(flat.reshape(-1), kind)
        arrays.append(pa.FixedSizeListArray.from_arrays(values, n_layers) if n_layers else pa.array([[]] * len(rows), pa.list_(kind, 0)))
    arrays.append(_lists([r.weight_norm for r in rows], np.float32, pa.float32()))
    arrays.append(_lists([r.probed for r in rows], np.int64, pa.int64()))
    for k, (dtype, kind) in enumerate(
        ((np.int32, pa.int32()), (np.uint8, pa.uint8()), (np.uint16, pa.uint16()), (np.int64, pa.int64()), (np.int64, pa.int64()))
    ):
        arrays.append(_lists([r.histogram[k] for r in rows], dtype, kind))
    arrays.append(pa.array([r.custom for r in rows], schema.field("custom").type))
    arrays.append(pa.array([r.observed for r in rows], schema.field("observed").type))
    arrays.append(pa.array([r.events for r in rows], schema.field("events").type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _lists(items: Sequence[Any], dtype: Any, kind: pa.DataType) -> pa.Array:
    parts = [np.zeros(0, dtype) if x is None else np.asarray(x, dtype) for x in items]
    offsets = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([len(p) for p in parts], out=offsets[1:])
    values = np.concatenate(parts) if parts else np.zeros(0, dtype)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind))
