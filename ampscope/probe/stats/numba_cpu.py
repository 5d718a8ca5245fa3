"""The CPU backend: numba kernels over a table of pointers, threads taking small chunks in turn.

numba's own `parallel=True` is no option: its OpenMP layer kills a forked child, its workqueue layer aborts with two
threads.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ampscope.probe.stats import jobs, kernels, lines, rows
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
        if _ordinary(tensors):
            return self.run(list(map(_TENSOR.data_ptr, tensors)), plan_shapes(tuple(map(_SHAPE, tensors))))
        plains = [rows.plain(t) for t in tensors]
        singles = [p.tensor if p.tensor.dtype in (torch.float32, torch.float64) else p.tensor.float() for p in plains]
        layout = tuple((t.numel(), p.height, t.dtype is torch.float64) for t, p in zip(singles, plains, strict=True))
        ints, reals = self.run([t.data_ptr() for t in singles], plan(layout))
        rows.amend(ints, reals, [(i, p.note) for i, p in enumerate(plains) if p.note is not None])
        return ints, reals

    def run(self, addresses: Sequence[int], made: Plan) -> tuple[rows.Ints, rows.Reals]:
        """Return the rows of numbers in memory, laid out as planned."""
        with self._lock:
            threads = self.team.size() if self._threads is None else self._threads
            job = jobs.make_job(
                threads if made.total >= ALONE else 1,
                made.chunks, np.array(addresses, np.int64), made.shapes, made.wide, made.starts,
            )  # fmt: skip
            if len(job.out) == 1:
                jobs.member(job.header.ctypes.data)
            else:
                self.team.run(job.header.ctypes.data)
                jobs.join(job.out, job.seen, made.starts, made.shapes)
        ints, reals = job.out[0], np.zeros((len(made.sizes), 2))
        jobs.finish(
            ints,
            reals,
            job.largest,
            job.seen[0],
            made.starts,
            job.sums,
            made.chunks,
            made.shapes,
            made.sizes,
            made.wide,
        )
        return ints, reals


class Plan(NamedTuple):
    """What n tensors in memory look like, and how they are cut into m chunks; the arrays are those of `jobs.Job`."""

    total: int
    sizes: np.ndarray[Any, np.dtype[np.int64]]
    shapes: np.ndarray[Any, np.dtype[np.int64]]
    wide: np.ndarray[Any, np.dtype[np.bool_]]
    chunks: np.ndarray[Any, np.dtype[np.int64]]
    starts: np.ndarray[Any, np.dtype[np.int64]]


@functools.lru_cache(maxsize=16)
def plan_shapes(shapes: tuple[torch.Size, ...]) -> Plan:
    """Return the plan for contiguous FP32 tensors: a model's gradients have the same shapes at each step."""
    return plan(tuple((math.prod(s), s[0] if len(s) > 1 else 0, False) for s in shapes))


@functools.lru_cache(maxsize=16)
def plan(layout: tuple[tuple[int, int, bool], ...]) -> Plan:
    """Return the plan for tensors of so many elements, rows (0: no matrix), and FP64 or else FP32."""
    sizes, heights = np.array([x[0] for x in layout], np.int64), np.array([x[1] for x in layout], np.int64)
    heights[sizes == 0] = 0
    shapes = np.stack([heights, sizes // np.maximum(heights, 1)], axis=1)
    wide = np.array([x[2] for x in layout], np.bool_)
    return Plan(int(sizes.sum()), sizes, shapes, wide, jobs.table(sizes, shapes), lines.note_starts(shapes))


def stages(kernel: CpuKernel) -> Iterator[Callable[[], object]]:
    """Yield calls that compile everything, or load it from numba's cache, a few seconds each at most."""
    single, double = np.zeros(2 * kernels.BLOCK + 3, np.float32), np.zeros(4)
    layout = (single.size, 0, False), (4, 2, True)
    none = np.zeros((2, 0, rows.WIDTH), np.int64), np.zeros((2, 0), np.uint64), np.zeros(1, np.int64)
    yield lambda: plan(layout)
    yield lambda: jobs.join(*none, np.zeros((0, 2), np.int64))
    yield lambda: kernel.run([single.ctypes.data, double.ctypes.data], plan(layout))
    yield lambda: setattr(kernel, "team", find_team())
