"""The armed tracer: an observer that traces a step when something is off, and a few steps when nothing is.

It arms on suspicion (a non-finite loss, NaN, skips after warm-up), opens with the next training forward, closes with that step, and
stays armed until the fault recurs: 20 steps at a time, 1 % of the run at most (the first 50 steps excepted). A light audit of the same kind runs on
the first step and then ever more rarely, and over a few evaluation forwards.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ampscope.probe import hooks, report
from ampscope.probe.observer import Observer
from ampscope.probe.places import Places
from ampscope.probe.recorder import Recorder
from ampscope.probe.tracer import OpTracer
from ampscope.record.step import Event, StepRecord

FREE_STEPS = 50
"""Steps at the start of a session in which arming is not limited: faults of a new script show there."""
BURST = 20
"""Steps the tracer stays armed at a time."""
SHARE = 0.01
"""Of the run's steps, traced at most."""
FREE_SECONDS, TIME_SHARE = 60.0, 0.05
"""Seconds of a session that traced steps may take, and beyond that their share of its time: thousands of layers that are all sick are slow."""
AUDIT_FIRST = 250
"""Steps to the second audit; the distance doubles afterwards, so that less than 0.5 % of steps are audited."""
MOST_FORWARDS = 128
"""Training forwards after which an open tracer gives up: the end of its step is not to be seen (in a compiled function, say)."""
EVAL_TRACES = 3
"""Evaluation forwards traced before they are traced only after audits."""


