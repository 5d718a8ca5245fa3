"""The record of one step, as plain NumPy data. The probe makes it, the log stores it; neither knows the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

EventKind = Literal["skip", "nonfinite", "growth", "backoff", "session", "settings", "note"]

NOT_SAMPLED, NO_GRADIENT, MEASURED = 0, 1, 2
"""Values of `LayerStats.state`."""

BINS = 256
"""Histogram bins: bin k + 127 counts 2^k <= |g_s| < 2^(k+1); bin 0 holds FP32 subnormals and anything smaller."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One watched parameter.

    `numel` is the number of real elements counted (a complex element is two; of a sharded tensor the local part),
    `dtype` is the parameter's, e.g. "float32", `optimizer` names the optimizer that holds it, e.g. "Adam.0" ("" if unknown yet).
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    dtype: str
    optimizer: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at a step.

    `data` holds machine-readable detail (JSON values only); the rest is for people. `phase` is "data", "forward", "backward",
    "optimizer", "usage" or "none". `layers` are names, most to blame first. `where` is "file.py:line" if known.
    """

    step: int
    kind: EventKind
    rank: int = 0
    phase: str = "none"
    layers: tuple[str, ...] = ()
    op: str = ""
    where: str = ""
    message: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class LayerStats:
    """Statistics of the scaled gradients `g_s` of L layers at one step; all arrays have length L.

    Integer arrays are int64 unless said. Where `state` is not `MEASURED` the other entries are 0.
    """

    state: npt.NDArray[np.uint8]
    zeros: npt.NDArray[np.int64]
    nan: npt.NDArray[np.int64]
    pos_inf: npt.NDArray[np.int64]
    neg_inf: npt.NDArray[np.int64]
    max_abs: npt.NDArray[np.float64]
    """Largest finite |g_s|; NaN if no element is finite."""
    sum_squares: npt.NDArray[np.float64]
    """Sum of squares of the finite elements."""
    low_bits: npt.NDArray[np.uint32]
    """OR of the FP32 bit patterns' mantissas (23 bits): low 13 clear = all values fit FP16's 10 bits, low 16 clear = BF16's 7."""
    zero_rows: npt.NDArray[np.int64]
    """All-zero rows of the gradient seen as [shape[0], rest]; -1 where not counted."""
    zero_cols: npt.NDArray[np.int64]
    """All-zero columns of the same view; -1 where not counted."""
    exponents: npt.NDArray[np.int64]
    """[L, BINS] finite non-zero elements by biased FP32 exponent."""
    exact: npt.NDArray[np.int64]
    """[L, BINS] those of them that are exactly a power of two."""

    @classmethod
    def empty(cls, n: int) -> LayerStats:
        """Return statistics of `n` layers, none sampled."""
        return cls(
            np.zeros(n, np.uint8),
            np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64),
            np.zeros(n), np.zeros(n), np.zeros(n, np.uint32),
            np.full(n, -1, np.int64), np.full(n, -1, np.int64),
            np.zeros((n, BINS), np.int64), np.zeros((n, BINS), np.int64),
        )  # fmt: skip

    def bins(self) -> Bins:
        """Return the histograms without their empty ends."""
        used = self.exponents > 0
        first = used.argmax(1)
        length = np.where(used.any(1), BINS - used[:, ::-1].argmax(1) - first, 0)
        at = np.arange(BINS)
        inside = (at >= first[:, None]) & (at < (first + length)[:, None])
        return Bins(first, length, self.exponents[inside], self.exact[inside])


class Bins(NamedTuple):
    """Histograms of L layers, each from its lowest bin in use to its highest, one after the other."""

    first: npt.NDArray[np.int64]
    """[L]; 0 where there is none."""
    length: npt.NDArray[np.int64]
    """[L]."""
    exponents: npt.NDArray[np.int64]
    """[sum of lengths] counts."""
    exact: npt.NDArray[np.int64]
    """[sum of lengths] those of them that are exactly a power of two."""

    def widened(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return both as [L, BINS]."""
        at = np.arange(BINS)
        inside = (at >= self.first[:, None]) & (at < (self.first + self.length)[:, None])
        out = np.zeros((2, *inside.shape), np.int64)
        out[0, inside], out[1, inside] = self.exponents, self.exact
        return out[0], out[1]


class NarrowStats(LayerStats):
    """Statistics whose histograms are kept as `Bins`: most steps' are never looked at. `exponents` and `exact` are made when asked for."""

    __slots__ = ("_narrow", "_wide")

    def __init__(self, narrow: Bins, numbers: dict[str, Any]) -> None:
        """`numbers` are the other fields."""
        self._narrow = narrow
        self._wide: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
        for name, value in numbers.items():
            setattr(self, name, value)

    def bins(self) -> Bins:
        """Return the histograms as they are kept."""
        return self._narrow

    def _widened(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self._wide is None:
            self._wide = self._narrow.widened()
        return self._wide

    @property
    def exponents(self) -> npt.NDArray[np.int64]:  # type: ignore[override]  # read only
        """[L, BINS]."""
        return self._widened()[0]

    @property
    def exact(self) -> npt.NDArray[np.int64]:  # type: ignore[override]  # read only
        """[L, BINS]."""
        return self._widened()[1]


@dataclass(slots=True)
class StepRecord:
    """Everything known of one step.

    `scalars` holds the scalars of design.md §4 (missing ones are NaN), without those the log derives from `layers`
    (`grad_norm`, `headroom_bits`, `underflow_ratio`, `zero_ratio`, `nonfinite_layers`). `custom` is what `.log()` added,
    `observed` what the probe saw beside (sparse; e.g. "skipped/Adam.0", "unscale_calls"; named in docs/log-format.md).
    `layers` is None where layer statistics were not sampled. `keep_exponents` says whether histograms go into the log.
    `probed_flushed` int64 [L]: elements a probe found flushed at this step's scale, -1 where not probed.
    """

    step: int
    time: float
    scalars: dict[str, float]
    custom: dict[str, float] = field(default_factory=dict)
    observed: dict[str, float] = field(default_factory=dict)
    layers: LayerStats | None = None
    keep_exponents: bool = False
    weight_norm: npt.NDArray[np.float64] | None = None
    probed_flushed: npt.NDArray[np.int64] | None = None
    events: list[Event] = field(default_factory=list)


class Pending(Protocol):
    """A record whose numbers may still be on their way from a device."""

    def ready(self) -> bool:
        """Whether `resolve` would return without waiting."""

    def resolve(self) -> StepRecord:
        """Wait for the numbers and return the record. Called once, on any thread."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A record that is complete already."""

    record: StepRecord

    def ready(self) -> bool:
        """Return True."""
        return True

    def resolve(self) -> StepRecord:
        """Return the record."""
        return self.record
