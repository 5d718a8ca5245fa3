"""Usage faults, seen from the outside: order and count of calls, version counters, graph tasks. No synchronisation.

What is seen becomes a `note` event (topic "usage", `data["what"]`) the first few times, and a number in `observed` each time. Verdicts are
the rules' business (`ampscope.analysis.rules`), not this file's. Beside each event: phase "usage", `where` the user's line.

| `what` | `observed` | seen when |
|---|---|---|
| `half_loss` | `scaled_loss_overflow` (elements) | the loss that went through `scale()` is float16; its product with the scale overflowed |
| `grads_kept` | `grads_kept` | gradients of the step before were still there when this step's backward began |
| `grads_changed` | `grads_changed_before_unscale` | in the first steps: changed in place between backward and unscaling |
| | `grads_resized/OPTIMIZER` | in the first steps: a few gradients' largest element before unscaling or a bare step, over what it was right after backward |
| `accumulated` | `accumulated_since/OPTIMIZER` | gradients were accumulated over an `update()`, since this step |
| `unscale_inside` | `unscale_inside` | a scaled backward added to gradients that `unscale_` had divided already |
| `outside_step` | `outside_step/scaled`, `/unscaled`, `/beside` | `optimizer.step()` called directly, on gradients that carry the scale, that were unscaled, or beside `scaler.step()` |
| `no_grads` | `no_grads/OPTIMIZER` | an optimizer stepped although none of its parameters has a gradient |
| `penalty` | `penalty_on_scaled` | a scaled loss was differentiated with a graph, and the next loss does not divide by the scale |
| `raised` | | a scaler method raised; `data` says what the loop had done until then |
"""

from __future__ import annotations

import sys
from functools import partial
from types import FrameType
from typing import Any

import torch

from ampscope.probe import hooks, losses, stamps
from ampscope.probe.factors import divides
from ampscope.probe.observer import Observer
from ampscope.probe.places import caller
from ampscope.probe.recorder import Recorder
from ampscope.probe.stamps import Stamp
from ampscope.record.step import Event

LEARN = 3
"""Steps in which hooks tell which gradients come from scaled losses, and their version right after backward."""
SAID = 3
"""Times the same thing is written down."""


