"""CSV of what a tab shows."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from dash import Dash, Input, Output, dcc, no_update

from ..background import PATIENCE
from ..decimate import window
from ..reader import RunStore
from ..source import Source
from ..views import compare as compare_views
from ..views import events as event_views
from ..views import findings as finding_views
from ..views import layer as layer_views
from ..views import whatif as whatif_views
from . import layers as layer_callbacks
from .common import ERRORS, Ask, open_source, read_ask
from .compare import chosen
from .whatif import FORMATS, chosen_exponent

ROWS = 100_000
"""Rows written at most; of more, those a chart would draw (every extreme is among them)."""


def csv_of(store: RunStore, data: Any) -> tuple[str, str] | None:
    """Return (file name, text) of what the tab in view shows, None if it shows nothing."""
    ask = read_ask(data)
    if ask is None:
        return None
    tab = ask.text("tab", "overview")
    writer = {
        "overview": _overview, "layers": _layers, "events": _events, "whatif": _whatif, "compare": _compare, "findings": _findings,
    }.get(tab, _overview)  # fmt: skip
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    for row in writer(store, ask):
        rows.writerow([cell(v) for v in row])
    safe = re.sub(r"[^\w.-]+", "_", ask.run)[:80]
    return f"ampscope-{safe}-{tab}.csv", out.getvalue()


def cell(value: Any) -> Any:
    """Return a value for CSV: full floats; text that a spreadsheet would take for a formula is quoted."""
    if isinstance(value, (float, np.floating)):
        return repr(float(value))
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def _overview(store: RunStore, ask: Ask) -> Iterable[Sequence[Any]]:
    source, rank = open_source(store, ask)
    names = [
        n
        for n in source.run.scalars
        if np.isfinite(source.values(n, rank)).any() or np.isinf(source.values(n, rank)).any()
    ]
    rows = _rows(source, rank, ask)
    yield ["step", *names]
    columns = [source.values(n, rank)[rows] for n in names]
    for i, step in enumerate(source.steps[rows].tolist()):
        yield [step, *[float(c[i]) for c in columns]]


def _rows(source: Source, rank: int, ask: Ask) -> Any:
    part = window(source.steps, ask.span.low, ask.span.high)
    if part.stop - part.start <= ROWS:
        rows = np.arange(part.start, part.stop)
        low, high = ask.span.low, ask.span.high
        if (
            low is not None and high is not None
        ):  # a line is drawn from the row before to the row after; they are not in view
            rows = rows[(source.steps[rows] >= low) & (source.steps[rows] <= high)]
        return rows
    drawn = [
        source.line(n, rank, ask.span.low, ask.span.high)[0]
        for n in ("loss", "loss_scale", "grad_norm", "underflow_ratio")
    ]
    return np.searchsorted(source.steps, np.unique(np.concatenate(drawn)))


def _layers(store: RunStore, ask: Ask) -> Iterable[Sequence[Any]]:
    source, rank = open_source(store, ask)
    if ask.text("layer"):
        index = layer_views.require(source, ask.text("layer"))
        lines = layer_views.lines(source, rank, index, ask.span)
        yield ["layer", "step", "metric", "value"]
        for metric, c in lines.curves.items():
            for x, y in zip(c.x.tolist(), c.y.tolist(), strict=True):
                yield [lines.layer.name, x, metric, y]
        return
    metric = ask.text("metric", "underflow_ratio")
    view = layer_callbacks.view_of(ask, source, rank, metric)
    yield ["row", "from_step", "to_step", metric, "note"]
    words = {1: "no gradient", 2: "NaN or inf", 3: "no limit", 4: "not sampled"}
    for r, row in enumerate(view.rows):
        for k, (begin, end) in enumerate(pairwise(view.edges.tolist())):
            yield [row.label, begin, end - 1, float(view.values[r, k]), words.get(int(view.cells[r, k]), "")]


def _events(store: RunStore, ask: Ask) -> Iterable[Sequence[Any]]:
    source, _ = open_source(store, ask)
    found, _ = event_views.matching(source, ask.texts("kinds"), ask.text("evq"))
    yield ["step", "kind", "rank", "phase", "layers", "op", "where", "message"]
    for item in found:
        e = item.event
        yield [e.step, e.kind, e.rank, e.phase, " ".join(e.layers), e.op, e.where, e.message]


def _whatif(store: RunStore, ask: Ask) -> Iterable[Sequence[Any]]:
    source, rank = open_source(store, ask)
    yield ["layer", "format", "scale", "flushed", "subnormal", "overflowing", "lowest_good_scale", "highest_good_scale"]
    collected = store.collected.of(source, PATIENCE).value
    if collected is None:
        return
    exponent = chosen_exponent(ask, source, rank)
    view = whatif_views.sweep(source, rank, collected, ask.choice("fmt", FORMATS, "fp16"), exponent)
    for r in view.rows:
        yield [r.name, view.format, 2.0**exponent, r.flushed, r.subnormal, r.overflow, 2.0**r.low, 2.0**r.high]


def _compare(store: RunStore, ask: Ask) -> Iterable[Sequence[Any]]:
    sources = [(s, (s.run.ranks or [0])[0]) for s in (store.source(key) for key in chosen(ask))]
    view = compare_views.compare(sources, "step")
    yield ["run", "step", "metric", "value"]
    for run in view.runs:
        for metric in ("loss", "scale", "grad_norm", "step_seconds"):
            c = getattr(run, metric)
            for x, y in zip(c.x.tolist(), c.y.tolist(), strict=True):
                yield [run.name, x, metric, y]


def _findings(store: RunStore, ask: Ask) -> Iterable[Sequence[Any]]:
    source, _ = open_source(store, ask)
    yield ["rule", "severity", "title", "where", "evidence", "remedy"]
    for c in finding_views.cards(store.diagnosis.of(source).value or []):
        yield [
            c.rule,
            c.severity,
            c.title,
            "; ".join(f"{k}: {v}" for k, v in c.facts),
            "; ".join(f"{k}: {v}" for k, v in c.evidence),
            c.remedy,
        ]


def register(app: Dash, store: RunStore) -> None:
    """Add the callback."""

    def reply(data: Any) -> Any:
        try:
            made = csv_of(store, data)
        except ERRORS:
            return no_update
        return no_update if made is None else dcc.send_string(made[1], made[0])

    app.callback(Output("download", "data"), Input("csv-ask", "data"), prevent_initial_call=True)(reply)
