"""The free underflow estimate of a stream's rows, with what the rows before them tell (`record/history.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ampscope.record import underflow
from ampscope.record.history import PROBED, REFERENCES, History
from ampscope.run.metrics import ESTIMATES
from ampscope.run.series import Series

Array = np.ndarray[Any, Any]


def parts(
    series: Series, names: Sequence[str], rows: Array, context: underflow.Context
) -> Iterator[tuple[slice, dict[str, Array]]]:
    """Yield (which of `rows`, columns [n, l]) batch by batch, the estimate among the columns (`metrics.ESTIMATES`).

    Args:
        series: the stream.
        names: layer columns, those of the estimate among them.
        rows: int64, ascending positions among the stream's rows.
        context: of the stream's layers.
    """
    references = references_of(series)
    every = _with_references(rows, references)
    history = History()
    probed = ("probed_flushed",) if PROBED in series.extra else ()
    first, stop = (int(every[0]), int(every[-1]) + 1) if len(every) else (0, 0)
    scalars = [series.scalar(name, first, stop) for name in ("loss_scale", "loss", "micro_steps")]
    for part, columns in series.parts(tuple(dict.fromkeys((*names, *probed))), every):
        at = every[part]
        own = underflow.estimate(columns, context, *(x[at - first] for x in scalars))
        found = history.judge(own, columns, context.numel, _place(references, at)[1], columns.get("probed_flushed"))
        asked, mine = _place(rows, at)
        if mine.any():
            to = asked[mine]
            whole = columns | dict(zip(ESTIMATES, found, strict=True))
            yield slice(int(to[0]), int(to[-1]) + 1), whole if mine.all() else {n: v[mine] for n, v in whole.items()}


def references_of(series: Series) -> Array:
    """Return the rows of a stream that tell later ones something: those with histograms or a probe, int64, ascending."""
    found = series.histogram_rows
    if PROBED in series.extra:
        every = series.header.settings.get("every") if series.header else 1
        every = every if isinstance(every, int) and every > 0 else 1
        probed = ~np.isnan(series.scalar(PROBED)) & (series.steps % every == 0)  # of others no layer was measured
        found = np.union1d(found, np.flatnonzero(probed))
    return found


def _place(ascending: Array, values: Array) -> tuple[Array, Array]:
    """Return (where each value stands or would stand among ascending ones, bool: whether it is there)."""
    at = np.searchsorted(ascending, values)
    inside = at < len(ascending)
    there = inside.copy()
    there[inside] = ascending[at[inside]] == values[inside]
    return at, there


def _with_references(rows: Array, references: Array) -> Array:
    """Return rows and the references before each, ascending."""
    stop = np.searchsorted(references, rows)
    change = np.zeros(len(references) + 1, np.int64)
    np.add.at(change, np.maximum(stop - REFERENCES, 0), 1)
    np.add.at(change, stop, -1)
    return np.union1d(rows, references[np.cumsum(change[:-1]) > 0])
