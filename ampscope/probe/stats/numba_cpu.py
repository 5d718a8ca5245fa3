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
from ampscope.record.step import Bins, LayerStats, NarrowStats

ALONE = 1 << 18
"""Elements below which a second thread costs more than it brings."""

KEPT = 64 << 20
"""Bytes of rows kept for the next time at most (of 8 threads and 2,000 tensors)."""

_TENSOR = torch._C.TensorBase
_SHAPE, _DTYPE, _BYTES, _ON_CPU = (operator.attrgetter(name) for name in ("shape", "dtype", "nbytes", "is_cpu"))
_TYPES = {torch.Tensor, torch.nn.Parameter}


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Return where tensors lie if all are contiguous, in memory, and of no class of their own; else None.

    Hundreds of small ones are common: no Python loop over them, and as few questions as will do.
    """
    if not _TYPES.issuperset(map(type, tensors)) or not all(map(_ON_CPU, tensors)):
        return None
    try:
        return list(map(_TENSOR.data_ptr, tensors)) if all(map(_TENSOR.is_contiguous, tensors)) else None
    except RuntimeError:  # one is sparse, or has no storage for another reason
        return None


class CpuKernel:
    """The CPU backend. One object a process; calls from several threads take turns."""

    def __init__(self, threads: int | None = None, team: Team | None = None) -> None:
        """Work with `threads` threads of `team`: by default as many as torch uses, the others being ours."""
        self._threads = threads
        self.team = Thread() if team is None else team
        self._lock = threading.Lock()
        self._out: Any = None

    def forked(self) -> None:
        """Begin anew in a forked child: its parent's other threads and locks are not there."""
        self.team, self._lock, self._out = Thread(), threading.Lock(), None

    def measure(self, tensors: Sequence[torch.Tensor]) -> tuple[rows.Ints, rows.Reals]:
        """Return [n, WIDTH] int64 and [n, 2] float64 rows of CPU tensors, at once."""
        plains = [rows.plain(t) for t in tensors]
        singles = [p.tensor if p.tensor.dtype in (torch.float32, torch.float64) else p.tensor.float() for p in plains]
        layout = tuple((t.numel(), p.height, t.dtype is torch.float64) for t, p in zip(singles, plains, strict=True))
        ints, reals = self.run([t.data_ptr() for t in singles], plan(layout))
        rows.amend(ints, reals, [(i, p.note) for i, p in enumerate(plains) if p.note is not None])
        return ints, reals

    def measure_ordinary(self, tensors: Sequence[torch.Tensor], last: Any) -> LayerStats | None:
        """Return the statistics of contiguous FP32 tensors; None where not all are.

        `last` remembers the tensors of this place: those of as many bytes as the last time are planned as then, without further questions.
        """
        addresses = _addresses(tensors)
        made = self._plan(tensors, last) if addresses is not None else None
        if addresses is None or made is None:
            return None
        stats = self.narrow(addresses, made)
        infinite = stats.pos_inf + stats.neg_inf
        if infinite.any():  # the sign of a lazily negated tensor is the other one
            turned = [i for i in infinite.nonzero()[0].tolist() if tensors[i].is_neg()]
            stats.pos_inf[turned], stats.neg_inf[turned] = stats.neg_inf[turned], stats.pos_inf[turned]
        return stats

    def _plan(self, tensors: Sequence[torch.Tensor], last: Any) -> Plan | None:
        """Return the plan for contiguous tensors, None unless all are FP32.

        `last.sizes` are in bytes. (A dtype is asked for where they differ only: of one parameter both change together or not at all.)
        """
        sizes = list(map(_BYTES, tensors)) if last is not None else None
        if last is not None and last.plan is not None and last.sizes == sizes:
            known: Plan = last.plan
            return known
        if set(map(_DTYPE, tensors)) != {torch.float32}:
            return None
        made = plan_shapes(tuple(map(_SHAPE, tensors)))
        if last is not None:
            last.sizes, last.plan = sizes, made
        return made

    def run(self, addresses: Sequence[int], made: Plan) -> tuple[rows.Ints, rows.Reals]:
        """Return the rows of numbers in memory, laid out as planned.

        Raises:
            RuntimeError: a tensor's memory was given back (its storage resized to nothing).
        """
        with self._lock:
            job, reals = self._work(addresses, made, None)
        return job.out[0], reals

    def narrow(self, addresses: Sequence[int], made: Plan) -> LayerStats:
        """Return the statistics of the same.

        The rows stay here for the next time. Their memory is large beside that of small tensors, and new memory is slow.
        """
        with self._lock:
            before, self._out = self._out, None  # where this is interrupted, what is left there is no good
            job, reals = self._work(addresses, made, before)
            *bins, numbers = jobs.take_out(job.out, made.sizes)
            self._out = job.out if job.out.nbytes <= KEPT else None
        return NarrowStats(Bins(*bins), rows.fields(numbers, reals))

    def _work(self, addresses: Sequence[int], made: Plan, out: Any) -> tuple[jobs.Job, rows.Reals]:
        if 0 in addresses and made.sizes[np.equal(addresses, 0)].any():
            raise RuntimeError("a tensor to be measured has no memory")
        threads = self.team.size() if self._threads is None else self._threads
        team = threads if made.total >= ALONE else 1
        if out is not None and out.shape[:2] != (team, len(addresses)):
            out = None
        job = jobs.make_job(team, made.chunks, np.array(addresses, np.int64), made.shapes, made.wide, made.starts, out)
        if team == 1:
            jobs.member(job.header.ctypes.data)
        else:
            self.team.run(job.header.ctypes.data)
            jobs.join(job.out, job.seen, made.starts, made.shapes)
        reals = np.zeros((len(made.sizes), 2))
        jobs.finish(
            job.out[0], reals, job.largest, job.seen[0], made.starts, job.sums, made.chunks, made.shapes, made.sizes, made.wide,
        )  # fmt: skip
        return job, reals


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
    yield lambda: jobs.take_out(np.zeros((1, 0, rows.WIDTH), np.int64), np.zeros(0, np.int64))
    yield lambda: setattr(kernel, "team", find_team())
