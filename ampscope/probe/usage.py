"""Usage faults, seen from the outside: order and count of calls, version counters, dtypes, optimizer state. No synchronisation.

What is seen becomes a `note` event (topic "usage", `data["what"]` below) the first few times, or a number in `observed`. Verdicts are the
rules' business (`ampscope.analysis.rules.usage`), not this file's.
"""

from __future__ import annotations

from typing import Any

import torch

from ampscope.probe import hooks
from ampscope.probe.observer import Observer
from ampscope.probe.recorder import Recorder
from ampscope.record.step import Event

SAMPLE = 4
"""Parameters an optimizer that are looked at where looking at all would cost."""
LEARN = 3
"""Steps in which gradients' version counters are compared."""
SAID = 3
"""Times the same thing is written down."""
ROUNDING_EVERY = 20
"""Steps between two looks at whether half-precision weights still change."""


class Usage(Observer):
    """Watches how the scaler is used."""

    def __init__(self) -> None:
        self._said: dict[str, int] = {}
        self._versions: dict[int, int] = {}
        self._version_hooks = hooks.Handles()
        self._steps = 0
        self._kept: dict[int, int] = {}
        self._outside: list[str] = []
        self._inside: list[str] = []
        self._unscaled: dict[int, int] = {}
        self._open: dict[int, float] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._scales = 0
        self._accumulating = False
        self._penalty = False
        self._asked_scale = False
        self._looked: set[int] = set()

    def say(self, recorder: Recorder, what: str, message: str, layers: tuple[str, ...] = (), **data: Any) -> None:
        """Write down what was seen, the first few times."""
        count = self._said[what] = self._said.get(what, 0) + 1
        if count <= SAID:
            event = Event(recorder.window.step, "note", phase="usage", layers=layers, message=message, data={"topic": "usage", "what": what, **data})
            recorder.add_event(event)

    # When watching begins

    def attached(self, recorder: Recorder) -> None:
        """Look at parameters' dtypes; watch version counters in the first steps."""
        half = [layer.name for p, layer in zip(recorder.parameters, recorder.layers, strict=True) if p.requires_grad and p.dtype is torch.float16]
        if half:
            text = f"{len(half)} trainable parameters are float16: {', '.join(half[:3])}"
            self.say(recorder, "half_parameters", text, tuple(half[:20]), enabled=_enabled(recorder.scaler))
        self._version_hooks = hooks.post_accumulate(recorder.parameters, self._accumulated)
        device = next((p.device for p in recorder.parameters), torch.device("cpu"))
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            if major < 7:
                text = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) has no FP16 tensor cores"
                self.say(recorder, "no_tensor_cores", text, capability=[major, minor])

    def _accumulated(self, param: torch.Tensor) -> None:
        if param.grad is not None:
            self._versions[id(param)] = param.grad._version

    def closed(self) -> None:
        """Remove the hooks, forget tensors."""
        self._version_hooks.remove()
        self._before.clear()

    # The loop

    def scaled(self, recorder: Recorder, loss: Any, scaled: Any) -> None:
        """Gradients left over, and losses in half precision."""
        self._scales += 1
        first = recorder.window.scale_calls == 1
        stale = False
        for optimizer in recorder.optimizers.values():
            for p in _some(optimizer):
                grad = p.grad
                if grad is None:
                    continue
                if first and self._kept.get(id(p)) == _stamp(grad):
                    stale = True
                if id(optimizer) in self._unscaled and not _zero(grad):
                    self._accumulating = True
        if stale:
            recorder.observe("grads_kept", 1.0)
        if isinstance(loss, torch.Tensor) and loss.dtype is torch.float16 and isinstance(scaled, torch.Tensor) and scaled.dtype is torch.float16:
            self.say(recorder, "half_loss", f"the loss is float16 of shape {list(loss.shape)}: loss × scale is float16 too", shape=list(loss.shape))
        if isinstance(scaled, torch.Tensor) and _enabled(recorder.scaler):
            handle = hooks.on_backward(scaled, lambda: self._differentiated(recorder))
            if handle is not None:
                recorder.keep_until_record_closes(handle)

    def _differentiated(self, recorder: Recorder) -> None:
        if torch.is_grad_enabled():  # create_graph=True: somebody will differentiate these scaled gradients
            self._penalty = True

    def asked_scale(self) -> None:
        """`get_scale()` was called: code that divides scaled gradients by it is right."""
        self._asked_scale = True

    def before_unscale(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """Compare version counters; look at a new optimizer's state."""
        if self._steps < LEARN and self._versions:
            known = [p for p in _some(optimizer) if p.grad is not None and id(p) in self._versions]
            changed = [p for p in known if p.grad is not None and p.grad._version != self._versions[id(p)]]
            if known and len(changed) == len(known):
                recorder.observe("grads_changed_before_unscale", 1.0)
        if id(optimizer) not in self._looked:
            self._looked.add(id(optimizer))
            self._look_at_state(recorder, optimizer)
        scale = self._open.pop(id(optimizer), None)
        now = _scale(recorder)
        if scale is not None:
            if now is not None and now != scale:
                text = f"{recorder.label(optimizer)} is stepped on gradients of two loss scales, {scale:g} and {now:g}"
                self.say(recorder, "mixed_scales", text, optimizer=recorder.label(optimizer), scales=[scale, now])
            else:
                recorder.observe("update_between_microbatches", 1.0)

    def before_optimizer_step(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """Note which way the step came, and steps without gradients."""
        label = recorder.label(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if params and all(p.grad is None for p in params):
            recorder.observe(f"no_grads/{label}", 1.0)
            self.say(recorder, "no_grads", f"{label} is stepped although none of its {len(params)} parameters has a gradient", optimizer=label)
        if not recorder.in_scaler_call and _enabled(recorder.scaler):
            unscaled = id(optimizer) in recorder.window.unscaled
            self._outside.append(label)
            recorder.observe("outside_step/unscaled" if unscaled else "outside_step/scaled", 1.0)
        elif recorder.in_scaler_call:
            self._inside.append(label)
        if recorder.window.step % ROUNDING_EVERY == 0:
            self._before_rounding(params)

    def after_optimizer_step(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """Look whether half-precision weights changed; look at the state once it exists."""
        self._unscaled.pop(id(optimizer), None)
        self._after_rounding(recorder, optimizer)
        if self._steps == 0:
            self._look_at_eps(recorder, optimizer)

    def _before_rounding(self, params: list[torch.Tensor]) -> None:
        half = [p for p in params if p.dtype in (torch.float16, torch.bfloat16) and p.grad is not None and not p.grad.is_sparse]
        for p in half[:SAMPLE]:
            self._before[id(p)] = p.detach().clone()

    def _after_rounding(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        if not self._before:
            return
        for p in _params(optimizer):
            old = self._before.pop(id(p), None)
            if old is not None and p.grad is not None:
                moved = p.grad != 0
                recorder.observe("rounding/asked", moved.sum())
                recorder.observe("rounding/unchanged", (moved & (old == p.detach())).sum())

    def _look_at_state(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """A restored optimizer beside a scaler that is at its start."""
        scaler = recorder.scaler
        if not _enabled(scaler) or self._steps:
            return
        steps = 0.0
        for state in list(optimizer.state.values())[:1]:
            step = state.get("step", 0) if isinstance(state, dict) else 0
            if isinstance(step, torch.Tensor):
                step = float(step.numpy()) if step.device.type == "cpu" else 0
            steps = float(step)
        fresh = scaler._init_growth_tracker == 0
        if steps > 0 and fresh:
            text = f"{recorder.label(optimizer)} was restored at step {steps:g}, the scaler is at its initial scale {scaler._init_scale:g}"
            self.say(recorder, "optimizer_resumed", text, steps=steps, init_scale=float(scaler._init_scale))

    def _look_at_eps(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        eps = [float(g["eps"]) for g in optimizer.param_groups if isinstance(g.get("eps"), float)]
        tensors = (t for s in list(optimizer.state.values())[:SAMPLE] if isinstance(s, dict) for t in s.values())
        half = any(isinstance(t, torch.Tensor) and t.dtype is torch.float16 for t in tensors)
        if half and eps and 0 < min(eps) <= 2.0**-25:
            label = recorder.label(optimizer)
            names = tuple(x.name for x in recorder.layers if x.optimizer == label and x.dtype == "float16")
            text = f"{label} keeps its state in float16, where eps={min(eps):g} is zero"
            self.say(recorder, "optimizer_eps", text, names[:20], optimizer=label, eps=min(eps))

    def before_update(self, recorder: Recorder, new_scale: Any) -> None:
        """Sum up the step."""
        window = recorder.window
        if self._penalty and not self._asked_scale:
            recorder.observe("penalty_on_scaled", 1.0)
        self._penalty = self._asked_scale = False
        both = set(self._outside) & set(self._inside)
        if both:
            recorder.observe("outside_step/beside", 1.0)
        self._outside.clear()
        self._inside.clear()
        stepped = set(window.stepped)
        for key, optimizer in recorder.optimizers.items():
            held = [p for p in _some(optimizer) if p.grad is not None and not _zero(p.grad)]
            if key in stepped:
                self._open.pop(key, None)
            elif held and (key in window.unscaled or any(id(p) in self._versions for p in held)) and window.losses:
                scale = _scale(recorder)
                if scale is not None:
                    self._open.setdefault(key, scale)
            if key in window.unscaled and key not in stepped:
                recorder.observe("unscaled_not_stepped", 1.0)
        self._unscaled.clear()
        self._accumulating = False

    def after_unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """`unscale_` was called by the user's loop and returned."""
        self._unscaled[id(optimizer)] = self._unscaled.get(id(optimizer), 0) + 1

    def after_update(self, recorder: Recorder) -> None:
        """Remember the gradients: still there, unchanged, at the next loss, they were not cleared."""
        self._kept = {id(p): _stamp(p.grad) for o in recorder.optimizers.values() for p in _some(o) if p.grad is not None}
        self._steps += 1
        self._scales = 0
        if self._steps == LEARN:
            self._version_hooks.remove()
            self._versions.clear()

    def failed(self, recorder: Recorder, call: str, error: BaseException) -> None:
        """GradScaler raised: write down what the loop had done until then."""
        text = str(error)
        window = recorder.window
        layers: tuple[str, ...] = ()
        if "FP16 gradients" in text:
            pairs = zip(recorder.parameters, recorder.layers, strict=False)
            layers = tuple(x.name for p, x in pairs if p.grad is not None and p.grad.dtype is torch.float16)
        message = f"{call}() raised {type(error).__name__}: {text.splitlines()[0] if text else ''}"
        data = {
            "call": call, "error": type(error).__name__, "text": text[:300], "scale_calls": window.scale_calls,
            "stepped": len(window.stepped), "unscaled": len(window.unscaled), "unscale_calls": 1 + max(self._unscaled.values(), default=0),
            "accumulating": self._accumulating, "records": self._steps,
        }  # fmt: skip
        self.say(recorder, "raised", message, layers[:20], **data)


def _enabled(scaler: Any) -> bool:
    return scaler is not None and bool(scaler.is_enabled())


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _some(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return a few parameters of an optimizer, spread over it."""
    params = _params(optimizer)
    return params if len(params) <= SAMPLE else [params[i * (len(params) - 1) // (SAMPLE - 1)] for i in range(SAMPLE)]


def _stamp(grad: torch.Tensor) -> int:
    """Return a number that changes when the gradient is another tensor or was changed in place."""
    return hash((id(grad), grad._version))


def _zero(grad: torch.Tensor) -> bool:
    """Whether a gradient is known to be all zero (host tensors only)."""
    return grad.device.type == "cpu" and grad.layout is torch.strided and not bool(grad.detach().count_nonzero().numpy())


def _scale(recorder: Recorder) -> float | None:
    """Return the loss scale if it is on the host."""
    scale = getattr(recorder.scaler, "_scale", None)
    return float(scale.numpy()) if scale is not None and scale.device.type == "cpu" else None
