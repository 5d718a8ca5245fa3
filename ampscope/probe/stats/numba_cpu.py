"""Statistics on CPU: numba kernels over a table of pointers, two threads taking small chunks in turn.

One pass reads each element once and counts it in a 512-bin histogram of (exponent, mantissa is zero), which holds everything: zeros,
inf and NaN are bins of it too. Blocks stay in L1; four histograms side by side avoid waiting on one counter. numba's own
`parallel=True` is no option: its OpenMP layer kills a forked child, its workqueue layer aborts with two threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numba.core import cgutils, types
from numba.extending import intrinsic

from ampscope.probe.stats import rows
from ampscope.record.step import BINS

CHUNK = 1 << 15
"""Elements a thread takes at a time."""
BLOCK = 1 << 12
"""Elements of one block: 16 kB, so that its second and third loop read from L1."""
ALONE = 1 << 18
"""Elements below which a second thread costs more than it brings."""

_JIT: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), build


@intrinsic
def _take(typingctx: Any, address: Any) -> Any:
    """Atomically add one to the int64 at `address`; return what it was."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from llvmlite import ir

        at = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", at, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), build


@numba.njit(**_JIT, fastmath={"reassoc", "contract"})
def _squares32(x: Any) -> Any:
    total = 0.0
    for i in range(len(x)):
        v = np.float64(x[i])
        total += v * v
    return total


@numba.njit(**_JIT)
def _fold32(bits: Any) -> Any:
    largest = np.uint32(0)
    low = np.uint32(0)
    for i in range(len(bits)):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        largest = max(largest, magnitude)
        low |= bits[i]
    return largest, low & np.uint32(0x7FFFFF)


@numba.njit(**_JIT)
def _special32(x: Any, bits: Any, ints: Any, floats: Any) -> None:
    """Sum a block that holds inf or NaN element by element."""
    squares = 0.0
    largest = floats[0]
    low = np.uint32(0)
    for i in range(len(x)):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        if magnitude >= np.uint32(0x7F800000):
            if magnitude == np.uint32(0x7F800000):
                if bits[i] >> np.uint32(31):
                    ints[1] += 1
                else:
                    ints[0] += 1
            continue
        v = np.float64(x[i])
        squares += v * v
        largest = max(largest, abs(v))
        low |= bits[i]
    ints[2] |= np.int64(low & np.uint32(0x7FFFFF))
    floats[0] = largest
    floats[1] += squares


@numba.njit(**_JIT)
def _chunk32(address: Any, n: Any, local: Any, histogram: Any, ints: Any, floats: Any) -> None:
    """Count n FP32 elements at `address` into histogram [512], ints [+inf, -inf, low bits], floats [max, squares]."""
    bits_all = numba.carray(_pointer(address), (n,), np.uint32)
    x_all = numba.carray(_pointer(address), (n,), np.float32)
    small = n < 2048
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        bits = bits_all[begin:end]
        x = x_all[begin:end]
        size = end - begin
        before = histogram[510] + histogram[511]
        i = 0
        if small:
            pass
        else:
            special = local[0, 510] + local[0, 511] + local[1, 510] + local[1, 511] + local[2, 510] + local[2, 511] + local[3, 510] + local[3, 511]
            while i + 4 <= size:
                a = bits[i] & np.uint32(0x7FFFFFFF)
                b = bits[i + 1] & np.uint32(0x7FFFFFFF)
                c = bits[i + 2] & np.uint32(0x7FFFFFFF)
                d = bits[i + 3] & np.uint32(0x7FFFFFFF)
                local[0, ((a >> np.uint32(23)) << np.uint32(1)) | np.uint32((a & np.uint32(0x7FFFFF)) == 0)] += np.uint32(1)
                local[1, ((b >> np.uint32(23)) << np.uint32(1)) | np.uint32((b & np.uint32(0x7FFFFF)) == 0)] += np.uint32(1)
                local[2, ((c >> np.uint32(23)) << np.uint32(1)) | np.uint32((c & np.uint32(0x7FFFFF)) == 0)] += np.uint32(1)
                local[3, ((d >> np.uint32(23)) << np.uint32(1)) | np.uint32((d & np.uint32(0x7FFFFF)) == 0)] += np.uint32(1)
                i += 4
            before += special
        while i < size:
            a = bits[i] & np.uint32(0x7FFFFFFF)
            histogram[((a >> np.uint32(23)) << np.uint32(1)) | np.uint32((a & np.uint32(0x7FFFFF)) == 0)] += 1
            i += 1
        now = histogram[510] + histogram[511]
        if not small:
            now += local[0, 510] + local[0, 511] + local[1, 510] + local[1, 511] + local[2, 510] + local[2, 511] + local[3, 510] + local[3, 511]
        if now != before:
            _special32(x, bits, ints, floats)
        else:
            largest, low = _fold32(bits)
            floats[0] = max(floats[0], np.float64(np.uint32(largest).view(np.float32)))
            ints[2] |= np.int64(low)
            floats[1] += _squares32(x)
    if not small:
        for k in range(512):
            histogram[k] += np.int64(local[0, k]) + np.int64(local[1, k]) + np.int64(local[2, k]) + np.int64(local[3, k])
            local[0, k] = 0
            local[1, k] = 0
            local[2, k] = 0
            local[3, k] = 0


