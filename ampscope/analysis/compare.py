"""Two runs side by side, as plain data: time, memory, loss, skipped steps, gradient norms."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ampscope.analysis.formats import FP16
from ampscope.analysis.overflow import born_in

if TYPE_CHECKING:
    from ampscope.run.run import Run

Array = np.ndarray[Any, Any]

WARM_UP = 5
"""Steps at the start that the step time leaves out (compilation, allocation, autotuning); a fifth of a shorter run."""
LAST = 10
"""Steps at the end whose mean is the final loss."""
ROWS = 400
"""Steps whose gradient norms are compared at most, spread evenly over those both runs have."""


@dataclass(frozen=True)
class Side:
    """One of the runs."""

    name: str
    path: str
    precision: str
    """"FP16", "BF16" or "FP32": what the gradients went through."""
    device: str
    steps: int
    step_seconds: float
    """Median time of a step, without the first ones; NaN where it was not recorded."""
    overhead_seconds: float
    """Median host time ampscope itself took in a step."""
    peak_memory_bytes: float
    """NaN on a CPU."""
    final_loss: float
    """Mean over the last steps with a finite loss among the last ten; NaN if none of them has one."""
    skipped: int

    @property
    def amp(self) -> bool:
        """Whether it is mixed-precision training."""
        return self.precision != "FP32"


@dataclass(frozen=True)
class Comparison:
    """Run A against run B. Arrays are [L], over the layers both have, those whose norm differs most first."""

    a: Side
    b: Side
    layers: tuple[str, ...]
    grad_norm_a: Array
    """Median gradient norm over the steps compared, float64."""
    grad_norm_b: Array
    grad_norm_ratio: Array
    """Median over the steps of B's norm / A's; NaN where no step has both, inf or 0 where one of them is zero."""
    compared_steps: int
    only_a: tuple[str, ...]
    """Layers that only A has."""
    only_b: tuple[str, ...]

    @property
    def speed(self) -> float:
        """How many times as fast a step of B is (above 1: faster than A)."""
        return _ratio(self.a.step_seconds, self.b.step_seconds)

    @property
    def memory(self) -> float:
        """B's peak memory / A's."""
        return _ratio(self.b.peak_memory_bytes, self.a.peak_memory_bytes)


def compare(a: Run, b: Run) -> Comparison:
    """Compare two runs, for example FP32 with AMP.

    Args:
        a: the run to measure against.
        b: the other one.
    """
    same = a.name == b.name
    names = {layer.name for layer in b.layers}
    mine = {layer.name for layer in a.layers}
    shared = [layer.name for layer in a.layers if layer.name in names]
    norm_a, norm_b, ratio, count = _norms(a, b, shared)
    with np.errstate(divide="ignore", invalid="ignore"):
        far = np.abs(np.log2(ratio))
    order = np.argsort(-np.where(np.isnan(far), -1.0, far), kind="stable")
    return Comparison(
        a=_side(a, str(a.path) if same else a.name),
        b=_side(b, str(b.path) if same else b.name),
        layers=tuple(shared[i] for i in order),
        grad_norm_a=norm_a[order],
        grad_norm_b=norm_b[order],
        grad_norm_ratio=ratio[order],
        compared_steps=count,
        only_a=tuple(x.name for x in a.layers if x.name not in names),
        only_b=tuple(x.name for x in b.layers if x.name not in mine),
    )


def _side(run: Run, name: str) -> Side:
    seconds, loss = run.scalar("step_seconds"), run.scalar("loss")
    skip = min(WARM_UP, len(seconds) // 5)
    scaler = run.metadata.get("scaler", {})
    form = born_in(run)
    loss = loss[-LAST:]
    loss = loss[np.isfinite(loss)]
    return Side(
        name=name,
        path=str(run.path),
        precision="FP32" if form is None or (form is FP16 and not _half(run, scaler)) else form.name.upper(),
        device=str(run.metadata.get("device_name") or run.metadata.get("device", "")),
        steps=len(run.steps),
        step_seconds=_median(seconds[skip:]),
        overhead_seconds=_median(run.scalar("overhead_seconds")[skip:]),
        peak_memory_bytes=_most(run.scalar("peak_memory_bytes")),
        final_loss=float(loss.mean()) if len(loss) else math.nan,
        skipped=int((run.scalar("skipped") > 0).sum()),
    )


def _half(run: Run, scaler: dict[str, Any]) -> bool:
    """Whether FP16 is more than a guess: a scaler that is on, or an audit that saw it."""
    seen = any(
        "float16" in str(k) for e in run.events if e.data.get("topic") == "audit" for k in e.data.get("matmuls") or ()
    )
    return bool(scaler.get("enabled")) or seen


def _norms(a: Run, b: Run, shared: list[str]) -> tuple[Array, Array, Array, int]:
    """Return (median norm of A, of B, median ratio, steps compared) over steps that both made and neither skipped."""
    steps, at, bt = np.intersect1d(a.steps, b.steps, return_indices=True)
    good = ~(a.scalar("skipped")[at] > 0) & ~(b.scalar("skipped")[bt] > 0)
    good &= np.isfinite(a.scalar("grad_norm")[at]) & np.isfinite(b.scalar("grad_norm")[bt])
    picked = np.flatnonzero(good)
    if not len(picked) or not shared:
        nothing = np.full(len(shared), np.nan)
        return nothing, nothing.copy(), nothing.copy(), 0
    picked = picked[np.unique(np.linspace(0, len(picked) - 1, ROWS).astype(np.int64))]
    columns = [[run.layer_index(n) for n in shared] for run in (a, b)]
    x = a.metric("grad_norm", rows=at[picked])[:, columns[0]].astype(np.float64)
    y = b.metric("grad_norm", rows=bt[picked])[:, columns[1]].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # columns of NaN only
        ratio = np.nanmedian(np.where((x == 0) & (y == 0), 1.0, y / x), axis=0)
        return np.nanmedian(x, axis=0), np.nanmedian(y, axis=0), ratio, len(steps[picked])


def _median(values: Array) -> float:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else math.nan


def _most(values: Array) -> float:
    values = values[np.isfinite(values)]
    return float(values.max()) if len(values) else math.nan


def _ratio(x: float, y: float) -> float:
    return x / y if y else math.nan
