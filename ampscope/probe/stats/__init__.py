"""One-pass gradient statistics and their backends: numba on CPU, Triton on CUDA, torch operations anywhere else.

All give equal integer counts. `measure` starts, `StatsPending` waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ampscope.probe.stats import rows, torch_ops
from ampscope.record.step import LayerStats


class StatsPending:
    """Statistics on their way from one or more devices; `parts` are (positions, integers, floats, event)."""

    def __init__(self, n: int, parts: list[tuple[list[int], Any, Any, Any]]) -> None:
        self._n, self._parts = n, parts

    def ready(self) -> bool:
        """Whether `resolve` returns without waiting."""
        return all(event is None or event.query() for _, _, _, event in self._parts)

    def resolve(self) -> LayerStats:
        """Wait, and return the statistics in the order the tensors were given."""
        ints = np.zeros((self._n, rows.WIDTH), np.int64)
        floats = np.zeros((self._n, 2), np.float64)
        for index, i, f, event in self._parts:
            if event is not None:
                event.synchronize()
            ints[index] = i if isinstance(i, np.ndarray) else i.cpu().numpy()
            floats[index] = f if isinstance(f, np.ndarray) else f.cpu().numpy()
        return rows.to_stats(ints, floats)


def measure(tensors: Sequence[torch.Tensor]) -> StatsPending:
    """Start the statistics of gradients: any mix of devices, dtypes and layouts. Never synchronises.

    Results of CPU tensors are ready at once. The tensors may be changed in place afterwards (on the same stream).
    """
    groups: dict[torch.device, list[int]] = {}
    for i, t in enumerate(tensors):
        groups.setdefault(t.device, []).append(i)
    parts: list[tuple[list[int], Any, Any, Any]] = []
    for _, index in groups.items():
        ints, floats = torch_ops.measure([tensors[i] for i in index])
        parts.append((index, ints, floats, None))
    return StatsPending(len(tensors), parts)