@numba.njit(**_JIT)
def _chunk64(address: Any, n: Any, histogram: Any, ints: Any, floats: Any) -> None:
    """The same for FP64 elements; exponents clamp to FP32's range, and a clamped element is no exact power."""
    bits = numba.carray(_pointer(address), (n,), np.uint64)
    x = numba.carray(_pointer(address), (n,), np.float64)
    low = np.int64(0)
    for i in range(n):
        magnitude = bits[i] & np.uint64(0x7FFFFFFFFFFFFFFF)
        if magnitude == 0:
            histogram[1] += 1
            continue
        raw = np.int64(magnitude >> np.uint64(52))
        fraction = np.int64(magnitude & np.uint64(0xFFFFFFFFFFFFF))
        if raw == 0x7FF:
            if fraction:
                histogram[510] += 1
            else:
                histogram[511] += 1
                if bits[i] >> np.uint64(63):
                    ints[1] += 1
                else:
                    ints[0] += 1
            continue
        exponent = raw - 1023 + 127
        exact = fraction == 0 and 1 <= exponent <= 254
        exponent = min(max(exponent, 0), 254)
        histogram[exponent * 2 + (1 if exact else 0)] += 1
        low |= (fraction >> 29) | np.int64((fraction & 0x1FFFFFFF) != 0)
        floats[1] += x[i] * x[i]
        floats[0] = max(floats[0], abs(x[i]))
    ints[2] |= low


@numba.njit(**_JIT)
def _empty_lines32(address: Any, n_rows: Any, n_cols: Any, columns: Any) -> Any:
    """Count all-zero rows and columns of an [n_rows, n_cols] FP32 matrix; `columns` is scratch of n_cols."""
    bits = numba.carray(_pointer(address), (n_rows, n_cols), np.uint32)
    columns[:n_cols] = 0
    empty_rows = 0
    for i in range(n_rows):
        any_bit = np.uint32(0)
        for j in range(n_cols):
            b = bits[i, j] & np.uint32(0x7FFFFFFF)
            any_bit |= b
            columns[j] |= b
        if any_bit == 0:
            empty_rows += 1
    empty = 0
    for j in range(n_cols):
        if columns[j] == 0:
            empty += 1
    return empty_rows, empty


@numba.njit(**_JIT)
def _work(
    counter: Any, chunks: Any, addresses: Any, sizes: Any, wide: Any, local: Any, histogram: Any, ints: Any, floats: Any
) -> None:
    """Take chunks in turn until none is left. `chunks` is [m, 2]: tensor, first element."""
    while True:
        k = _take(counter)
        if k >= len(chunks):
            return
        t = chunks[k, 0]
        begin = chunks[k, 1]
        n = min(CHUNK, sizes[t] - begin)
        if wide[t]:
            _chunk64(addresses[t] + begin * 8, n, histogram[t], ints[t], floats[t])
        else:
            _chunk32(addresses[t] + begin * 4, n, local, histogram[t], ints[t], floats[t])


@numba.njit(**_JIT)
def _table(sizes: Any) -> Any:
    """Return the chunks of tensors of these sizes, [m, 2]. Indices are int64: a tensor may have more than 2^31 elements."""
    m = 0
    for t in range(len(sizes)):
        m += (sizes[t] + CHUNK - 1) // CHUNK
    chunks = np.empty((m, 2), np.int64)
    k = 0
    for t in range(len(sizes)):
        for begin in range(0, sizes[t], CHUNK):
            chunks[k, 0] = t
            chunks[k, 1] = begin
            k += 1
    return chunks


@numba.njit(**_JIT)
def _collect(histogram: Any, ints: Any, floats: Any, sizes: Any, missing: Any, shapes: Any, addresses: Any, wide: Any, scratch: Any, out: Any, real: Any) -> None:
    """Join the threads' counts [threads, n, ...] into rows."""
    for t in range(len(sizes)):
        h = histogram[0, t]
        for w in range(1, len(histogram)):
            for k in range(512):
                h[k] += histogram[w, t, k]
        row = out[t]
        row[0] = h[1] + missing[t]
        row[1] = h[510]
        low = np.int64(0)
        largest = 0.0
        squares = 0.0
        for w in range(len(histogram)):
            row[2] += ints[w, t, 0]
            row[3] += ints[w, t, 1]
            low |= ints[w, t, 2]
            largest = max(largest, floats[w, t, 0])
            squares += floats[w, t, 1]
        row[4] = low
        row[8] = h[0]
        for k in range(1, 255):
            row[8 + k] = h[2 * k] + h[2 * k + 1]
            row[8 + 256 + k] = h[2 * k + 1]
        special = h[510] + h[511]
        real[t, 0] = np.nan if special == sizes[t] and missing[t] == 0 else largest
        real[t, 1] = squares
        n_rows, n_cols = shapes[t, 0], shapes[t, 1]
        row[5] = -1
        row[6] = -1
        if n_rows > 0:
            row[5] = 0
            row[6] = 0
            if not wide[t] and h[1] >= min(n_rows, n_cols) and n_cols > 0:
                row[5], row[6] = _empty_lines32(addresses[t], n_rows, n_cols, scratch)


