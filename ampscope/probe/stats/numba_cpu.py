"""The CPU backend: numba kernels over a table of pointers, two threads taking small chunks in turn.

numba's own `parallel=True` is no option: its OpenMP layer kills a forked child, its workqueue layer aborts with two
threads.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ampscope.probe.stats import kernels, lines, rows

ALONE = 1 << 18
"""Elements below which a second thread costs more than it brings."""


_TENSOR = torch._C.TensorBase
_SHAPE, _DTYPE, _LAYOUT = (operator.attrgetter(name) for name in ("shape", "dtype", "layout"))


def _ordinary(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are contiguous FP32 tensors. Hundreds of small ones are common: no Python loop over them."""
    return (
        set(map(type, tensors)) == {torch.Tensor}
        and set(map(_DTYPE, tensors)) == {torch.float32}
        and set(map(_LAYOUT, tensors)) == {torch.strided}
        and all(map(_TENSOR.is_contiguous, tensors))
        and not any(map(_TENSOR.is_neg, tensors))
    )


class _Helper:
    """The second thread: sleeps until it is given work, dies with the process."""

    def __init__(self) -> None:
        self._start, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._call: tuple[Callable[..., None], tuple[Any, ...]] | None = None
        self.alive = True
        threading.Thread(target=self._run, name="ampscope-stats", daemon=True).start()

    def _run(self) -> None:
        while self.alive:
            self._start.acquire()
            self.alive = False  # until the call has returned
            try:
                if self._call is not None:
                    function, args = self._call
                    function(*args)
                    self.alive = True
            finally:
                self._call = None
                self._done.release()

    def begin(self, function: Callable[..., None], *args: Any) -> None:
        """Start a call."""
        self._call = function, args
        self._start.release()

    def wait(self) -> None:
        """Return when the call has."""
        self._done.acquire()


class CpuKernel:
    """The CPU backend. One object a process; calls from several threads take turns."""

    def __init__(self, threads: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = min(2, cores) if threads is None else threads
        self.forked()

    def forked(self) -> None:
        """Begin anew in a forked child: its parent's second thread and locks are not there."""
        self._helper: _Helper | None = None
        self._lock = threading.Lock()
        self._counter = np.zeros(1, np.int64)

    def measure(self, tensors: Sequence[torch.Tensor]) -> tuple[rows.Ints, rows.Reals]:
        """Return [n, WIDTH] int64 and [n, 2] float64 rows of CPU tensors, at once."""
        n = len(tensors)
        if _ordinary(tensors):
            heights = np.fromiter((s[0] if len(s) > 1 else 0 for s in map(_SHAPE, tensors)), np.int64, n)
            addresses = np.fromiter(map(_TENSOR.data_ptr, tensors), np.int64, n)
            return self.run(addresses, np.fromiter(map(_TENSOR.numel, tensors), np.int64, n), heights)
        plains = [rows.plain(t) for t in tensors]
        doubles = [i for i, p in enumerate(plains) if p.tensor.dtype is torch.float64]
        singles = [p.tensor if p.tensor.dtype in (torch.float32, torch.float64) else p.tensor.float() for p in plains]
        ints, reals = self.run(
            [t.data_ptr() for t in singles], [t.numel() for t in singles], [p.height for p in plains], doubles
        )
        rows.amend(ints, reals, [(i, p.note) for i, p in enumerate(plains) if p.note is not None])
        return ints, reals

    def run(
        self, addresses: npt.ArrayLike, sizes: npt.ArrayLike, heights: npt.ArrayLike, doubles: Sequence[int] = ()
    ) -> tuple[rows.Ints, rows.Reals]:
        """Return the rows of FP32 numbers in memory (FP64 at the positions `doubles`).

        Where the height is not 0 the numbers are a matrix of so many rows.
        """
        where, size, height = np.array(addresses, np.int64), np.array(sizes, np.int64), np.array(heights, np.int64)
        wide = np.zeros(len(size), np.bool_)
        wide[list(doubles)] = True
        height[size == 0] = 0
        shapes = np.stack([height, size // np.maximum(height, 1)], axis=1)
        with self._lock:
            return self._run(where, size, shapes, wide)

    def _run(self, addresses: Any, sizes: Any, shapes: Any, wide: Any) -> tuple[rows.Ints, rows.Reals]:
        n, used = len(sizes), 2 if self._threads > 1 and sizes.sum() >= ALONE else 1
        chunks, starts = kernels.table(sizes, shapes), lines.note_starts(shapes)
        out, largest = np.zeros((used, n, rows.WIDTH), np.int64), np.zeros((used, n, 1))
        seen, sums = np.zeros((used, starts[-1]), np.uint64), np.zeros(len(chunks))
        self._share(
            used,
            kernels.work,
            lambda w: (chunks, addresses, shapes, wide, out[w], largest[w], seen[w], starts, sums),
        )
        ints, reals = out[0], np.zeros((n, 2))
        if used == 2:
            kernels.join(ints, out[1], seen[0], seen[1], starts, shapes)
        kernels.finish(ints, reals, largest, seen[0], starts, sums, chunks, shapes, sizes, wide)
        return ints, reals

    def _share(self, threads: int, function: Callable[..., None], args: Callable[[int], tuple[Any, ...]]) -> None:
        """Run a function that takes work in turn, here and perhaps in the second thread."""
        self._counter[0] = 0
        counter = self._counter.ctypes.data
        if threads == 2:
            if self._helper is None or not self._helper.alive:
                self._helper = _Helper()
            self._helper.begin(function, counter, *args(1))
        function(counter, *args(0))
        if threads == 2 and self._helper is not None:
            self._helper.wait()


def stages(kernel: CpuKernel) -> Iterator[Callable[[], object]]:
    """Yield calls that compile everything, or load it from numba's cache, a few seconds each at most."""
    single, double = np.zeros(2 * kernels.BLOCK + 3, np.float32), np.zeros(4)
    sizes, shapes, wide = np.array([single.size, 4]), np.array([[single.size, 1], [2, 2]]), np.array([False, True])
    out, seen, starts = np.zeros((2, 2, rows.WIDTH), np.int64), np.zeros((2, 0), np.uint64), np.zeros(3, np.int64)
    chunks, nothing = kernels.table, np.zeros_like(shapes)
    yield lambda: chunks(sizes, shapes)
    yield lambda: lines.note_starts(shapes)
    yield lambda: kernels.join(out[0], out[1], seen[0], seen[1], starts, nothing)
    yield lambda: kernels.finish(
        out[0],
        np.zeros((2, 2)),
        np.zeros((2, 2, 1)),
        seen[0],
        starts,
        np.zeros(2),
        chunks(sizes, nothing),
        nothing,
        sizes,
        wide,
    )
    yield lambda: kernel.run([single.ctypes.data, double.ctypes.data], sizes, shapes[:, 0], [1])
