"""Skip → culprit, for free: which layers were non-finite, in backward order, and whether the loss was already broken.

The order is learned from post-accumulate hooks in the first steps, which are then removed (300 of them cost 1 ms a step). What is
known afterwards costs nothing: it is read off the statistics every record holds anyway.

Events of kind "skip" (the scaler skipped the step) and "nonfinite" (it did not, though something was non-finite) carry `data`:

| key | meaning |
|---|---|
| `topic` | "gradients" |
| `loss_known`, `loss_finite` | whether a loss was seen, and whether it was finite before backward |
| `measured`, `bad` | layers with a gradient, and those of them with NaN or inf |
| `nan`, `pos_inf`, `neg_inf` | elements of each kind, over all layers |
| `counts` | [[layer, NaN, +inf, −inf], ...] of the first `NAMED` bad layers, in backward order |
| `front` | the first bad layer in backward order |
| `front_kind` | "nan" or "inf": what the front holds ("inf" if both); `first_has_nan` tells whether it holds NaN at all |
| `finite_before` | finite layers that backward reached before the front, of the same optimizers |
| `pattern` | "all", "suffix" (from the front on to the input), "single" (one module alone), "scattered", "none"; `all_bad` for "all" |
| `after_growth` | whether the loss scale was doubled by the step before |
| `verdict` | "forward" (the loss was broken already), "scale" (overflow at the exit: a lower scale cures it), "layer" (a front inside) |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ampscope.probe import hooks
from ampscope.probe.observer import Observer
from ampscope.probe.recorder import Recorder
from ampscope.record.step import MEASURED, Event, EventKind, Layer, LayerStats, StepRecord

LEARN = 3
"""Steps after which the hooks are removed, if they saw anything."""
GIVE_UP = 10
"""Steps after which they are removed if they did not: gradients that are set by hand, say."""
NAMED = 50
"""Layers an event names at most."""
SUFFIX = 0.9
"""Share of the layers behind the front that are bad, from which on it counts as one flow towards the input (a branch that bypasses
the fault stays finite)."""


class Culprit(Observer):
    """Adds a `skip` or `nonfinite` event to each record with non-finite gradients or loss."""

    def __init__(self) -> None:
        self._handles = hooks.Handles()
        self._order: dict[int, int] = {}
        """Layer index → position in backward order."""
        self._steps = 0
        self._idle = 0
        self._told = 0
        self._grew = False
        self._recorder: Recorder | None = None

    def attached(self, recorder: Recorder) -> None:
        """Install the hooks."""
        self._recorder = recorder
        self._handles = hooks.post_accumulate(recorder.parameters, self._accumulated)

    def _accumulated(self, param: torch.Tensor) -> None:
        recorder = self._recorder
        index = recorder.index(param) if recorder is not None else None
        if index is not None and index not in self._order:
            self._order[index] = len(self._order)

    def after_update(self, recorder: Recorder) -> None:
        """Remove the hooks after a few steps; write the order down."""
        if self._steps >= LEARN:
            return
        if not self._order:
            self._idle += 1
            if self._idle == GIVE_UP:
                self._handles.remove()
            return
        self._steps += 1
        if self._steps == LEARN:
            self._handles.remove()
        if self._steps in (1, LEARN) and len(self._order) != self._told:
            self._told = len(self._order)
            named = [recorder.layers[i].name for i in self._order]
            text = f"backward order of {len(named)} layers learned"
            recorder.add_event(
                Event(recorder.step, "note", message=text, data={"topic": "backward_order", "layers": named})
            )

    def closed_without_update(self, recorder: Recorder) -> None:
        """The loop never updates: a step is over all the same."""
        self.after_update(recorder)

    def closed(self) -> None:
        """Remove the hooks."""
        self._handles.remove()

    def resolved(self, record: StepRecord) -> None:
        """Name the culprits of a record."""
        recorder = self._recorder
        if recorder is None:
            return
        grew, self._grew = self._grew, any(e.kind == "growth" for e in record.events)
        loss_known = "loss" in record.scalars
        loss_bad = loss_known and not math.isfinite(record.scalars["loss"])
        skipped = record.scalars.get("skipped", 0.0) > 0
        stats = record.layers
        if not (skipped or loss_bad or (stats is not None and (stats.nan + stats.pos_inf + stats.neg_inf).any())):
            return
        bad, measured = sort_out(record.layers, self._order)
        layers = recorder.layers
        data: dict[str, Any] = {
            "topic": "gradients", "loss_finite": not loss_bad, "loss_known": loss_known, "bad": len(bad), "measured": len(measured),
            "after_growth": grew, "pattern": "none",
        }  # fmt: skip
        if bad and record.layers is not None:
            data |= describe(record.layers, bad, measured, layers, self._order)
        data["verdict"] = verdict = _verdict(loss_bad, data)
        phase = "forward" if verdict == "forward" else "backward" if bad else "none"
        names = tuple(layers[i].name for i in bad[:NAMED])
        kind: EventKind = "skip" if skipped else "nonfinite"
        record.events.append(
            Event(record.step, kind, phase=phase, layers=names, message=_sentence(skipped, names, data), data=data)
        )


def sort_out(stats: LayerStats | None, order: dict[int, int]) -> tuple[list[int], list[int]]:
    """Return (bad, measured): layer indices in backward order; layers whose place is not known come last."""
    if stats is None:
        return [], []
    counts = stats.nan + stats.pos_inf + stats.neg_inf
    measured = (stats.state == MEASURED).nonzero()[0].tolist()
    if not counts.any():
        return [], measured
    measured.sort(key=lambda i: order.get(i, len(order) + i))
    return [i for i in measured if counts[i]], measured


def describe(
    stats: LayerStats, bad: Sequence[int], measured: Sequence[int], layers: Sequence[Layer], order: dict[int, int]
) -> dict[str, Any]:
    """Return what the pattern of bad layers says.

    Args:
        stats: the record's statistics.
        bad, measured: layer indices in backward order.
        layers: all layers.
        order: layer index → position in backward order, as far as known.

    """
    flagged = {layers[i].optimizer for i in bad}
    flow = [i for i in measured if layers[i].optimizer in flagged]
    wrong = set(bad)
    front = bad[0]
    at = flow.index(front)
    known = front in order
    before = [layers[i].name for i in flow[:at] if i in order] if known else []
    before = [n for n in before if module_of(n) != module_of(layers[front].name)]
    behind = flow[at:]
    modules = {module_of(layers[i].name) for i in bad}
    if len(wrong) == len(flow) or (not before and len(wrong) >= SUFFIX * len(flow)):
        pattern = "all"
    elif len(wrong) >= SUFFIX * len(behind) and (len(modules) > 1 or behind == list(bad)):
        pattern = "suffix"
    elif len(modules) == 1:
        pattern = "single"
    else:
        pattern = "scattered"
    return {
        "nan": int(stats.nan.sum()), "pos_inf": int(stats.pos_inf.sum()), "neg_inf": int(stats.neg_inf.sum()),
        "counts": [[layers[i].name, int(stats.nan[i]), int(stats.pos_inf[i]), int(stats.neg_inf[i])] for i in bad[:NAMED]],
        "front": layers[front].name, "front_kind": "inf" if stats.pos_inf[front] + stats.neg_inf[front] else "nan",
        "finite_before": before[:NAMED], "pattern": pattern, "all_bad": pattern == "all", "first_has_nan": bool(stats.nan[front]),
    }  # fmt: skip


def module_of(name: str) -> str:
    """Return the module a parameter belongs to."""
    return name.rpartition(".")[0]


def _verdict(loss_bad: bool, data: dict[str, Any]) -> str:
    if loss_bad and data["bad"]:
        return "forward"
    if loss_bad or not data["bad"]:
        return "none"
    return "scale" if data["pattern"] == "all" and data["front_kind"] == "inf" else "layer"


def _sentence(skipped: bool, names: Sequence[str], data: dict[str, Any]) -> str:
    what = "step skipped" if skipped else "non-finite values, step not skipped"
    if not names:
        return (
            f"{what}: the loss is not finite, every gradient is"
            if not data["loss_finite"]
            else f"{what}; no watched layer is non-finite"
        )
    share = f"{data['bad']} of {data['measured']} layers"
    if data["verdict"] == "forward":
        return f"{what}: the loss was not finite before backward; {share} followed"
    kind = "inf" if data["front_kind"] == "inf" else "NaN"
    if data["verdict"] == "scale":
        why = "right after the scale was doubled" if data["after_growth"] else "at this loss scale"
        return f"{what}: gradients overflow {why} ({kind} in {share})"
    return f"{what}: {kind} in {share}, first in backward: {names[0]}"
