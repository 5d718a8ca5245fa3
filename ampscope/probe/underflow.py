"""The underflow probe: what FP16 flushed to zero at this step's scale, measured by further backwards of the same graph.

Inside `scaler.scale(loss)`, before the scaled loss is handed back, the graph is differentiated once more at S·2^k, and for each layer
the elements that are non-zero there are remembered (the largest k at which the layer stays finite). When the gradients are complete,
those that are exactly zero in `.grad` although they were non-zero there are counted: they were flushed. With accumulation an element
counts if any micro-batch had it non-zero. `.grad`, buffers and random state are as they were; hooks that the user put on tensors of the
graph fire once more a backward. Definition: design.md §3; measured error: benchmarks/underflow_accuracy.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampscope.probe.observer import Observer
from ampscope.probe.recorder import Recorder
from ampscope.record.step import Event

LADDER = (36, 24, 18, 13, 9, 6, 4, 2, 1)
"""Exponents k tried, largest first. Each further one costs a backward; the next probe begins one above the first that was of use."""
FACTOR = 1.375
"""The scale is not a power of two times the step's: where FP16's rounding errors cancel to an exact zero, they do not at another significand."""
MAX_NODES = 200_000
"""Nodes of a graph looked at before it is taken for fit."""


class UnderflowProbe(Observer):
    """Runs every `every`-th step; where it cannot run it says so once and stays off."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._masks: dict[int, torch.Tensor] = {}
        self._finite: dict[int, torch.Tensor] = {}
        """bool, on a device: whether a layer was finite at any of the scales."""
        self._step = -1
        self._counts: dict[int, Any] = {}
        self._skip = 0
        self._off = False
        self._ready = False

    def attached(self, recorder: Recorder) -> None:
        """Refuse what cannot be probed at all."""
        if recorder.scaler is None:
            self._refuse(recorder, "there is no scaler whose scale() it could run in")
        elif any(
            "FSDP" in type(m).__name__ or "FullySharded" in type(m).__name__
            for r in recorder.models.values()
            for m in r.modules()
        ):
            self._refuse(recorder, "FSDP shards the gradients")
        elif any(hasattr(p, "_local_tensor") for p in recorder.parameters):
            self._refuse(recorder, "parameters are distributed tensors, whose backward waits for other ranks")

    def closed(self) -> None:
        """Forget tensors."""
        self._masks.clear()

    def _refuse(self, recorder: Recorder, why: str) -> None:
        self._off = True
        self._masks.clear()
        text = f"the underflow probe is off: {why}. Free estimates and training go on"
        warnings.warn(f"ampscope: {text}.", RuntimeWarning, stacklevel=2)
        recorder.add_event(
            Event(recorder.window.step, "note", message=text, data={"topic": "probe", "off": True, "why": why})
        )

    # In scale()

    def scaled(self, recorder: Recorder, loss: Any, scaled: Any) -> None:
        """Differentiate the loss at larger scales."""
        step = recorder.window.step
        if self._off or step % self._every:
            return
        if step != self._step:
            self._masks.clear()
            self._finite.clear()
            self._counts = {}
            self._step = step
        losses = [
            t
            for t in (loss if isinstance(loss, (list, tuple)) else [loss])
            if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        for tensor in losses:
            if first_of_static_graph(tensor):
                return
            why = unfit(tensor)
            if why:
                self._refuse(recorder, why)
                return
            try:
                with _disable_current_modes(), Untouched(recorder):
                    self._probe(recorder, tensor)
            except RuntimeError as error:
                self._refuse(recorder, str(error).splitlines()[0][:200])
                return

    def _probe(self, recorder: Recorder, loss: torch.Tensor) -> None:
        scaler = recorder.scaler
        wanted = [
            (i, p)
            for i, p in enumerate(recorder.parameters)
            if p.requires_grad and p.is_leaf and p.device.type != "meta"
        ]
        scale = scaler._scale if scaler.is_enabled() else None
        first, found = self._skip, len(LADDER) - 1
        recorder.observe("probe/k", float(LADDER[first]))
        everything = wanted
        for position in range(first, len(LADDER)):
            before, wanted = wanted, self._differentiate(loss, LADDER[position], scale, wanted)
            if len(wanted) < len(before) and position < found:
                found = position
            if not wanted or (wanted[0][1].device.type != "cpu" and position - first >= 3):
                break
        if found == first and not wanted:
            # All is finite at the first: the scale fell since the last probe.
            while first and not wanted:
                first -= 1
                wanted = self._differentiate(loss, LADDER[first], scale, everything)
            found = first
        self._skip = max(0, found - 1) if loss.device.type == "cpu" else 0
        size = sum(m.numel() for m in self._masks.values())
        recorder.window.fetch.put("observed:probe/mask_bytes", float(size))
        if loss.device.type == "cuda":
            recorder.window.fetch.put("observed:probe/peak_bytes", float(torch.cuda.max_memory_allocated(loss.device)))

    def _differentiate(
        self, loss: torch.Tensor, k: int, scale: torch.Tensor | None, wanted: list[tuple[int, torch.Tensor]]
    ) -> list[tuple[int, torch.Tensor]]:
        """Differentiate at 2^k times the scale; return those layers that are not known to be finite there."""
        factor = torch.full_like(loss, FACTOR * 2.0**k)
        if scale is not None:
            factor = factor * scale.to(loss.device, loss.dtype)
        grads = torch.autograd.grad(loss, [p for _, p in wanted], factor, retain_graph=True, allow_unused=True)
        left = []
        for (i, p), grad in zip(wanted, grads, strict=True):
            if grad is None or grad.layout is not torch.strided:
                continue
            grad = real(grad)
            finite = torch.isfinite(grad).all()
            nonzero = grad != 0
            if grad.device.type != "cpu":
                # Known on the device only: keep what a larger k found, where it was finite.
                self._merge(i, nonzero & finite)
                self._finite[i] = finite | self._finite[i] if i in self._finite else finite
                left.append((i, p))
            elif bool(finite.numpy()):
                self._merge(i, nonzero)
            else:
                left.append((i, p))
        return left

    def _merge(self, index: int, mask: torch.Tensor) -> None:
        old = self._masks.get(index)
        self._masks[index] = mask if old is None else old | mask

    # When gradients are complete

    def before_unscale(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """Count zeros in `.grad` that were not zero at the larger scale."""
        if self._off or recorder.window.step != self._step or not self._masks:
            return
        with torch.no_grad(), _disable_current_modes():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    index = recorder.index(p)
                    mask = self._masks.pop(index, None) if index is not None else None
                    if index is None or mask is None or p.grad is None or p.grad.layout is not torch.strided:
                        continue
                    grad = real(p.grad.detach())
                    known = torch.isfinite(grad).all()
                    if index in self._finite:
                        known = known & self._finite[index]
                    flushed = torch.where(known, ((grad == 0) & mask).sum(), -1)
                    self._counts[index] = int(flushed.numpy()) if flushed.device.type == "cpu" else flushed
        counts = self._counts
        recorder.window.probed_flushed = lambda n: collect(counts, n)


def collect(counts: dict[int, Any], n: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return int64 [n], -1 where a layer was not probed; waits for the device (any thread)."""
    out = np.full(n, -1, np.int64)
    for index, value in counts.items():
        if index < n:
            out[index] = int(value)
    return out


def real(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient as real numbers: a complex element counts as two."""
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


def unfit(loss: torch.Tensor) -> str:
    """Return why a graph must not be differentiated twice, or ""."""
    for node in nodes(loss):
        name = type(node).__name__
        cls = getattr(node, "_forward_cls", None)
        if cls is None:
            continue
        module = str(getattr(cls, "__module__", ""))
        if cls.__name__ == "CheckpointFunction":
            return "reentrant activation checkpointing refuses torch.autograd.grad; use use_reentrant=False"
        if module.startswith("torch.distributed") or cls.__name__ == "SyncBatchNorm":
            return f"the backward of {cls.__name__} waits for other ranks, which may probe more or fewer scales"
        if module.startswith("torch."):
            continue
        return f"the graph holds the custom function {cls.__name__ or name}, whose backward may change what it saved"
    return ""


def first_of_static_graph(loss: torch.Tensor) -> bool:
    """Whether the first backward of DDP with `static_graph=True` is yet to come: it asks for the all-reduce, and must be the user's."""
    for node in nodes(loss):
        if getattr(getattr(node, "_forward_cls", None), "__name__", "") == "_DDPSink":
            ddp = node.ddp_weakref()
            if ddp is not None and ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
                return True
    return False


def nodes(loss: torch.Tensor) -> Iterator[Any]:
    """Yield the autograd nodes behind a tensor, each once."""
    if loss.grad_fn is None:
        return
    seen, stack = {loss.grad_fn}, [loss.grad_fn]
    while stack and len(seen) < MAX_NODES:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


class Untouched:
    """Leaves random state and buffers as they were: a recomputation (checkpointing) updates running statistics and draws numbers."""

    def __init__(self, recorder: Recorder) -> None:
        self._buffers = [b for root in recorder.models.values() for b in root.buffers() if b.layout is torch.strided]

        self._cuda = any(p.device.type == "cuda" for p in recorder.parameters)

    def __enter__(self) -> Untouched:
        self._random = torch.get_rng_state()
        self._device_random = torch.cuda.get_rng_state_all() if self._cuda else []
        self._saved = [(b, b.detach().clone()) for b in self._buffers]
        return self

    def __exit__(self, *exc: object) -> None:
        torch.set_rng_state(self._random)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._device_random)
        for buffer, value in self._saved:
            # Version counters do not tell: batch_norm changes its running statistics without moving them.
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(buffer):  # type: ignore[attr-defined]
                buffer.copy_(value)
