"""Skip → culprit, for free: which layers were non-finite, in backward order, and whether the loss was already broken.

The order is learned from post-accumulate hooks in the first steps, which are then removed (300 of them cost 1 ms a step).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ampscope.probe import hooks
from ampscope.probe.observer import Observer
from ampscope.probe.recorder import Recorder
from ampscope.record.step import MEASURED, Event, StepRecord

LEARN = 3
"""Steps after which the hooks are removed, if they saw anything."""
NAMED = 50
"""Layers an event names at most."""


class Culprit(Observer):
    """Adds a `skip` or `nonfinite` event to each record with non-finite gradients or loss."""

    def __init__(self) -> None:
        self._handles = hooks.Handles()
        self._order: list[int] = []
        self._seen: set[int] = set()
        self._steps = 0
        self._told = 0
        self._recorder: Recorder | None = None

    def attached(self, recorder: Recorder) -> None:
        """Install the hooks."""
        self._recorder = recorder
        self._handles = hooks.post_accumulate(recorder.parameters, self._accumulated)

    def _accumulated(self, param: torch.Tensor) -> None:
        recorder = self._recorder
        index = recorder.index(param) if recorder is not None else None
        if index is not None and index not in self._seen:
            self._seen.add(index)
            self._order.append(index)

    def before_update(self, recorder: Recorder, new_scale: Any) -> None:
        """Remove the hooks after a few steps; write the order down."""
        if not self._order:
            return
        self._steps += 1
        if self._steps == LEARN:
            self._handles.remove()
        if self._steps in (1, LEARN) and len(self._order) != self._told:
            self._told = len(self._order)
            named = [recorder.layers[i].name for i in self._order]
            text = f"backward order of {len(named)} layers learned"
            recorder.add_event(Event(recorder.step, "note", message=text, data={"topic": "backward_order", "layers": named}))

    def closed(self) -> None:
        """Remove the hooks."""
        self._handles.remove()

    def resolved(self, record: StepRecord) -> None:
        """Name the culprits of a record."""
        recorder = self._recorder
        if recorder is None:
            return
        loss = record.scalars.get("loss", math.nan)
        loss_known = "loss" in record.scalars
        loss_bad = loss_known and not math.isfinite(loss)
        skipped = record.scalars.get("skipped", 0.0) > 0
        stats = record.layers
        bad: list[int] = []
        finite: list[int] = []
        if stats is not None:
            counts = stats.nan + stats.pos_inf + stats.neg_inf
            rank = {layer: i for i, layer in enumerate(self._order)}
            measured = [i for i in range(len(stats.state)) if stats.state[i] == MEASURED]
            measured.sort(key=lambda i: rank.get(i, len(rank) + i))
            bad = [i for i in measured if counts[i]]
            finite = [i for i in measured if not counts[i]]
        if not (skipped or bad or loss_bad):
            return
        names = [recorder.layers[i].name for i in bad]
        data: dict[str, Any] = {"topic": "gradients", "loss_finite": not loss_bad, "loss_known": loss_known, "bad": len(bad), "measured": len(bad) + len(finite)}
        if stats is not None and bad:
            data |= {
                "nan": int(stats.nan.sum()), "pos_inf": int(stats.pos_inf.sum()), "neg_inf": int(stats.neg_inf.sum()),
                "first_has_nan": bool(stats.nan[bad[0]]), "finite_before": [recorder.layers[i].name for i in finite if self._before(i, bad[0])][:NAMED],
                "front": names[0], "all_bad": not finite,
            }  # fmt: skip
        kind = "skip" if skipped else "nonfinite"
        record.events.append(
            Event(record.step, kind, phase="forward" if loss_bad else "backward" if bad else "none", layers=tuple(names[:NAMED]), message=_sentence(skipped, loss_bad, names, data), data=data)
        )

    def _before(self, layer: int, other: int) -> bool:
        return layer in self._seen and other in self._seen and self._order.index(layer) < self._order.index(other)


def _sentence(skipped: bool, loss_bad: bool, names: list[str], data: dict[str, Any]) -> str:
    what = "step skipped" if skipped else "non-finite values, step not skipped"
    if loss_bad and not names:
        return f"{what}: the loss is not finite, every gradient is"
    if loss_bad:
        return f"{what}: the loss was not finite before backward; {len(names)} of {data['measured']} layers followed"
    kind = "NaN" if data.get("nan") else "inf"
    if not names:
        return f"{what}; no watched layer is non-finite"
    return f"{what}: {kind} in {len(names)} of {data['measured']} layers, first in backward: {names[0]}"
