"""The CUDA backend: one launch a dtype, results in one buffer, one asynchronous copy to pinned memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ampscope.probe.stats import rows
from ampscope.probe.stats import triton_kernels as kernels
from ampscope.probe.stats.parts import Copying

KINDS = {
    torch.float32: kernels.FLOAT32,
    torch.float16: kernels.FLOAT16,
    torch.bfloat16: kernels.BFLOAT16,
    torch.float64: kernels.FLOAT64,
}
SHORT, LONG = 1 << 14, 1 << 16
"""Elements of a counting task, of models below and above `LARGE`."""
LARGE = 1 << 26
LINE_TASKS = 1 << 12
"""Tasks, at most, that look for zero rows of a tensor, and for zero columns."""
Tasks = np.ndarray[Any, np.dtype[np.int64]]
REMEMBERED = 16
"""Task tables kept on the devices, one for each set of shapes."""


def plan(sizes: Sequence[int], heights: Sequence[int]) -> Tasks:
    """Return the tasks for tensors of these sizes, [m, 4] as the kernel wants them.

    All int64: a tensor may have more than 2^31 elements. Tasks that look for zero rows and columns come first, since a
    few of them are long.
    """
    chunk = SHORT if sum(sizes) < LARGE else LONG
    parts = [np.zeros((0, 4), np.int64)]
    for kind in (kernels.ROWS, kernels.COLS, kernels.COUNT):
        for i, (size, height) in enumerate(zip(sizes, heights, strict=True)):
            end = {kernels.COUNT: size, kernels.ROWS: height, kernels.COLS: size // height if height else 0}[kind]
            step = chunk if kind == kernels.COUNT else kernels.LINES * (1 + end // (kernels.LINES * LINE_TASKS))
            first = np.arange(0, end, step, dtype=np.int64)
            last = np.minimum(first + step, end)
            parts.append(np.stack([np.full_like(first, kind), np.full_like(first, i), first, last], axis=1))
    return np.concatenate(parts)


class TritonKernel:
    """The CUDA backend. One object a process."""

    def __init__(self) -> None:
        self._plans: dict[Any, tuple[Tasks, torch.Tensor]] = {}

    def measure(self, index: Sequence[int], plains: Sequence[rows.Plain]) -> Iterator[Copying]:
        """Start measuring tensors of one CUDA device, on its current stream."""
        with torch.cuda.device(plains[0].tensor.device):
            for kind, members in by_kind(plains).items():
                mine = [plains[i] for i in members]
                made, results = self.launch(kind, mine)
                yield TritonCopy([index[i] for i in members], mine, made, results)

    def launch(self, kind: int, plains: Sequence[rows.Plain]) -> tuple[Tasks, torch.Tensor]:
        """Run the kernel. Return the tasks and, on the device, the results as int64: n rows, then m sums (FP64 bits)."""
        device = plains[0].tensor.device
        sizes, heights = tuple(p.tensor.numel() for p in plains), tuple(p.height for p in plains)
        made, tasks = self._tasks(device, sizes, heights)
        n = len(plains)
        table = _upload(np.array([(p.tensor.data_ptr(), p.tensor.numel(), p.width) for p in plains]), device)
        results = torch.zeros(n * rows.WIDTH + len(made), dtype=torch.int64, device=device)
        if len(made):
            sums = results[n * rows.WIDTH :].view(torch.float64)
            kernels.measure[(len(made),)](
                table, tasks, results, sums, KIND=kind, WIDTH=rows.WIDTH,
                BLOCK=kernels.BLOCK, LINES=kernels.LINES, ACROSS=kernels.ACROSS, num_warps=kernels.WARPS,
            )  # fmt: skip
        return made, results

    def _tasks(
        self, device: torch.device, sizes: tuple[int, ...], heights: tuple[int, ...]
    ) -> tuple[Tasks, torch.Tensor]:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = device, stream, sizes, heights
        if key not in self._plans:
            if len(self._plans) >= REMEMBERED:
                self._plans.clear()
            made = plan(sizes, heights)
            self._plans[key] = made, _upload(made, device)
        return self._plans[key]


class TritonCopy(Copying):
    """Results of the kernel on their way to the host."""

    def __init__(
        self, positions: Sequence[int], plains: Sequence[rows.Plain], made: Tasks, results: torch.Tensor
    ) -> None:
        super().__init__(positions, plains, results)
        self._tasks = made
        self._heights = np.array([p.height for p in plains])
        self._sizes = np.array([p.tensor.numel() for p in plains])
        self._wide = plains[0].tensor.dtype is torch.float64

    def _unpack(self, arrays: list[np.ndarray[Any, Any]]) -> tuple[rows.Ints, rows.Reals]:
        return unpack(arrays[0], self._tasks, self._sizes, self._heights, self._wide)


def by_kind(plains: Sequence[rows.Plain]) -> dict[int, list[int]]:
    """Return which tensors go into one launch. FP8 and other formats the kernel does not read must be FP32 already."""
    groups: dict[int, list[int]] = {}
    for i, p in enumerate(plains):
        groups.setdefault(KINDS[p.tensor.dtype], []).append(i)
    return groups


def unpack(
    results: np.ndarray[Any, Any], made: Tasks, sizes: np.ndarray[Any, Any], heights: np.ndarray[Any, Any], wide: bool
) -> tuple[rows.Ints, rows.Reals]:
    """Turn what `launch` returned, on the host, into int64 [n, WIDTH] and float64 [n, 2] rows."""
    n = len(sizes)
    out = results[: n * rows.WIDTH].reshape(n, rows.WIDTH)
    pairs = out[:, kernels.PAIRS :]
    ints, reals = np.zeros((n, rows.WIDTH), np.int64), np.zeros((n, 2))
    ints[:, rows.ZEROS] = pairs[:, 1]
    ints[:, rows.NAN] = pairs[:, 510]
    ints[:, rows.POS_INF] = out[:, rows.POS_INF]
    ints[:, rows.NEG_INF] = pairs[:, 511] - out[:, rows.POS_INF]
    ints[:, rows.LOW_BITS] = out[:, rows.LOW_BITS]
    for column in (rows.ZERO_ROWS, rows.ZERO_COLS):
        ints[:, column] = np.where(heights > 0, out[:, column], -1)
    ints[:, rows.HISTOGRAM] = pairs[:, 0]
    ints[:, rows.HISTOGRAM + 1 : rows.EXACT - 1] = pairs[:, 2:510:2] + pairs[:, 3:510:2]
    ints[:, rows.EXACT + 1 : rows.WIDTH - 1] = pairs[:, 3:510:2]
    bits = out[:, rows.TOP]
    reals[:, rows.MAX] = bits.view(np.float64) if wide else bits.astype(np.uint32).view(np.float32)
    reals[pairs[:, 510:].sum(axis=1) == sizes, rows.MAX] = np.nan
    counted = made[:, 0] == kernels.COUNT
    sums = results[n * rows.WIDTH :].view(np.float64)
    reals[:, rows.SQUARES] = np.bincount(made[counted, 1], weights=sums[counted], minlength=n)
    return ints, reals


def _upload(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Copy an int64 array to a device without waiting for it."""
    host = torch.from_numpy(np.ascontiguousarray(array, np.int64))
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
