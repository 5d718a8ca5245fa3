"""The layer metrics of a run, from the log's columns. `docs/log-format.md` lists formulas and columns."""

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


@dataclass(frozen=True)
class Inputs:
    """What a formula may use: columns [T, L] (with `ESTIMATES` where needed), loss scale [T, 1], elements [L]."""

    columns: Columns
    scale: Array
    numel: Array

    def __getitem__(self, column: str) -> Array:
        return self.columns[column]

    def share(self, column: str) -> Array:
        """Return a count as a share of the elements."""
        return self.columns[column] / np.maximum(self.numel, 1)


Formula = Callable[[Inputs], Array]


def _share(column: str) -> Formula:
    return lambda x: x.share(column)


def _plain(column: str) -> Formula:
    return lambda x: x[column]


def _headroom(x: Inputs) -> Array:
    largest = np.where(x["pos_inf"] + x["neg_inf"] > 0, np.inf, x["max_abs"].astype(np.float64))
    return np.asarray(np.log2(FP16_MAX / largest))


def _unscaled(x: Inputs) -> Array:
    # What was flushed at the scale used would be flushed without it too.
    return np.asarray(np.minimum(x.share("below_unscaled") + x[ESTIMATES[0]], 1.0))


METRICS: dict[str, tuple[tuple[str, ...], Formula]] = {
    "grad_norm": (("sum_squares",), lambda x: np.asarray(np.sqrt(x["sum_squares"]) / x.scale)),
    "grad_max": (("max_abs",), lambda x: np.asarray(x["max_abs"].astype(np.float64) / x.scale)),
    "zero_ratio": (("zeros",), _share("zeros")),
    "subnormal_ratio": (("subnormal",), _share("subnormal")),
    "underflow_ratio": (UNDERFLOW_COLUMNS, _plain(ESTIMATES[0])),
    "underflow_ratio_low": (UNDERFLOW_COLUMNS, _plain(ESTIMATES[1])),
    "underflow_ratio_high": (UNDERFLOW_COLUMNS, _plain(ESTIMATES[2])),
    "underflow_ratio_measured": (("probed_flushed",), _share("probed_flushed")),
    "underflow_ratio_unscaled": (("below_unscaled", *UNDERFLOW_COLUMNS), _unscaled),
    "headroom_bits": (("max_abs", "pos_inf", "neg_inf"), _headroom),
    "nonfinite_count": (("nan", "pos_inf", "neg_inf"), lambda x: x["nan"] + x["pos_inf"] + x["neg_inf"]),
    "weight_norm": (("weight_norm",), _plain("weight_norm")),
}
"""Metric → (columns it needs, its formula)."""

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
        scale: loss scale, float64 [T]; or [T, L] where it is not the same for all (activations' outputs carry none).
        numel: elements a layer, int64 [L].
        steps: for metrics where `needs_estimate`.
    """
    if steps is not None and needs_estimate(metric):
        found = underflow.estimate(columns, steps.context, scale, steps.loss, steps.micro_steps)
        columns = {**columns, **dict(zip(ESTIMATES, found, strict=True))}
    by_layer = np.asarray(scale, np.float64)
    by_layer = by_layer if by_layer.ndim == 2 else by_layer[:, None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        result = METRICS[metric][1](Inputs(columns, by_layer, numel)).astype(np.float32)
    if metric not in UNMASKED:
        result[columns["state"] != MEASURED] = np.nan
    return result
