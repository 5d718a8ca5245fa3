"""What parameters, optimizers and the device say about how AMP is set up: looked at once, or now and then. No synchronisation.

Written down as `note` events of topic "usage" (`data["what"]`), and numbers in `observed`, as `ampscope.probe.usage` does:

| `what` | `observed` | seen when |
|---|---|---|
| `half_parameters` | | trainable parameters are float16, when watching begins |
| `no_tensor_cores` | | the GPU has no FP16 tensor cores |
| `optimizer_resumed` | | the optimizer comes with steps behind it, the scaler is new |
| `optimizer_eps` | `optimizer_eps/nonfinite` (weights) | the optimizer keeps its state in float16, where its epsilon is zero; weights that are not finite after its steps |
| | `rounding/asked`, `rounding/unchanged` | of half-precision weights that a step should have moved, and those it did not |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ampscope.probe.observer import Observer
from ampscope.probe.places import caller
from ampscope.probe.recorder import Recorder
from ampscope.probe.stamps import head
from ampscope.record.step import Event

NAMED = 20
"""Layers an event names at most."""
FP16_FLUSH = 2.0**-25
"""At or below it a number is zero in FP16."""
EPS_NAMES = ("eps", "epsilon")
"""What optimizers call the number that keeps them from dividing by zero."""
ROUNDING_STEPS, ROUNDING_EVERY = 3, 50
"""Half-precision weights are compared before and after each of the first steps, then every so many."""
TENSORS, ELEMENTS = 8, 1 << 14
"""Tensors, and leading elements of each, that are compared."""
HALF = (torch.float16, torch.bfloat16)


class State(Observer):
    """Looks at dtypes, optimizer state and the device."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._looked: set[int] = set()
        self._stepped: set[int] = set()
        self._before: dict[int, torch.Tensor] = {}
        self._tiny_eps: set[int] = set()
        self._fresh = False
        self._init_scale = 0.0
        self._first_step = 0

    def _say(self, what: str, message: str, layers: tuple[str, ...] = (), **data: Any) -> None:
        assert self._recorder is not None
        told = {"topic": "usage", "what": what, **data}
        step = self._recorder.window.step
        self._recorder.add_event(
            Event(step, "note", phase="usage", layers=layers[:NAMED], where=caller(), message=message, data=told)
        )

    def attached(self, recorder: Recorder) -> None:
        """Look at the parameters' dtypes, the device, and whether the scaler is new."""
        self._recorder = recorder
        self._first_step = recorder.step
        pairs = zip(recorder.parameters, recorder.layers, strict=True)
        half = tuple(layer.name for p, layer in pairs if p.requires_grad and p.dtype is torch.float16)
        scaler = recorder.scaler
        enabled = scaler is not None and bool(scaler.is_enabled())
        if half:
            self._say(
                "half_parameters",
                f"{len(half)} trainable parameters are float16: {', '.join(half[:3])}",
                half,
                enabled=enabled,
            )
        if enabled:
            self._fresh = scaler._scale is None and scaler._init_growth_tracker == 0
            self._init_scale = float(scaler._init_scale)
        device = next((p.device for p in recorder.parameters), torch.device("cpu"))
        if device.type == "cuda" and torch.version.cuda is not None:
            name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
            if not has_tensor_cores(name, major):
                text = f"{name} (compute capability {major}.{minor}) has no FP16 tensor cores"
                self._say("no_tensor_cores", text, capability=[major, minor])

    def before_unscale(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """Look at the state of an optimizer seen for the first time: has it been restored?"""
        if id(optimizer) in self._looked:
            return
        self._looked.add(id(optimizer))
        scaler = recorder.scaler
        if not self._fresh or recorder.window.step != self._first_step or scaler._init_scale != self._init_scale:
            return  # not the session's first step; or the scaler's state was loaded after watching began
        steps = _steps_behind(optimizer)
        if steps != 0:
            label = recorder.label(optimizer)
            past = "the state of earlier steps" if steps is None else f"{steps:g} step{'s'[: steps != 1]} behind it"
            text = f"{label} comes with {past}, the scaler starts at its initial scale {self._init_scale:g}"
            self._say("optimizer_resumed", text, steps=steps, init_scale=self._init_scale)

    def _looks(self, recorder: Recorder) -> bool:
        at = recorder.window.step - self._first_step
        return at < ROUNDING_STEPS or at % ROUNDING_EVERY == 0

    def before_optimizer_step(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """Keep a little of half-precision weights, to see whether the step moves them."""
        if not self._looks(recorder):
            return
        self._before = {id(p): head(p, ELEMENTS).clone() for p, _ in _half_weights(optimizer)}

    def after_optimizer_step(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """Count half-precision weights that did not move; look at an optimizer's state once there is one."""
        for p, grad in _half_weights(optimizer) if self._before else ():
            old = self._before.pop(id(p), None)
            if old is not None:
                asked = head(grad, ELEMENTS) != 0
                recorder.observe("rounding/asked", asked.sum())
                recorder.observe("rounding/unchanged", (asked & (old == head(p, ELEMENTS))).sum())
        self._before.clear()
        if id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            self._look_at_eps(recorder, optimizer)
        if id(optimizer) in self._tiny_eps:
            self._look_for_damage(recorder, optimizer)

    def closed(self) -> None:
        """Forget tensors."""
        self._before.clear()

    def _look_at_eps(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        eps = _eps(optimizer)
        if not 0 < eps <= FP16_FLUSH:
            return
        states = [s for s in list(optimizer.state.values())[:TENSORS] if isinstance(s, dict)]
        if any(isinstance(t, torch.Tensor) and t.dtype is torch.float16 for s in states for t in s.values()):
            label = recorder.label(optimizer)
            names = tuple(x.name for x in recorder.layers if x.optimizer == label)
            text = f"{label} keeps its state in float16, where eps={eps:g} is zero"
            self._tiny_eps.add(id(optimizer))
            self._say(
                "optimizer_eps", text, names, optimizer=label, eps=eps, computes_in_half=_computes_in_half(optimizer)
            )

    def _look_for_damage(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """Count weights that are not finite after a step of an optimizer whose epsilon is zero."""
        found = 0
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.layout is torch.strided and p.numel() and found < TENSORS:
                    found += 1
                    recorder.observe("optimizer_eps/nonfinite", (~torch.isfinite(head(p, ELEMENTS))).sum())


def _eps(optimizer: torch.optim.Optimizer) -> float:
    """Return an optimizer's smallest epsilon: of its groups, else its own; 0 if it has none."""
    found = [group.get(name) for group in optimizer.param_groups for name in EPS_NAMES]
    found = [x for x in found if x is not None] or [getattr(optimizer, name, None) for name in EPS_NAMES]
    numbers = [float(x) for x in found if isinstance(x, (int, float)) and not isinstance(x, bool)]
    return min(numbers, default=0.0)


def _computes_in_half(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it adds its epsilon in the state's dtype: torch's own optimizers do, but for their fused kernels. Of others nothing is known."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return type(optimizer).__module__.startswith("torch.optim") and not fused


def has_tensor_cores(name: str, major: int) -> bool:
    """Whether an NVIDIA GPU has FP16 tensor cores: from compute capability 7.0 on, but for the GeForce 16 series (and MX, T500 kin)."""
    return major > 7 or (
        major == 7
        and not any(kin in name for kin in ("GTX 16", "MX450", "MX550", "T400", "T500", "T600", "T1000", "T1200"))
    )


def _steps_behind(optimizer: torch.optim.Optimizer) -> float | None:
    """Return how many steps an optimizer's state has seen: 0 if there is no state, None if it does not say (or only on a device)."""
    for state in optimizer.state.values():
        if not isinstance(state, dict) or not state:
            continue
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            return float(step.numpy()) if step.device.type == "cpu" else None
        if isinstance(step, (int, float)):
            return float(step)
        return None if any(isinstance(t, torch.Tensor) for t in state.values()) else 0.0
    return 0.0


def _half_weights(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (parameter, gradient) of a few half-precision parameters that a step with a learning rate above zero should move."""
    found = 0
    for group in optimizer.param_groups:
        lr = group.get("lr", 1.0)
        if not isinstance(lr, torch.Tensor) and not lr > 0:
            continue
        for p in group["params"]:
            if p.dtype in HALF and p.grad is not None and p.grad.layout is torch.strided and p.numel():
                yield p, p.grad
                found += 1
                if found >= TENSORS:
                    return
