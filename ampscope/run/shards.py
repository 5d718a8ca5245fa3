"""All ranks of a run whose gradients are sharded (FSDP), added up: counts are additive, so nothing is estimated here.

Of replicated gradients (DDP) every rank holds the same; they are never added up, and the lowest rank speaks for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ampscope.log.schema import COUNTS
from ampscope.record import underflow
from ampscope.record.step import MEASURED, Layer
from ampscope.run import metrics

if TYPE_CHECKING:
    from ampscope.run.run import Run

Array = np.ndarray[Any, Any]
CHUNK = 1024
"""Rows joined at a time."""


def layers(run: Run) -> list[Layer]:
    """Return the run's layers with the elements of all ranks."""
    total: dict[str, int] = {}
    for rank in run.ranks:
        local = {x.name: x.numel for s in run.ordered if s.rank == rank and s.header for x in s.header.layers}
        for name, numel in local.items():
            total[name] = total.get(name, 0) + numel
    return [replace(layer, numel=total[layer.name]) for layer in run.layers]


def columns(run: Run, names: Sequence[str], rows: Array) -> dict[str, Array]:
    """Return layer columns of all ranks together, [n, L]; `zero_rows` and `zero_cols`, which do not add up, are -1."""
    out: dict[str, Array] = {}
    for rank in run.ranks:
        for name, values in run.columns(names, rank, rows).items():
            have = out.get(name)
            out[name] = values if have is None else _joined(name, have, values)
    for name in {"zero_rows", "zero_cols"} & set(names):
        out[name] = np.full_like(out[name], -1)
    return out


def _joined(name: str, a: Array, b: Array) -> Array:
    if name in COUNTS or name == "sum_squares":
        return a + b
    if name == "low_bits":
        return a | b
    if name == "weight_norm":
        return np.hypot(a, b)
    if name == "probed_flushed":
        return np.where(np.isnan(a), b, np.where(np.isnan(b), a, a + b))
    return np.fmax(a, b)  # state, max_abs; of medians the greater


def several(run: Run, names: Sequence[str], wanted: Array) -> dict[str, Array]:
    """Return layer metrics of all ranks together, float32 [n, L] each."""
    every = layers(run)
    numel = np.array([x.numel for x in every], np.int64)
    needed = tuple(dict.fromkeys(c for name in names for c in metrics.columns_of(name)))
    tables = run.metadata.get("settings", {}).get("tables", ())
    context = underflow.Context.of(every, run.backward_order, tables)
    at_step = {name: run.scalar(name) for name in ("loss_scale", "loss", "micro_steps")}
    out = {name: np.full((len(wanted), len(every)), np.nan, np.float32) for name in names}
    for start in range(0, len(wanted), CHUNK):
        rows = wanted[start : start + CHUNK]
        found = columns(run, needed, rows)
        steps = metrics.Steps(context, at_step["loss"][rows], at_step["micro_steps"][rows])
        for name in names:
            out[name][start : start + len(rows)] = metrics.compute(
                name, found, at_step["loss_scale"][rows], numel, steps
            )
    return out


def scalar(run: Run, name: str) -> Array:
    """Return a scalar of all ranks together, float64 [T]; one that is of no gradients is the lowest rank's."""
    parts = np.stack([run.scalar(name, rank) for rank in run.ranks])
    if name == "grad_norm":
        known = ~np.isnan(parts).all(0)
        return np.where(known, np.sqrt(np.nansum(parts**2, 0)), np.nan)
    if name == "headroom_bits":
        return np.asarray(np.fmin.reduce(parts))
    if name in ("skipped", "peak_memory_bytes"):
        return np.asarray(np.fmax.reduce(parts))
    if name in ("zero_ratio", "underflow_ratio"):
        sizes = [sum(x.numel for x in _layers_of(run, rank)) for rank in run.ranks]
        weights = np.array(sizes, np.float64)[:, None] * ~np.isnan(parts)
        with np.errstate(invalid="ignore"):
            return np.asarray(np.nansum(parts * weights, 0) / weights.sum(0))
    if name == "nonfinite_layers":
        out = np.full(len(run.steps), np.nan)
        rows = np.flatnonzero(~np.isnan(parts).all(0))
        out[rows] = np.fmax.reduce(parts)[rows]
        rows = rows[np.nansum(parts[:, rows], 0) > 0]  # which layers they are differs between ranks
        for start in range(0, len(rows), CHUNK):
            some = rows[start : start + CHUNK]
            found = columns(run, ("state", "nan", "pos_inf", "neg_inf"), some)
            bad = (found["nan"] + found["pos_inf"] + found["neg_inf"] > 0) & (found["state"] == MEASURED)
            out[some] = bad.sum(1)
        return out
    return np.asarray(parts[0])


def _layers_of(run: Run, rank: int) -> list[Layer]:
    found = {x.name: x for s in run.ordered if s.rank == rank and s.header for x in s.header.layers}
    return list(found.values())


def add_up(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Join (steps [H], counts [H, 256]) of all ranks: steps that any has, counts added."""
    steps = np.unique(np.concatenate([s for s, _ in parts]))
    out = np.zeros((len(steps), 256), np.int64)
    for own, counts in parts:
        out[np.searchsorted(steps, own)] += counts
    return steps, out
