"""`ampscope.trace`: one step of your choice, operation by operation; prints and returns what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ampscope.errors import AmpscopeError
from ampscope.probe import hooks, names, report
from ampscope.probe.places import Places
from ampscope.probe.tracer import OpTracer
from ampscope.record.step import Event


@dataclass
class Traced:
    """What one traced step showed; filled when the `with` block ends.

    `events` are as in a log (docs/tracing.md), the root cause first; [] where everything was finite. `operations` counts what was seen,
    `matmuls` the forward's matrix products by dtype, `flushed_weights` the share of each weight's non-zero elements that the cast to FP16 lost.
    """

    events: list[Event] = field(default_factory=list)
    operations: int = 0
    matmuls: dict[str, int] = field(default_factory=dict)
    flushed_weights: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the same in words."""
        kinds = ", ".join(f"{n} in {k}" for k, n in sorted(self.matmuls.items())) or "none"
        lines = [f"ampscope.trace: {self.operations} operations seen; matrix products in forward: {kinds}"]
        lines += [f"  {e.message}" for e in self.events]
        lost = {n: s for n, s in self.flushed_weights.items() if s > 0.01}
        lines += [f"  {s:.0%} of the non-zero weights of {n} became zero when cast to FP16" for n, s in lost.items()]
        if not self.events:
            lines.append("  no operation made inf or NaN out of finite inputs")
        return "\n".join(lines)


class trace:
    """Trace one step: forward, loss, backward, whatever runs inside the `with` block.

        with ampscope.trace(model) as found:
            loss = loss_fn(model(x), y)
            scaler.scale(loss).backward()
        found.events[0].layers

    Prints what it found at the end and returns it as `found`; an exception inside is not swallowed. Training is unchanged: operations
    run as they were asked for. Costs time and, on CUDA, sees only what can be read without a synchronisation.

    Args:
        model: a module, or a list or dict of modules, by whose names operations are placed.
        quiet: do not print.

    Raises:
        AmpscopeError: `model` is no module, or another dispatch mode is active (its end would pop ours).
    """

    def __init__(
        self, model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module], *, quiet: bool = False
    ) -> None:
        self._models = names.as_models(model)
        self._quiet = quiet

    def __enter__(self) -> Traced:
        if _get_current_dispatch_mode_stack():
            raise AmpscopeError("trace(): another TorchDispatchMode is active; open trace() outside of it")
        parameters = {p.data_ptr(): n for n, p in names.collect(self._models) if p.device.type != "meta" and p.numel()}
        self._tracer = OpTracer(Places(self._models), parameters)
        self._found = Traced()
        self._handles = hooks.Handles()
        for root in self._models.values():
            self._handles.add(hooks.forward_pre(root, self._inputs))
        self._tracer.enter()
        return self._found

    def _inputs(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1:
            self._tracer.see_inputs((args, kwargs))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracer.leave()
        self._handles.remove()
        seen, found = self._tracer.trace, self._found
        for _, p in names.collect(self._models):
            if p.grad is not None:
                self._tracer.see_gradient(p.grad)
        if self._tracer.deferred.any:
            self._tracer.deferred.send()
            self._tracer.deferred.settle(seen)
        if not (seen.loss_bad or seen.gradients_bad):
            # Nobody told us the loss: what was born in forward and not healed into a gradient is reported as it is.
            seen.loss_bad = any(b.phase == "forward" and not (b.meant or b.harmless) for b in seen.births)
        found.events = report.step(self._tracer, 0)
        found.operations, found.matmuls = seen.ops, dict(seen.matmuls)
        found.flushed_weights = dict(seen.flushed_weights)
        if not self._quiet:
            print(found)
