"""One-pass gradient statistics and their backends: numba on CPU, Triton on CUDA, torch operations anywhere else.

All give equal integer counts. `measure` starts, `StatsPending` waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ampscope.probe.stats import rows
from ampscope.probe.stats.backends import BACKENDS
from ampscope.probe.stats.parts import Part
from ampscope.record.step import LayerStats

__all__ = ["BACKENDS", "StatsPending", "measure", "remember"]


class StatsPending:
    """Statistics of n tensors on their way from one or more devices."""

    def __init__(self, n: int, parts: Sequence[Part], done: LayerStats | None = None) -> None:
        """`done`: the statistics, where they are there already."""
        self._n, self._parts, self._done = n, parts, done

    def ready(self) -> bool:
        """Whether `resolve` returns without waiting."""
        return all(part.ready() for part in self._parts)

    def resolve(self) -> LayerStats:
        """Wait, and return the statistics in the order the tensors were given."""
        if self._done is not None:
            return self._done
        return rows.to_stats(*rows.gather(self._n, (part.get() for part in self._parts)))


def remember() -> Any:
    """Return something to pass to `measure` as `last`, at each step with the tensors of the same parameters."""
    return SimpleNamespace(sizes=None, plan=None)


def measure(tensors: Sequence[torch.Tensor], last: Any = None) -> StatsPending:
    """Start the statistics of gradients.

    Results of CPU tensors are ready at once. Nothing synchronises with a device, except that coalescing a sparse tensor
    there does.

    Args:
        tensors: any mix of devices, floating or complex dtypes, shapes, strides and layouts. They may be changed in
            place afterwards (on a CUDA device by work of the stream that is current now, or of one that waits for it).
        last: of `remember`, kept from step to step: contiguous FP32 tensors on the host are then taken for those of the step before where
            each has as many bytes.
    """
    n = len(tensors)
    here = BACKENDS.on_host(tensors, last) if n else None
    if here is not None:
        return StatsPending(n, [], here)
    places = [t.device for t in tensors]
    parts: list[Part] = []
    for device in set(places):
        mine = range(n) if places.count(device) == n else [i for i in range(n) if places[i] == device]
        parts += BACKENDS.measure(device, mine, tensors)
    return StatsPending(n, parts)