def callable_roots(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the module, or of a container that has no forward (ModuleDict, ModuleList) the modules in it that have one."""
    if type(module).forward is not torch.nn.Module.forward:
        return [module]
    return [m for child in module.children() for m in callable_roots(child)]


class ArmedTracer(Observer):
    """Decides when to trace, opens and closes the tracer."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._tracer: OpTracer | None = None
        self._handles = hooks.Handles()
        self._armed = 0
        self._traced = 0
        self._seconds = 0.0
        self._born = self._opened = time.monotonic()
        self._start = 0
        self._audit = True
        self._next_audit = 0
        self._interval = AUDIT_FIRST
        self._good = 0
        self._forwards = 0
        self._since_growth = 10**9
        self._evals = 0
        self._eval_tracer: OpTracer | None = None
        self._failed = False
        self._buffers_bad: set[str] = set()
        self._found: set[tuple[str, str, str]] = set()
        self._late: list[tuple[OpTracer, int, bool]] = []
        self._suspicious = False
        self._called = False
        self._modes: set[bool] = set()
        """`module.training` of this step's forwards with gradients."""
        self._trains_in_eval = False
        self._targets: list[torch.nn.Module] = []

    # Life

    def attached(self, recorder: Recorder) -> None:
        """Learn the modules' names; the first step is audited."""
        self._recorder = recorder
        self._places = Places(recorder.models)
        self._start = recorder.step
        self._next_audit = recorder.step + self._interval
        self._targets = [m for root in recorder.models.values() for m in callable_roots(root)]
        self._arm_hooks()

    def closing(self, recorder: Recorder) -> None:
        """What was traced and has not been told yet is told now."""
        self._settle(recorder, wait=True)

    def closed(self) -> None:
        """Take everything out."""
        self._close(None)
        self._handles.remove()

    def _parameters(self) -> dict[int, str]:
        assert self._recorder is not None
        pairs = zip(self._recorder.parameters, self._recorder.layers, strict=False)
        return {p.data_ptr(): layer.name for p, layer in pairs if p.device.type != "meta" and p.numel()}

    def _arm_hooks(self) -> None:
        """Wait for the next forward of a watched model."""
        assert self._recorder is not None
        self._handles.remove()
        for root in self._targets:
            self._handles.add(hooks.forward_pre(root, self._forward_begins))
            self._handles.add(hooks.forward_post(root, self._forward_ends))

    # Forward

    def _forward_begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        if torch.compiler.is_compiling() or recorder is None or not recorder.enabled:
            return
        recorder.guarded("_tell", self, "_begin", module, args, kwargs)

    def _begin(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        self._called = True
        training = torch.is_grad_enabled() and (module.training or self._trains_in_eval)
        if torch.is_grad_enabled():
            self._modes.add(module.training)
        if training:
            if self._tracer is None and (self._armed > 0 or self._audit):
                self._open()
            self._forwards += 1
            if self._tracer is not None and self._forwards > MOST_FORWARDS:
                self._close(None)
                self._audit, self._armed = False, 0
            if self._tracer is not None:
                self._tracer.passive = self._tracer.evaluating = False
                self._tracer.trace.trained = True
                self._tracer.see_inputs((args, kwargs))
        elif self._tracer is not None and not module.training:
            self._tracer.evaluating = True
        elif (
            not module.training
            and self._evals < EVAL_TRACES
            and self._tracer is None
            and not _get_current_dispatch_mode_stack()
        ):
            self._eval_tracer = OpTracer(self._places, self._parameters(), training=False)
            self._eval_tracer.see_inputs((args, kwargs))
            self._eval_tracer.enter()

    def _open(self) -> None:
        if _get_current_dispatch_mode_stack():
            return  # never above a mode of the user's: its end would pop ours
        self._forwards = 0
        self._opened = time.monotonic()
        self._tracer = OpTracer(self._places, self._parameters())
        self._tracer.enter()

    def _forward_ends(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        recorder = self._recorder
        if torch.compiler.is_compiling() or recorder is None or not recorder.enabled:
            return
        recorder.guarded("_tell", self, "_end", module, output)

    def _end(self, module: torch.nn.Module, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a recomputation that stopped early: autograd restores the mode stack, and would bring a mode left here back
        if self._tracer is not None:
            self._tracer.evaluating = False
        if self._eval_tracer is not None and not module.training:
            tracer, self._eval_tracer = self._eval_tracer, None
            tracer.leave()
            self._evals += 1
            assert self._recorder is not None
            event = report.evaluation(tracer, output, self._recorder.step)
            if event is not None:
                self._recorder.add_event(event)
            if self._evals >= EVAL_TRACES and not self._waiting():
                self._handles.remove()
        elif output is None and self._tracer is not None:
            self._close(None)  # forward raised

    # The step

    def scaled(self, recorder: Recorder, loss: Any, scaled: Any) -> None:
        """Follow the loss."""
        if self._modes:
            self._trains_in_eval = True not in self._modes
            self._modes.clear()
        if self._tracer is None:
            return
        self._tracer.passive = False
        for t in [loss] if isinstance(loss, torch.Tensor) else loss if isinstance(loss, (list, tuple)) else []:
            if isinstance(t, torch.Tensor):
                self._tracer.see_loss(t)

    def before_unscale(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """Backward is over as far as this optimizer goes; operations of the optimizer are none of ours."""
        if self._tracer is not None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self._tracer.see_gradient(p.grad)
            self._tracer.passive = True  # unscaling and stepping are none of ours; the next forward or loss goes on

    def before_update(self, recorder: Recorder, new_scale: Any) -> None:
        """Close the tracer with its step and report."""
        self._close(recorder)
        self._settle(recorder)
        if recorder.looks_bad() or self._audit_due():
            self._see_buffers(recorder)

    def failed(self, recorder: Recorder, call: str, error: BaseException) -> None:
        """The step ends here."""
        self._close(recorder)

    def _close(self, recorder: Recorder | None) -> None:
        for tracer in (self._tracer, self._eval_tracer):
            if tracer is not None:
                tracer.leave()
        tracer, self._tracer, self._eval_tracer = self._tracer, None, None
        if tracer is not None:
            self._seconds += time.monotonic() - self._opened
        if tracer is None or recorder is None:
            return
        self._traced += 1
        if self._armed:
            self._armed -= 1
        audit, self._audit = self._audit, False
        if tracer.deferred.any:
            tracer.deferred.send()
            self._late.append((tracer, recorder.step, audit))
        else:
            self._report(recorder, tracer, recorder.step, audit)

    def _report(self, recorder: Recorder, tracer: OpTracer, step: int, audit: bool) -> None:
        for event in [*report.step(tracer, step), *([report.audit(tracer, step)] if audit else [])]:
            recorder.add_event(event)

    def _settle(self, recorder: Recorder, wait: bool = False) -> None:
        """Report steps traced on a device whose flags have arrived."""
        while self._late and (wait or self._late[0][0].deferred.ready()):
            tracer, step, audit = self._late.pop(0)
            tracer.deferred.settle(tracer.trace)
            self._report(recorder, tracer, step, audit)

    def after_update(self, recorder: Recorder) -> None:
        """Arm, if the record that was just closed (or an earlier one, on a device) gave reason."""
        step = recorder.step
        if self._waiting() and not self._called:
            self._expand()
        self._called = False
        if self._audit_due():
            self._audit = True
            self._next_audit = step + self._interval
            self._interval *= 2
            self._evals = min(self._evals, EVAL_TRACES - 1)
        if self._suspicious:
            self._suspicious = False
            budget = max(FREE_STEPS, int(SHARE * (step - self._start)))
            self._armed = max(min(BURST, budget - self._traced), 0)
        if self._armed and self._seconds > max(FREE_SECONDS, TIME_SHARE * (time.monotonic() - self._born)):
            self._armed = 0
        if self._waiting():
            self._arm_hooks()
        elif self._evals >= EVAL_TRACES:
            self._handles.remove()

    def closed_without_update(self, recorder: Recorder) -> None:
        """The loop never updates: the step has ended all the same."""
        self._close(recorder)
        self.after_update(recorder)

    def _expand(self) -> None:
        """The hooked modules were not called in a whole step: the loop calls parts of them."""
        children = [c for m in self._targets for c in m.children()]
        if children and len(children) <= 64:
            self._targets = [m for c in children for m in callable_roots(c)]

    def _waiting(self) -> bool:
        return bool(self._armed or self._audit)

    def _audit_due(self) -> bool:
        return self._recorder is not None and self._recorder.step >= self._next_audit

    # Suspicion

    def resolved(self, record: StepRecord) -> None:
        """Judge a record: is it something the free record cannot explain?"""
        loss = record.scalars.get("loss", 0.0)
        nan = record.layers is not None and bool(record.layers.nan.any())
        skipped = record.scalars.get("skipped", 0.0) > 0
        self._since_growth += 1
        early = record.step - self._start < FREE_STEPS
        if (
            loss != loss
            or loss in (float("inf"), float("-inf"))
            or nan
            or (skipped and (early or self._since_growth > 1))
        ):
            self._suspicious = True
        if any(e.kind == "growth" for e in record.events):
            self._since_growth = 0

    def _see_buffers(self, recorder: Recorder) -> None:
        """Look for poisoned buffers (running statistics); on the host only."""
        bad = []
        for prefix, root in recorder.models.items():
            for name, buffer in root.named_buffers():
                if buffer.device.type == "cpu" and buffer.is_floating_point() and buffer.layout is torch.strided:
                    full = f"{prefix}.{name}" if prefix else name
                    if full not in self._buffers_bad and not bool(torch.isfinite(buffer.detach()).all().numpy()):
                        bad.append(full)
        if bad:
            self._buffers_bad.update(bad)
            modules = tuple(dict.fromkeys(b.rpartition(".")[0] for b in bad))
            text = f"buffers became non-finite: {', '.join(bad[:4])}"
            recorder.add_event(
                Event(
                    recorder.step,
                    "nonfinite",
                    phase="forward",
                    layers=modules,
                    message=text,
                    data={"topic": "buffers", "buffers": bad},
                )
            )
