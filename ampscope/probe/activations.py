"""Activation statistics: each module's outputs, and gradients with respect to them, on sampled steps.

These are the tensors that really are FP16: a parameter's `.grad` has passed through them. Forward hooks stand on leaf modules during
sampled steps only; in them the output is measured at once (an in-place operation may change it later) and a tensor hook is put on it
for its gradient. Under activation checkpointing the hook fires twice: the output is measured in forward, the gradient's hook is put on
the recomputed tensor. The records go into a stream of their own (`run.activations`), with layers named "MODULE:output", "MODULE:grad".
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ampscope.probe import hooks, names
from ampscope.probe.observer import Observer
from ampscope.probe.recorder import Recorder
from ampscope.probe.stats import StatsPending, measure
from ampscope.probe.window import Fetch
from ampscope.record.step import MEASURED, NO_GRADIENT, Event, Layer, LayerStats, StepRecord

MAX_PARTS = 20
"""Times the sizes may change (batches of another shape) before recording stops: each begins a new part of the log."""


class Pieces:
    """Statistics of one module's tensors in one step; several calls add up."""

    def __init__(self) -> None:
        self.pending: list[StatsPending] = []
        self.numel = 0
        self.shape: tuple[int, ...] = ()
        self.dtype = ""

    def take(self, tensor: torch.Tensor) -> None:
        """Start measuring one tensor."""
        self.pending.append(measure([tensor.detach()]))
        self.numel += tensor.numel() * (2 if tensor.is_complex() else 1)
        self.shape, self.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


