"""A closed window → a `StepRecord`, once its numbers are on the host. Any thread, one record after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ampscope.probe.window import Fetch, Taken, Window, merge
from ampscope.record.step import Event, StepRecord

SCALARS = (
    "loss", "loss_scale", "growth_tracker", "micro_steps", "lr", "step_seconds", "overhead_seconds", "peak_memory_bytes",
)  # fmt: skip
"""Numbers of the fetch that become scalars as they are."""


class Builder:
    """Makes records, and tells growth, backoff and scales set by hand apart by looking from one record to the next."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._scale_after: float | None = None

    def __call__(self, window: Window) -> StepRecord:
        """Wait for the window's numbers; return its record."""
        got = window.fetch.get()
        flags = {k[5:]: v for k, v in got.items() if k.startswith("flag:")}
        observed = {k[9:]: v for k, v in got.items() if k.startswith("observed:")}
        observed.update({f"skipped/{k}": float(v > 0) for k, v in flags.items()})
        custom = {k[7:]: v for k, v in got.items() if k.startswith("custom:")}
        if "user/loss" in custom:  # without a scaler nobody else knows it
            got.setdefault("loss", custom["user/loss"])
        skipped = any(v > 0 for v in flags.values())
        scalars = {k: got[k] for k in SCALARS if k in got}
        scalars["skipped"] = float(skipped)
        scalars.setdefault("growth_tracker", 0.0)
        record = StepRecord(window.step, got["time"], scalars, custom=custom, observed=observed, events=window.events)
        if window.taken and (window.sampled or skipped):
            record.layers = merge(window.taken, window.n_layers)
            record.keep_exponents = window.keep_exponents or skipped
        if window.weights is not None:
            record.weight_norm = weight_norms(window.weights, window.n_layers)
        probed = window.probed_flushed
        record.probed_flushed = probed(window.n_layers) if callable(probed) else probed
        self._scale_events(record, got.get("scale_after"), "new_scale" in observed)
        return record

    def _scale_events(self, record: StepRecord, after: float | None, by_hand: bool) -> None:
        scale, before = record.scalars["loss_scale"], self._scale_after
        self._scale_after = scale if after is None else after
        if before is not None and scale != before:
            text = f"loss scale set from {before:g} to {scale:g} outside update()"
            self._add(record, "settings", text, {"topic": "scale", "from": before, "to": scale})
        if after is None or after == scale:
            return
        data = {"from": scale, "to": after}
        if by_hand:
            text = f"update(new_scale) set the loss scale from {scale:g} to {after:g}"
            self._add(record, "settings", text, {"topic": "new_scale", **data})
        elif after > scale:
            self._add(record, "growth", f"loss scale {scale:g} → {after:g}", data)
        else:
            self._add(record, "backoff", f"loss scale {scale:g} → {after:g}", data)

    def _add(self, record: StepRecord, kind: str, message: str, data: Mapping[str, object]) -> None:
        record.events.append(Event(record.step, kind, self._rank, message=message, data=data))  # type: ignore[arg-type]


def weight_norms(weights: Taken, n: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the L2 norms of parameters, NaN where not measured; a norm over inf is inf, one over NaN is NaN."""
    rows = weights.pending.resolve()
    norm = np.sqrt(rows.sum_squares)
    norm[(rows.pos_inf + rows.neg_inf) > 0] = np.inf
    norm[rows.nan > 0] = np.nan
    out = np.full(n, np.nan)
    out[weights.index] = norm
    return out


class Amended:
    """The last record once more, with scalars the user logged after it and before the end: they belong to no further step."""

    def __init__(self, amend: Callable[[dict[str, float]], StepRecord], custom: Fetch) -> None:
        """`custom` has been sent."""
        self._amend, self._custom = amend, custom

    def ready(self) -> bool:
        """Return False: the last record may still be on its way."""
        return False

    def resolve(self) -> StepRecord:
        """Return the record."""
        return self._amend(self._custom.get())
