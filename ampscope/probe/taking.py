"""Which tensors of a step are measured, and when."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ampscope.probe.roster import Plan, Roster
from ampscope.probe.stats import measure
from ampscope.probe.window import Taken, Window

AT_ONCE = 1 << 24
"""Elements of unscaled gradients that are scaled back at a time: it bounds the memory a skipped step off the grid takes."""

NOTHING = np.zeros(0, np.int64)


def take(window: Window, plan: Plan, back_by: torch.Tensor | None = None) -> None:
    """Start measuring the gradients of an optimizer's parameters, each parameter once a record.

    `back_by`: the scale by which gradients that are unscaled already are multiplied again.
    """
    found = [param.grad for param in plan.params]
    grads = [grad for grad in found if grad is not None]
    if back_by is None and len(grads) == len(found) and not window.measured:  # the most common case
        window.measured = set(plan.whole)
        if grads:
            window.taken.append(Taken(plan.index, NOTHING, measure(grads, plan.last)))
        return
    where = plan.places
    if not window.measured.isdisjoint(where):
        left = [k for k, at in enumerate(where) if at not in window.measured]
        found, where = [found[k] for k in left], [where[k] for k in left]
        grads = [grad for grad in found if grad is not None]
    if len(grads) < len(found):
        missing = [at for at, grad in zip(where, found, strict=True) if grad is None]
        where = [at for at, grad in zip(where, found, strict=True) if grad is not None]
        window.taken.append(Taken(NOTHING, np.array(missing, np.int64), measure([])))
    window.measured.update(where)
    if back_by is None:
        _add(window, where, grads)
        return
    begin = size = 0
    for k, grad in enumerate(grads):
        size += grad.numel()
        if size >= AT_ONCE or k == len(grads) - 1:
            scaled = [g.detach() * back_by.to(g.device) for g in grads[begin : k + 1]]
            _add(window, where[begin : k + 1], scaled)
            begin, size = k + 1, 0


def _add(window: Window, where: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
    if tensors:
        window.taken.append(Taken(np.array(where, np.int64), NOTHING, measure(tensors)))


def take_untouched(window: Window, roster: Roster) -> None:
    """Note the layers that no optimizer holds and that have no gradient (frozen ones): they were looked at."""
    without = roster.without_gradient()
    if without:
        window.taken.append(Taken(NOTHING, np.array(without, np.int64), measure([])))


def weigh(window: Window, roster: Roster) -> None:
    """Start measuring the parameters that an optimizer holds."""
    pairs = enumerate(zip(roster.layers, roster.parameters, strict=True))
    index = [i for i, (layer, p) in pairs if layer.optimizer and layer.numel and p.device.type != "meta"]
    weights = measure([roster.parameters[i] for i in index], roster.weights)
    window.weights = Taken(np.array(index, np.int64), NOTHING, weights)


def peak_memory(devices: Sequence[torch.device]) -> float:
    """Return the most bytes allocated on one of these CUDA devices."""
    # memory_stats() sorts and flattens hundreds of numbers; this is the same one, cheaper
    stats = (torch.cuda.memory_stats_as_nested_dict(d) for d in devices)
    return float(max(s["allocated_bytes"]["all"]["peak"] for s in stats))
