"""Joining streams into one run: parts follow each other, later sessions win a step, ranks stand beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ampscope.record.step import Event, Layer
from ampscope.run.series import Series

Array = np.ndarray[Any, Any]
Key = tuple[int, int, int]
"""(session, rank, part)."""


@dataclass(frozen=True)
class Rows:
    """The rows of one rank that count, by step: `place` in the run's steps, index of the series, position in it."""

    place: Array
    series: Array
    at: Array


@dataclass(frozen=True)
class Merged:
    """A run's steps (all ranks together), the rows of each rank, and the layers of all streams."""

    steps: Array
    rows: dict[int, Rows]
    layers: list[Layer]
    maps: list[Array]
    """For each series: index in `layers` of each of its layers."""
    index: dict[str, int]
    """Layer name → index in `layers`."""


def merge(series: Sequence[Series]) -> Merged:
    """Join streams given in order of (session, rank, part)."""
    found = {rank: _of_rank(series, rank) for rank in sorted({s.rank for s in series})}
    parts = [steps for steps, _, _ in found.values()]
    # One rank's steps ascend already: nothing to sort in the usual run.
    steps = parts[0] if len(parts) == 1 else np.unique(np.concatenate([np.zeros(0, np.int64), *parts]))
    rows = {}
    for rank, (own, which, at) in found.items():
        place = np.arange(len(own)) if len(own) == len(steps) else np.searchsorted(steps, own)
        rows[rank] = Rows(place, which, at)
    layers: dict[str, Layer] = {}
    for s in series:
        for layer in s.header.layers if s.header else ():
            known = layers.get(layer.name)
            if known is None or layer.optimizer or not known.optimizer:
                layers[layer.name] = layer
    index = {name: i for i, name in enumerate(layers)}
    maps = [np.array([index[x.name] for x in s.header.layers] if s.header else [], np.int64) for s in series]
    return Merged(steps, rows, list(layers.values()), maps, index)


def _of_rank(series: Sequence[Series], rank: int) -> tuple[Array, Array, Array]:
    """Return (steps, index of the series, position in it) of one rank, by step."""
    mine = [(i, s.steps) for i, s in enumerate(series) if s.rank == rank]
    steps = np.concatenate([x for _, x in mine])
    which = np.concatenate([np.full(len(x), i) for i, x in mine])
    at = np.concatenate([np.arange(len(x)) for _, x in mine])
    if len(steps) and not (np.diff(steps) > 0).all():
        _, last = np.unique(steps[::-1], return_index=True)
        keep = len(steps) - 1 - last
        steps, which, at = steps[keep], which[keep], at[keep]
    return steps, which, at


def events(series: Sequence[Series]) -> list[Event]:
    """Return the events of all streams by step, without those of steps that a later session recorded again.

    That a session began (`session`) is told of each.
    """
    spans: dict[int, tuple[int, int]] = {}
    for s in series:
        if len(s.steps):
            low, high = spans.get(s.session, (int(s.steps[0]), int(s.steps[-1])))
            spans[s.session] = min(low, int(s.steps[0])), max(high, int(s.steps[-1]))
    out = []
    for s in series:
        later = [span for session, span in spans.items() if session > s.session]
        out += [e for e in s.events if e.kind == "session" or not any(a <= e.step <= b for a, b in later)]
    return sorted(out, key=lambda e: (e.step, e.rank))


def by_series(rows: Rows, wanted: Array) -> Mapping[int, tuple[Array, Array]]:
    """Return {index of a series: (positions in it, ascending; positions among `wanted`)} for some of a run's rows.

    Args:
        rows: of one rank.
        wanted: int64, positions in the run's steps, ascending.
    """
    out: dict[int, tuple[Array, Array]] = {}
    if not (len(rows.place) and len(wanted)):
        return out
    near = np.minimum(np.searchsorted(rows.place, wanted), len(rows.place) - 1)  # places ascend
    to = np.flatnonzero(rows.place[near] == wanted)
    series, at = rows.series[near[to]], rows.at[near[to]]
    for i in np.unique(series).tolist():
        mine = np.flatnonzero(series == i)
        mine = mine[np.argsort(at[mine], kind="stable")]
        out[i] = at[mine], to[mine]
    return out
