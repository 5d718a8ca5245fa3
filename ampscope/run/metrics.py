"""The layer metrics of a run, from the log's columns. Formulas: design.md §3; `docs/log-format.md` lists the columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ampscope.record import underflow
from ampscope.record.derive import FP16_MAX
from ampscope.record.step import MEASURED

Array = np.ndarray[Any, Any]
Columns = dict[str, Array]
"""Columns of the log, [T, L] each."""

UNDERFLOW_COLUMNS = underflow.COLUMNS
ESTIMATES = ("flushed_estimate", "flushed_low", "flushed_high")
"""Names under which `compute` adds the estimate to the columns."""


@dataclass(frozen=True)
class Steps:
    """What the underflow estimate needs beside the columns: of the layers, and of each step."""

    context: underflow.Context
    loss: Array
    micro_steps: Array


def _grad_norm(c: Columns, scale: Array, numel: Array) -> Array:
    return np.sqrt(c["sum_squares"]) / scale


def _grad_max(c: Columns, scale: Array, numel: Array) -> Array:
    return c["max_abs"].astype(np.float64) / scale


def _share(name: str) -> Callable[[Columns, Array, Array], Array]:
    def share(c: Columns, scale: Array, numel: Array) -> Array:
        return c[name] / np.maximum(numel, 1)

    return share


def _underflow(which: int) -> Callable[[Columns, Array, Array], Array]:
    def ratio(c: Columns, scale: Array, numel: Array) -> Array:
        return c[ESTIMATES[which]]

    return ratio


def _unscaled(c: Columns, scale: Array, numel: Array) -> Array:
    """What was flushed at the scale used would be flushed without it too."""
    return np.minimum(c["below_unscaled"] / np.maximum(numel, 1) + c[ESTIMATES[0]], 1.0)


def _headroom(c: Columns, scale: Array, numel: Array) -> Array:
    largest = np.where(c["pos_inf"] + c["neg_inf"] > 0, np.inf, c["max_abs"].astype(np.float64))
    return np.log2(FP16_MAX / largest)


def _nonfinite(c: Columns, scale: Array, numel: Array) -> Array:
    return (c["nan"] + c["pos_inf"] + c["neg_inf"]).astype(np.float64)


METRICS: dict[str, tuple[tuple[str, ...], Callable[[Columns, Array, Array], Array]]] = {
    "grad_norm": (("sum_squares",), _grad_norm),
    "grad_max": (("max_abs",), _grad_max),
    "zero_ratio": (("zeros",), _share("zeros")),
    "subnormal_ratio": (("subnormal",), _share("subnormal")),
    "underflow_ratio": (UNDERFLOW_COLUMNS, _underflow(0)),
    "underflow_ratio_low": (UNDERFLOW_COLUMNS, _underflow(1)),
    "underflow_ratio_high": (UNDERFLOW_COLUMNS, _underflow(2)),
    "underflow_ratio_measured": (
        ("probed_flushed",),
        lambda c, scale, numel: c["probed_flushed"] / np.maximum(numel, 1),
    ),
    "underflow_ratio_unscaled": (("below_unscaled", *UNDERFLOW_COLUMNS), _unscaled),
    "headroom_bits": (("max_abs", "pos_inf", "neg_inf"), _headroom),
    "nonfinite_count": (("nan", "pos_inf", "neg_inf"), _nonfinite),
    "weight_norm": (("weight_norm",), lambda c, scale, numel: c["weight_norm"]),
}
"""Metric → (columns it needs, function of columns [T, L], loss scale [T, 1] and elements [L])."""

UNMASKED = ("weight_norm", "underflow_ratio_measured")
"""Metrics whose NaN does not depend on whether the gradient was measured."""


def columns_of(metric: str) -> tuple[str, ...]:
    """Return the log's columns a metric needs, `state` included."""
    needed = METRICS[metric][0]
    return needed if metric in UNMASKED else tuple(dict.fromkeys(("state", *needed)))


def needs_estimate(metric: str) -> bool:
    """Whether a metric rests on the free underflow estimate, and `compute` wants `steps` for it."""
    return "lowest" in METRICS[metric][0]


def compute(metric: str, columns: Columns, scale: Array, numel: Array, steps: Steps | None = None) -> Array:
    """Return a metric, float32 [T, L]; NaN where the layer had no gradient or was not sampled.

    Args:
        metric: a name in `METRICS`.
        columns: [T, L] arrays.
        scale: loss scale, float64 [T].
        numel: elements a layer, int64 [L].
        steps: for metrics where `needs_estimate`.
    """
    if steps is not None and needs_estimate(metric):
        found = underflow.estimate(columns, steps.context, scale, steps.loss, steps.micro_steps)
        columns = {**columns, **dict(zip(ESTIMATES, found, strict=True))}
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        out = METRICS[metric][1](columns, np.asarray(scale, np.float64)[:, None], numel)
        result = np.asarray(out, np.float32).copy() if out.dtype == np.float32 else out.astype(np.float32)
    if metric not in UNMASKED:
        result[columns["state"] != MEASURED] = np.nan
    return result
