"""The CPU backend: numba kernels over a table of pointers, threads taking small chunks in turn.

numba's own `parallel=True` is no option: its OpenMP layer kills a forked child, its workqueue layer aborts with two
threads.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ampscope.probe.stats import kernels, lines, rows
from ampscope.probe.stats.team import Team, Thread, find_team

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


class CpuKernel:
    """The CPU backend. One object a process; calls from several threads take turns."""

    def __init__(self, threads: int | None = None, team: Team | None = None) -> None:
        """Work with `threads` threads of `team`: by default as many as torch uses, the others being ours."""
        self._threads = threads
        self.team = Thread() if team is None else team
        self._lock = threading.Lock()

    def forked(self) -> None:
        """Begin anew in a forked child: its parent's other threads and locks are not there."""
        self.team, self._lock = Thread(), threading.Lock()

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
        chunks, starts = kernels.table(sizes, shapes), lines.note_starts(shapes)
        threads = self.team.size() if self._threads is None else self._threads
        job = kernels.make_job(threads if sizes.sum() >= ALONE else 1, chunks, addresses, shapes, wide, starts)
        if len(job.out) == 1:
            kernels.member(job.header.ctypes.data)
        else:
            self.team.run(job.header.ctypes.data)
            kernels.join(job.out, job.seen, starts, shapes)
        ints, reals = job.out[0], np.zeros((len(sizes), 2))
        kernels.finish(ints, reals, job.largest, job.seen[0], starts, job.sums, chunks, shapes, sizes, wide)
        return ints, reals


def stages(kernel: CpuKernel) -> Iterator[Callable[[], object]]:
    """Yield calls that compile everything, or load it from numba's cache, a few seconds each at most."""
    single, double = np.zeros(2 * kernels.BLOCK + 3, np.float32), np.zeros(4)
    sizes, shapes = np.array([single.size, 4]), np.array([[single.size, 1], [2, 2]])
    nothing = (
        np.zeros((2, 0, rows.WIDTH), np.int64),
        np.zeros((2, 0), np.uint64),
        np.zeros(1, np.int64),
        shapes[:0].copy(),
    )
    yield lambda: kernels.table(sizes, shapes)
    yield lambda: lines.note_starts(shapes)
    yield lambda: kernels.join(*nothing)
    yield lambda: kernel.run([single.ctypes.data, double.ctypes.data], sizes, shapes[:, 0], [1])
    yield lambda: setattr(kernel, "team", find_team())
