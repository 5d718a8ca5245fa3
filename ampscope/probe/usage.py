"""Usage faults, seen from the outside: order and count of calls, version counters, graph tasks. No synchronisation.

What is seen becomes a `note` event (topic "usage", `data["what"]`) the first few times, and a number in `observed` each time. Verdicts are
the rules' business (`ampscope.analysis.rules.usage`), not this file's. Beside each event: phase "usage", `where` the user's line.

| `what` | `observed` | seen when |
|---|---|---|
| `half_loss` | `scaled_loss_overflow` (elements) | the loss that went through `scale()` is float16; its product with the scale overflowed |
| | `grads_kept` | gradients of the step before were still there when this step's backward began |
| | `grads_changed_before_unscale` | in the first steps: changed in place between backward and unscaling |
| | `accumulated_since/OPTIMIZER` | gradients were accumulated over an `update()`, since this step |
| `unscale_inside` | `unscale_inside` | a scaled backward added to gradients that `unscale_` had divided already |
| `outside_step` | `outside_step/scaled`, `/unscaled`, `/beside` | `optimizer.step()` called directly, on gradients that carry the scale, that were unscaled, or beside `scaler.step()` |
| `no_grads` | `no_grads/OPTIMIZER` | an optimizer stepped although none of its parameters has a gradient |
| `penalty` | `penalty_on_scaled` | a scaled loss was differentiated with a graph, and the next loss does not divide by the scale |
| `raised` | | a scaler method raised; `data` says what the loop had done until then |
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch

from ampscope.probe import hooks, losses
from ampscope.probe.observer import Observer
from ampscope.probe.places import caller
from ampscope.probe.recorder import Recorder
from ampscope.record.step import Event

SAMPLE = 4
"""Parameters an optimizer that are looked at where looking at all would cost."""
LEARN = 3
"""Steps in which hooks tell which gradients come from scaled losses, and their version right after backward."""
SAID = 3
"""Times the same thing is written down."""
WALK = 20_000
"""Nodes of a graph that are looked at, at most, for a division by the loss scale."""

Stamp = tuple[int, int]


class Usage(Observer):
    """Watches how the scaler is used."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._handles = hooks.Handles()
        self._said: dict[str, int] = {}
        self._steps = 0
        # Learned in the first steps
        self._versions: dict[int, int] = {}
        self._scaled_tasks: set[int] = set()
        self._carries_scale: dict[int, bool] = {}
        # By optimizer (id)
        self._kept: dict[int, dict[int, Stamp]] = {}
        self._stale: set[int] = set()
        self._unscaled: dict[int, int] = {}
        self._held: dict[int, dict[int, Stamp]] = {}
        self._since: dict[int, int] = {}
        self._carried: dict[int, int] = {}
        self._inside: set[str] = set()
        self._outside: set[str] = set()
        # This step
        self._first = True
        self._accumulating = False
        self._graph_made = False
        self._asked_scale = False

    def say(self, what: str, message: str, layers: tuple[str, ...] = (), **data: Any) -> None:
        """Write down what was seen, the first few times."""
        count = self._said[what] = self._said.get(what, 0) + 1
        if count <= SAID and self._recorder is not None:
            step, where = self._recorder.window.step, caller()
            told = {"topic": "usage", "what": what, **data}
            self._recorder.add_event(
                Event(step, "note", phase="usage", layers=layers, where=where, message=message, data=told)
            )

    def attached(self, recorder: Recorder) -> None:
        """Install the hooks of the first steps."""
        self._recorder = recorder
        if _enabled(recorder):
            self._handles = hooks.post_accumulate(recorder.parameters, self._accumulated)

    def _accumulated(self, param: torch.Tensor) -> None:
        if param.grad is not None:
            self._versions[id(param)] = param.grad._version
        self._carries_scale[id(param)] = torch._C._current_graph_task_id() in self._scaled_tasks

    def closed(self) -> None:
        """Remove the hooks."""
        self._handles.remove()

    # Losses and their backward

    def scaled(self, recorder: Recorder, loss: Any, scaled: Any) -> None:
        """A loss in half precision; one that holds a penalty; and a hook for the backward to come."""
        if not _enabled(recorder):
            return
        if self._graph_made:
            self._see_penalty(recorder, loss)
        for output, part in losses.pairs(loss, scaled):
            if part.dtype is torch.float16:
                self._see_half_loss(recorder, output.detach(), part.detach())
            handle = hooks.on_backward(part, partial(recorder.guarded, "_tell", self, "_begins", recorder))
            if handle is not None:
                recorder.keep_until_record_closes(handle)

    def _see_half_loss(self, recorder: Recorder, output: torch.Tensor, part: torch.Tensor) -> None:
        shape = list(output.shape)
        self.say("half_loss", f"the loss is float16 of shape {shape}, so loss × scale is float16 too", shape=shape)
        lost = (torch.isinf(part) & torch.isfinite(output)).sum()
        if lost.device.type != "cpu" or bool(lost.numpy()):
            recorder.observe("scaled_loss_overflow", lost)

    def _see_penalty(self, recorder: Recorder, loss: Any) -> None:
        """A loss that follows gradients taken, with their graph, of a scaled one."""
        self._graph_made = False
        scale = getattr(recorder.scaler, "_scale", None)
        tensors = [t for t, _ in losses.pairs(loss, loss)]
        if self._asked_scale or scale is None or any(_divides(t, scale) for t in tensors):
            return
        recorder.observe("penalty_on_scaled", 1.0)
        text = "gradients of a scaled loss, taken with create_graph=True, enter the next loss without being divided by the scale"
        self.say("penalty", text)

    def _begins(self, recorder: Recorder) -> None:
        """A scaled loss is about to be differentiated."""
        if self._steps < LEARN:
            self._scaled_tasks.add(torch._C._current_graph_task_id())
        if torch.is_grad_enabled():  # create_graph=True: somebody will differentiate these scaled gradients
            self._graph_made, self._asked_scale = True, False
        self._accumulating = False
        for key, optimizer in recorder.optimizers.items():
            if self._first:
                kept = self._kept.get(key, {})
                unchanged = any(kept.get(id(p)) == _stamp(p) for p in _some(optimizer) if p.grad is not None)
                if unchanged and key in self._since:
                    self._carried[key] = self._since[key]
                elif unchanged:
                    self._stale.add(key)
            elif key in self._stale and not _holds(optimizer):
                self._stale.discard(key)
            if key in self._unscaled and _holds(optimizer):
                self._accumulating = True
                self._held[key] = _stamps(optimizer)
        self._first = False

    def asked_scale(self) -> None:
        """`get_scale()` was called: code that divides scaled gradients by it is right."""
        self._asked_scale = True

    # Unscaling and stepping

    def before_unscale(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """Gradients that were kept, carried over an update, or changed in place since backward."""
        key = id(optimizer)
        if key in self._stale:
            recorder.observe("grads_kept", 1.0)
        if key in self._carried:
            recorder.observe(f"accumulated_since/{recorder.label(optimizer)}", float(self._carried.pop(key)))
        if self._steps < LEARN and self._versions:
            known = [p for p in _some(optimizer) if p.grad is not None and id(p) in self._versions]
            changed = [p for p in known if p.grad is not None and p.grad._version != self._versions[id(p)]]
            if known and len(changed) == len(known):
                recorder.observe("grads_changed_before_unscale", 1.0)

    def after_unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """`unscale_` was called by the user's loop and returned."""
        self._unscaled[id(optimizer)] = self._unscaled.get(id(optimizer), 0) + 1

    def before_optimizer_step(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """Note which way the step came, and steps without gradients."""
        label, key = recorder.label(optimizer), id(optimizer)
        params = _params(optimizer)
        if params and all(p.grad is None for p in params):
            recorder.observe(f"no_grads/{label}", 1.0)
            text = f"{label} is stepped although none of its {len(params)} parameters has a gradient"
            self.say("no_grads", text, optimizer=label)
        before = self._held.pop(key, None)
        if before is not None and before != _stamps(optimizer):
            recorder.observe("unscale_inside", 1.0)
            text = f"a scaled backward added to gradients of {label} that unscale_() had divided by the scale already"
            self.say("unscale_inside", text, optimizer=label)
        if not _enabled(recorder):
            return
        if recorder.in_scaler_call:
            self._inside.add(label)
        else:
            self._stepped_outside(recorder, optimizer, label)

    def _stepped_outside(self, recorder: Recorder, optimizer: torch.optim.Optimizer, label: str) -> None:
        """`optimizer.step()` by itself: a fault if its gradients carry the scale, or have been through this scaler."""
        unscaled = id(optimizer) in recorder.window.unscaled
        known = [self._carries_scale[id(p)] for p in _params(optimizer) if id(p) in self._carries_scale]
        mine = unscaled or any(known) or label in self._inside
        if not mine or _in_a_scaler():
            return
        how = "unscaled" if unscaled or label in self._inside else "scaled"
        self._outside.add(label)
        recorder.observe(f"outside_step/{how}", 1.0)
        self.say("outside_step", f"{label}.step() was called directly", optimizer=label, how=how)

    def after_optimizer_step(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """What was unscaled has been used."""
        self._unscaled.pop(id(optimizer), None)

    # The end of a step

    def before_update(self, recorder: Recorder, new_scale: Any) -> None:
        """Sum up the step."""
        window = recorder.window
        if self._outside & self._inside:
            recorder.observe("outside_step/beside", 1.0)
        stepped = set(window.stepped)
        for key, optimizer in recorder.optimizers.items():
            if key in stepped or not any(p.grad is not None for p in _some(optimizer)):
                self._since.pop(key, None)
            else:
                self._since.setdefault(key, window.step)

    def after_update(self, recorder: Recorder) -> None:
        """Remember the gradients: still there, unchanged, at the next backward, they were not cleared."""
        self._kept = {key: _stamps(o) for key, o in recorder.optimizers.items()}
        self._next()

    def closed_without_update(self, recorder: Recorder) -> None:
        """The loop never updates (or not in this step)."""
        self._next()

    def _next(self) -> None:
        self._steps += 1
        if self._steps == LEARN:
            self._handles.remove()
            self._versions.clear()
        self._first, self._accumulating, self._graph_made, self._asked_scale = True, False, False, False
        for what in (self._stale, self._unscaled, self._held, self._carried, self._outside, self._scaled_tasks):
            what.clear()

    def failed(self, recorder: Recorder, call: str, error: BaseException) -> None:
        """GradScaler raised: write down what the loop had done until then."""
        if call == "unscale_" and recorder.in_scaler_call:
            return  # raised within step(), which fails for the same reason right away
        text, window = str(error), recorder.window
        layers: tuple[str, ...] = ()
        if "FP16 gradients" in text:
            pairs = zip(recorder.parameters, recorder.layers, strict=False)
            layers = tuple(x.name for p, x in pairs if p.grad is not None and p.grad.dtype is torch.float16)
        message = f"{call}() raised {type(error).__name__}: {text.splitlines()[0] if text else ''}"
        self.say(
            "raised",
            message,
            layers[:20],
            call=call,
            error=type(error).__name__,
            text=text[:300].strip(),
            scale_calls=recorder.micro_step,
            stepped=len(window.stepped),
            unscaled=len(window.unscaled),
            unscale_calls=1 + max(self._unscaled.values(), default=0),
            accumulating=self._accumulating,
            records=self._steps,
        )


def _enabled(recorder: Recorder) -> bool:
    return recorder.scaler is not None and bool(recorder.scaler.is_enabled())


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _some(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return a few parameters of an optimizer, spread over it."""
    params = _params(optimizer)
    return params if len(params) <= SAMPLE else [params[i * (len(params) - 1) // (SAMPLE - 1)] for i in range(SAMPLE)]


def _stamp(param: torch.Tensor) -> Stamp | None:
    """Return what changes when a parameter's gradient is another tensor or was changed in place."""
    return (id(param.grad), param.grad._version) if param.grad is not None else None


def _stamps(optimizer: torch.optim.Optimizer) -> dict[int, Stamp]:
    return {id(p): stamp for p in _some(optimizer) if (stamp := _stamp(p)) is not None}


def _holds(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's gradients are there and, as far as the host can tell, not all zero."""
    return any(p.grad is not None and not _zero(p.grad) for p in _some(optimizer))


def _zero(grad: torch.Tensor) -> bool:
    """Whether a gradient is known to be all zero (dense host tensors only)."""
    return (
        grad.device.type == "cpu" and grad.layout is torch.strided and not bool(grad.detach().count_nonzero().numpy())
    )


def _in_a_scaler() -> bool:
    """Whether a GradScaler's `step` is on the call stack: then it is another scaler's, not the watched one's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("step", "_maybe_opt_step") and frame.f_code.co_filename.endswith("grad_scaler.py"):
            return True
        frame = frame.f_back
    return False


def _divides(tensor: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether the graph of `tensor` multiplies by 1/scale or divides by the scale somewhere.

    A factor that is on a device is not looked at (that would wait for it): then any scalar factor counts.
    """
    value = float(scale.detach().numpy()) if scale.device.type == "cpu" else None
    for name, other in _factors(tensor):
        if other.device.type != "cpu" or value is None:
            return True
        number = _number(other)
        wanted = value if name.startswith("Div") else 1.0 / value if value else 0.0
        if wanted and abs(number / wanted - 1.0) < 1e-3:
            return True
    return False


_NUMPY: dict[torch.dtype, Any] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.int64: np.int64,
}


def _number(tensor: torch.Tensor) -> float:
    """Return a one-element host tensor's value; NaN for an unusual dtype.

    Read from its storage: an operation on a factor that was a Python number fails below a dispatch mode.
    """
    dtype = _NUMPY.get(tensor.dtype)
    storage = tensor.untyped_storage()
    if dtype is None or storage.nbytes() > WALK:
        return float("nan")
    raw = bytes(storage.tolist())  # type: ignore[no-untyped-call]  # torch annotates it not
    return float(np.frombuffer(raw, dtype)[tensor.storage_offset()])


def _factors(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (node name, factor) of the multiplications and divisions by a scalar in a tensor's graph."""
    todo: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while todo and len(seen) < WALK:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        name = node.name()
        if name.startswith(("MulBackward", "DivBackward")):
            for attribute in ("_saved_other", "_saved_self"):
                try:
                    saved = getattr(node, attribute, None)
                except RuntimeError:  # freed by a backward
                    continue
                if isinstance(saved, torch.Tensor) and saved.numel() == 1 and not saved.requires_grad:
                    yield name, saved