class Activations(Observer):
    """Hooks modules on every `every`-th step. `open_stream(layers)` returns a writer for records of those layers."""

    def __init__(self, every: int, open_stream: Callable[[Sequence[Layer]], Any]) -> None:
        self._every, self._open_stream = every, open_stream
        self._handles = hooks.Handles()
        self._on_tensors = hooks.Handles()
        self._modules: list[tuple[str, torch.nn.Module]] = []
        self._pieces: dict[str, Pieces] = {}
        self._layers: list[Layer] = []
        self._writer: Any = None
        self._parts = 0
        self._off = False
        self._compiled = False

    def attached(self, recorder: Recorder) -> None:
        """Find the leaf modules; refuse compiled models."""
        for prefix, root in recorder.models.items():
            if any(type(m).__name__ == "OptimizedModule" for m in root.modules()):
                self._refuse(recorder, "hooks break or are ignored inside a compiled model")
                return
            for name, module in names.named_modules(root):
                if not any(module.children()):
                    self._modules.append((".".join(x for x in (prefix, name) if x) or type(module).__name__, module))
        self._install(recorder)

    def _refuse(self, recorder: Recorder, why: str) -> None:
        self._off = True
        self._handles.remove()
        text = f"activation statistics are off: {why}. The rest of the record and training go on"
        warnings.warn(f"ampscope: {text}.", RuntimeWarning, stacklevel=2)
        recorder.add_event(
            Event(recorder.window.step, "note", message=text, data={"topic": "activations", "off": True, "why": why})
        )

    def _install(self, recorder: Recorder) -> None:
        if self._off or recorder.window.step % self._every:
            return
        for name, module in self._modules:
            self._handles.add(hooks.forward_post(module, partial(self._after_forward, recorder, name)))

    def _after_forward(self, recorder: Recorder, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            self._compiled = True
            return
        if recorder.enabled and module.training and output is not None:
            recorder.guarded("_tell", self, "see", name, output)

    def see(self, name: str, output: Any) -> None:
        """Measure a module's outputs and wait for their gradients."""
        recomputed = torch._C._current_graph_task_id() != -1
        for tensor in tree_leaves(output):
            if (
                not isinstance(tensor, torch.Tensor)
                or not (tensor.is_floating_point() or tensor.is_complex())
                or not tensor.numel()
            ):
                continue
            if not recomputed:
                self._pieces.setdefault(f"{name}:output", Pieces()).take(tensor)
            handle = hooks.on_gradient(tensor, partial(self._gradient, f"{name}:grad"))
            if handle is not None:
                self._on_tensors.add(handle)

    def _gradient(self, name: str, grad: torch.Tensor) -> None:
        self._pieces.setdefault(name, Pieces()).take(grad)

    def before_update(self, recorder: Recorder, new_scale: Any) -> None:
        """Write the step's record."""
        self._handles.remove()
        self._on_tensors.remove()
        if self._compiled and not self._off:
            self._refuse(recorder, "hooks break or are ignored inside a compiled model")
        pieces, self._pieces = self._pieces, {}
        if self._off or not pieces:
            return
        layers = self._describe(pieces)
        if layers != self._layers:
            self._parts += 1
            if self._parts > MAX_PARTS:
                self._refuse(recorder, f"the sizes of activations changed {MAX_PARTS} times")
                return
            self._layers = layers
            if self._writer is None:
                self._writer = self._open_stream(layers)
            else:
                self._writer.set_layers(layers)
        self._writer.submit(PendingActivations(recorder, [pieces.get(x.name) for x in layers]))

    def _describe(self, pieces: dict[str, Pieces]) -> list[Layer]:
        """Return the layers, in module order, those of earlier steps kept where their size is not known to differ."""
        known = {x.name: x for x in self._layers}
        for name, p in pieces.items():
            known[name] = Layer(name, p.shape, p.numel, p.dtype)
        order = {f"{n}:{kind}": i for i, (n, _) in enumerate(self._modules) for kind in ("output", "grad")}
        return sorted(known.values(), key=lambda x: (order.get(x.name, -1), x.name.endswith(":grad")))

    def after_update(self, recorder: Recorder) -> None:
        """Put the hooks on for the next step if it is sampled."""
        self._install(recorder)

    def closed(self) -> None:
        """Remove every hook; close the stream."""
        self._handles.remove()
        self._on_tensors.remove()
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class PendingActivations:
    """One step's activation statistics, perhaps still on a device."""

    def __init__(self, recorder: Recorder, pieces: list[Pieces | None]) -> None:
        self._scale = Fetch()
        scaler = recorder.scaler
        scale = scaler._scale if scaler is not None and scaler.is_enabled() else None
        self._scale.put("loss_scale", 1.0 if scale is None else scale)
        self._scale.send()
        self._step, self._time, self._pieces = recorder.window.step, time.time(), pieces

    def ready(self) -> bool:
        """Whether `resolve` returns without waiting."""
        return self._scale.ready() and all(s.ready() for p in self._pieces if p for s in p.pending)

    def resolve(self) -> StepRecord:
        """Wait, and return the record."""
        stats = LayerStats.empty(len(self._pieces))
        for i, piece in enumerate(self._pieces):
            if piece is None:
                stats.state[i] = NO_GRADIENT
                continue
            for pending in piece.pending:
                add(stats, i, pending.resolve())
        scalars = {"loss_scale": self._scale.get()["loss_scale"], "skipped": 0.0, "micro_steps": 1.0}
        return StepRecord(self._step, self._time, scalars, layers=stats, keep_exponents=True)


def add(stats: LayerStats, i: int, one: LayerStats) -> None:
    """Add the statistics of one tensor to layer `i`: counts add up, maxima and bit ORs join."""
    fresh = stats.state[i] != MEASURED
    for name in ("zeros", "nan", "pos_inf", "neg_inf", "sum_squares", "exponents", "exact"):
        getattr(stats, name)[i] += getattr(one, name)[0]
    stats.low_bits[i] |= one.low_bits[0]
    stats.max_abs[i] = one.max_abs[0] if fresh else np.fmax(stats.max_abs[i], one.max_abs[0])
    for name in ("zero_rows", "zero_cols"):
        getattr(stats, name)[i] = -1
    stats.state[i] = MEASURED
