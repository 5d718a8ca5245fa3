"""One-pass gradient statistics and their backends: numba on CPU, Triton on CUDA, torch operations anywhere else.

All give equal integer counts. `measure` starts, `StatsPending` waits.
"""

from __future__ import annotations

import importlib.util
import threading
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
        if len(self._parts) == 1 and isinstance(self._parts[0][1], np.ndarray):
            return rows.to_stats(self._parts[0][1], self._parts[0][2])
        ints = np.zeros((self._n, rows.WIDTH), np.int64)
        floats = np.zeros((self._n, 2), np.float64)
        for index, i, f, event in self._parts:
            if event is not None:
                event.synchronize()
            ints[index] = i if isinstance(i, np.ndarray) else i.cpu().numpy()
            floats[index] = f if isinstance(f, np.ndarray) else f.cpu().numpy()
        return rows.to_stats(ints, floats)


class Backends:
    """The backends of this process. numba is imported and compiled by a thread; torch operations serve until it is ready.

    Counts are equal, so nobody notices the change.
    """

    def __init__(self) -> None:
        self._kernel: Any = None
        self._thread: threading.Thread | None = None

    def warm(self, wait: bool = False) -> None:
        """Begin loading the CPU kernel; with `wait`, return when it is there (or cannot be)."""
        if self._thread is None and importlib.util.find_spec("numba") is not None:
            self._thread = threading.Thread(target=self._load, name="ampscope-warm", daemon=True)
            self._thread.start()
        if wait and self._thread is not None:
            self._thread.join()

    def _load(self) -> None:
        try:
            from ampscope.probe.stats.numba_cpu import CpuKernel, warm
        except ImportError:
            return
        kernel = CpuKernel()
        warm(kernel)
        self._kernel = kernel

    def cpu(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """Measure CPU tensors."""
        if self._kernel is None:
            return _by_torch(tensors)
        return self._kernel.measure(tensors)  # type: ignore[no-any-return]


def _by_torch(tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    plains = [rows.plain(t) for t in tensors]
    ints, reals = (t.cpu().numpy() for t in torch_ops.measure(plains))
    rows.amend(ints, reals, [(i, p.note) for i, p in enumerate(plains) if p.note is not None])
    return ints, reals


BACKENDS = Backends()
"""Holds compiled code only: a kernel is compiled once a process, whoever asks."""


def measure(tensors: Sequence[torch.Tensor]) -> StatsPending:
    """Start the statistics of gradients: any mix of devices, dtypes and layouts. Never synchronises.

    Results of CPU tensors are ready at once. The tensors may be changed in place afterwards (on the same stream).
    """
    groups: dict[torch.device, list[int]] = {}
    for i, t in enumerate(tensors):
        groups.setdefault(t.device, []).append(i)
    parts: list[tuple[list[int], Any, Any, Any]] = []
    for device, index in groups.items():
        mine = tensors if len(groups) == 1 else [tensors[i] for i in index]
        if device.type == "cpu":
            parts.append((index, *BACKENDS.cpu(mine), None))
        else:
            parts.append((index, *_by_torch(mine), None))
    return StatsPending(len(tensors), parts)