class _Helper:
    """The second thread: sleeps until it is given work, dies with the process."""

    def __init__(self) -> None:
        self._start, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._args: tuple[Any, ...] = ()
        self.pid = os.getpid()
        threading.Thread(target=self._run, name="ampscope-stats", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._start.acquire()
            _work(*self._args)
            self._args = ()
            self._done.release()

    def begin(self, *args: Any) -> None:
        """Start on chunks."""
        self._args = args
        self._start.release()

    def wait(self) -> None:
        """Return when the chunks are done."""
        self._done.acquire()


class CpuKernel:
    """The CPU backend. One object a process; calls from several threads take turns."""

    def __init__(self, threads: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = min(2, cores) if threads is None else threads
        self._helper: _Helper | None = None
        self._lock = threading.Lock()
        self._local = np.zeros((2, 4, 512), np.uint32)
        self._counter = np.zeros(1, np.int64)
        self._histogram = np.zeros((2, 0, 512), np.int64)
        self._scratch = np.zeros(0, np.uint32)

    def measure(self, tensors: Sequence[torch.Tensor]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return [n, WIDTH] int64 and [n, 2] float64 rows of CPU tensors, at once."""
        n = len(tensors)
        kept: list[torch.Tensor] = []
        addresses, sizes, missing = np.empty(n, np.int64), np.empty(n, np.int64), np.zeros(n, np.int64)
        wide, shapes = np.zeros(n, np.bool_), np.zeros((n, 2), np.int64)
        float32, strided, widest = torch.float32, torch.strided, 0
        for i, t in enumerate(tensors):
            lines = True
            if t.dtype is not float32 or t.layout is not strided or type(t) is not torch.Tensor or t.is_neg():
                lines = t.layout is strided and not t.is_complex()
                t, lost = rows.plain(t)
                missing[i] = lost
                wide[i] = t.dtype is torch.float64
                kept.append(t)
            if not t.is_contiguous() and not (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) and t.stride(0) >= max(t.stride())):
                t = t.detach().contiguous()
                kept.append(t)
            size = t.numel()
            addresses[i], sizes[i] = t.data_ptr(), size
            if lines and t.dim() >= 2 and size:
                height = t.shape[0]
                shapes[i] = height, size // height
                widest = max(widest, size // height)
        with self._lock:
            out, real = self._run(addresses, sizes, missing, shapes, wide, widest)
        for i in np.flatnonzero(wide & (shapes[:, 0] > 0)):
            self._lines64(kept, int(addresses[i]), shapes[i], out[i])
        return out, real

    def _run(self, addresses: Any, sizes: Any, missing: Any, shapes: Any, wide: Any, widest: int) -> tuple[Any, Any]:
        n = len(sizes)
        if self._histogram.shape[1] < n:
            self._histogram = np.zeros((2, n, 512), np.int64)
        if len(self._scratch) < widest:
            self._scratch = np.zeros(widest, np.uint32)
        two = self._threads > 1 and int(sizes.sum()) >= ALONE
        used = 2 if two else 1
        histogram = self._histogram[:used, :n]
        histogram[:] = 0
        ints, floats = np.zeros((used, n, 3), np.int64), np.zeros((used, n, 2), np.float64)
        chunks = _table(sizes)
        self._counter[0] = 0
        counter = self._counter.ctypes.data
        if two:
            if self._helper is None or self._helper.pid != os.getpid():
                self._helper = _Helper()
            self._helper.begin(counter, chunks, addresses, sizes, wide, self._local[1], histogram[1], ints[1], floats[1])
        _work(counter, chunks, addresses, sizes, wide, self._local[0], histogram[0], ints[0], floats[0])
        if two and self._helper is not None:
            self._helper.wait()
        out, real = np.zeros((n, rows.WIDTH), np.int64), np.zeros((n, 2), np.float64)
        _collect(histogram, ints, floats, sizes, missing, shapes, addresses, wide, self._scratch, out, real)
        empty = (sizes == 0) & (missing == 0)
        real[empty, 0] = np.nan
        return out, real

    @staticmethod
    def _lines64(kept: Sequence[torch.Tensor], address: int, shape: Any, row: Any) -> None:
        tensor = next(t for t in kept if t.data_ptr() == address and t.dtype is torch.float64 and t.is_contiguous())
        zero = tensor.numpy().reshape(tuple(shape)) == 0
        row[rows.ZERO_ROWS], row[rows.ZERO_COLS] = zero.all(1).sum(), zero.all(0).sum()


def warm(kernel: CpuKernel) -> None:
    """Compile everything, or load it from numba's cache."""
    big = torch.zeros(4, 1024)
    kernel.measure([big, torch.ones(3), torch.ones(2, 2, dtype=torch.float64)])
    assert BINS == 256
