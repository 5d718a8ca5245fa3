"""Rows that are in no big batch yet, in arrays of fixed size, one a column: memory stays flat however long a run is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ampscope.log.encode import Row, event_dict
from ampscope.log.schema import HISTOGRAM_COLUMNS, SCALARS, layer_types
from ampscope.record.step import Layer

Array = np.ndarray[Any, Any]

LISTS = {"weight_norm": np.float32, "probed_flushed": np.int64}
_HISTOGRAM_TYPES = (np.int32, np.uint8, np.uint16, np.int64, np.int64)
MEMORY = 64 << 20
"""Bytes of layer columns kept at most while nothing can be written."""
BATCH_MEMORY = 16 << 20
"""Bytes of layer columns in one big batch at most."""
BIG = 1000
"""Rows of a big batch: scalars of a million rows read in 1 s from batches of 1,000, in minutes from batches of one."""
MOST = 10_000
"""Rows kept at most while nothing can be written."""


class RowBuffer:
    """A queue of at most `capacity` rows.

    Attributes:
        big: rows of a big batch for this number of layers.
        capacity: rows that fit.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        types = {name: np.dtype(kind.to_pandas_dtype()) for name, kind in layer_types(layers).items()}
        row_bytes = max(sum(t.itemsize for t in types.values()) * len(layers), 1)
        self.big = int(np.clip(BATCH_MEMORY // row_bytes, 50, BIG))
        self.capacity = int(np.clip(MEMORY // row_bytes, 2 * self.big, MOST))
        self._n = 0
        self._extra = 0
        cap = self.capacity
        # np.empty: pages are touched only as rows come
        self._fixed: dict[str, Array] = {"row": np.empty(cap, np.int64), "step": np.empty(cap, np.int64)}
        self._fixed |= {"is_step": np.empty(cap, bool), "has_histograms": np.empty(cap, bool)}
        self._fixed |= {name: np.empty(cap) for name in SCALARS}
        self._layers = {name: np.empty((cap, len(layers)), kind) for name, kind in types.items()}
        self._rows: list[Row] = []
        """The rows themselves, for what varies in length."""

    def __len__(self) -> int:
        return self._n

    @property
    def full(self) -> bool:
        """Whether no row fits any more."""
        return self._n == self.capacity or self._extra > MEMORY

    @property
    def ripe(self) -> bool:
        """Whether there is enough for a big batch."""
        return self._n >= self.big or self._extra > BATCH_MEMORY

    def append(self, row: Row) -> None:
        """Add a row; the buffer must not be full."""
        i = self._n
        fixed = self._fixed
        fixed["row"][i], fixed["step"][i] = row.row, row.step
        fixed["is_step"][i], fixed["has_histograms"][i] = row.is_step, row.histogram is not None
        for name in SCALARS:
            fixed[name][i] = row.scalars.get(name, np.nan)
        for name, array in self._layers.items():
            array[i] = 0 if row.columns is None else row.columns[name]
        self._rows.append(replace(row, columns=None))
        self._extra += _extra(row)
        self._n += 1

    def steps(self, start: int, stop: int) -> Array:
        """Return the step numbers of rows `start` to `stop`."""
        return self._fixed["step"][start:stop].copy()

    def drop(self, count: int) -> None:
        """Forget the `count` oldest rows."""
        rest = self._n - count
        for array in (*self._fixed.values(), *self._layers.values()):
            array[:rest] = array[count : self._n].copy()
        self._extra -= sum(map(_extra, self._rows[:count]))
        del self._rows[:count]
        self._n = rest

    def chunk(self, start: int, stop: int) -> dict[str, Any]:
        """Return rows `start` to `stop` as columns for `to_batch`. They are views: use them before the next change."""
        rows = self._rows[start:stop]
        out: dict[str, Any] = {name: array[start:stop] for name, array in (*self._fixed.items(), *self._layers.items())}
        for name, dtype in LISTS.items():
            out[name] = joined([getattr(r, name) for r in rows], dtype)
        for k, (name, kind) in enumerate(zip(HISTOGRAM_COLUMNS, _HISTOGRAM_TYPES, strict=True)):
            out[name] = joined([None if r.histogram is None else r.histogram[k] for r in rows], kind)
        for name in ("custom", "observed"):
            out[name] = mapped([getattr(r, name) for r in rows])
        if any(r.events for r in rows):
            out["events"] = [[event_dict(e) for e in r.events] for r in rows]
        return out


def _extra(row: Row) -> int:
    """Return about how many bytes a row's histograms take."""
    return 0 if row.histogram is None else row.histogram[3].nbytes + row.histogram[4].nbytes


def joined(parts: Sequence[Any], dtype: Any) -> tuple[Array, Array] | None:
    """Return (offsets, values) of a list column, None where every list is empty."""
    arrays = [np.asarray(x, dtype) for x in parts if x is not None]
    if not arrays:
        return None
    offsets = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([0 if x is None else len(x) for x in parts], out=offsets[1:])
    return offsets, np.concatenate(arrays)


def mapped(parts: Sequence[Mapping[str, float] | None]) -> tuple[Array, list[str], list[float]] | None:
    """Return (offsets, keys, values) of a map column, None where every map is empty."""
    if not any(parts):
        return None
    offsets = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([len(x) if x else 0 for x in parts], out=offsets[1:])
    return offsets, [str(k) for x in parts if x for k in x], [float(v) for x in parts if x for v in x.values()]