class Usage(Observer):
    """Watches how the scaler is used."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._handles = hooks.Handles()
        self._said: dict[str, int] = {}
        self._steps = 0
        # Learned in the first steps
        self._versions: dict[int, int] = {}
        self._sizes = stamps.Sizes(())
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
            self._sizes = stamps.Sizes(recorder.parameters)
            self._handles = hooks.post_accumulate(recorder.parameters, self._accumulated)

    def _accumulated(self, param: torch.Tensor) -> None:
        if param.grad is not None:
            self._versions[id(param)] = param.grad._version
            self._sizes.note(param)
        self._carries_scale[id(param)] = torch._C._current_graph_task_id() in self._scaled_tasks

    def closed(self) -> None:
        """Remove the hooks."""
        self._handles.remove()
        self._sizes.clear()

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
        if self._asked_scale or scale is None or any(divides(t, scale) for t in tensors):
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
            kept, unchanged = self._kept.get(key, {}), False
            if self._first:
                unchanged = any(
                    kept.get(id(p)) == stamps.stamp(p) for p in stamps.some(optimizer) if p.grad is not None
                )
                if unchanged and key in self._since:
                    self._carried[key] = self._since[key]
                elif unchanged:
                    self._stale.add(key)
            elif key in self._stale and not stamps.holds(optimizer):
                self._stale.discard(key)
            elif key in self._carried and self._cleared(key, optimizer):
                del self._carried[key]
            if self._first and not unchanged:
                self._unscaled.pop(key, None)  # what was divided before the last update() has been cleared
            if key not in self._unscaled:
                continue
            if stamps.holds(optimizer):
                self._accumulating = True
                self._held[key] = stamps.stamps(optimizer)
            else:
                del self._unscaled[key]
                self._held.pop(key, None)
        self._first = False

    def _cleared(self, key: int, optimizer: torch.optim.Optimizer) -> bool:
        """Whether gradients that were still there at this step's first backward have been cleared before a later one.

        On a device clearing to zero and adding look alike: then any change counts as cleared, so that nobody is accused wrongly.
        """
        if stamps.on_host(optimizer):
            return not stamps.holds(optimizer)
        kept = self._kept.get(key, {})
        return not any(kept.get(id(p)) == stamps.stamp(p) for p in stamps.some(optimizer) if p.grad is not None)

    def asked_scale(self) -> None:
        """`get_scale()` was called: code that divides scaled gradients by it is right."""
        self._asked_scale = True

    # Unscaling and stepping

    def before_unscale(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """Gradients that were kept, carried over an update, or changed in place since backward."""
        key = id(optimizer)
        label = recorder.label(optimizer)
        if key in self._stale:
            recorder.observe("grads_kept", 1.0)
            self.say("grads_kept", f"gradients of {label} were not cleared since the step before", optimizer=label)
        if key in self._carried:
            since = self._carried.pop(key)
            recorder.observe(f"accumulated_since/{label}", float(since))
            text = f"gradients of {label} were accumulated since step {since}, over update()"
            self.say("accumulated", text, optimizer=label)
        if self._steps < LEARN and self._versions:
            known = [p for p in stamps.some(optimizer) if p.grad is not None and id(p) in self._versions]
            changed = [p for p in known if p.grad is not None and p.grad._version != self._versions[id(p)]]
            if known and len(changed) == len(known):
                recorder.observe("grads_changed_before_unscale", 1.0)
                text = f"gradients of {label} were changed in place between backward and here"
                self.say("grads_changed", text, optimizer=label)
            times = self._sizes.ratio(stamps.params(optimizer))
            if times is not None:
                recorder.observe(f"grads_resized/{label}", times)

    def after_unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """`unscale_` was called by the user's loop and returned."""
        self._unscaled[id(optimizer)] = self._unscaled.get(id(optimizer), 0) + 1

    def before_optimizer_step(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """Note which way the step came, and steps without gradients."""
        label, key = recorder.label(optimizer), id(optimizer)
        params = stamps.params(optimizer)
        if params and all(p.grad is None for p in params):
            recorder.observe(f"no_grads/{label}", 1.0)
            text = f"{label} is stepped although none of its {len(params)} parameters has a gradient"
            self.say("no_grads", text, optimizer=label)
        before = self._held.pop(key, None)
        if before is not None and before != stamps.stamps(optimizer):
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
        known = [self._carries_scale[id(p)] for p in stamps.params(optimizer) if id(p) in self._carries_scale]
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
            if key in stepped or not any(p.grad is not None for p in stamps.some(optimizer)):
                self._since.pop(key, None)
            else:
                self._since.setdefault(key, window.step)

    def after_update(self, recorder: Recorder) -> None:
        """Remember the gradients: still there, unchanged, at the next backward, they were not cleared."""
        self._kept = {key: stamps.stamps(o) for key, o in recorder.optimizers.items()}
        self._next()

    def closed_without_update(self, recorder: Recorder) -> None:
        """The loop never updates (or not in this step)."""
        self._next()

    def _next(self) -> None:
        self._steps += 1
        if self._steps == LEARN:
            self._handles.remove()
            self._versions.clear()
            self._sizes.clear()
        self._first, self._accumulating, self._graph_made, self._asked_scale = True, False, False, False
        for what in (self._stale, self._held, self._carried, self._outside, self._scaled_tasks):
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


def _in_a_scaler() -> bool:
    """Whether a GradScaler's `step` is on the call stack: then it is another scaler's, not the watched one's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("step", "_maybe_opt_step") and frame.f_code.co_filename.endswith("grad_scaler.py"):
            return True
        frame = frame.f_back
    return False
