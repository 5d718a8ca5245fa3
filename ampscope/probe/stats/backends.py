"""Which backend measures the tensors of a device."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ampscope.probe.stats import rows, torch_ops
from ampscope.probe.stats.parts import Copying, Here, Part
from ampscope.record.step import LayerStats

PATIENCE = 3e-8
"""Seconds an element for which the CPU kernel is waited for: what torch operations would take."""

LONGEST = 30.0
"""Seconds a fork waits for the loading at most (a few when numba compiles for the first time, else under one)."""


def _triton_errors() -> tuple[type[Exception], ...]:
    """Return what a launch may raise. The places of Triton's own errors differ between its versions."""
    places = {
        "triton.errors": "TritonError",
        "triton.compiler.errors": "CompilationError",
        "triton.runtime.errors": "OutOfResources",
    }
    found: list[type[Exception]] = [RuntimeError, OSError, subprocess.SubprocessError]
    for module, name in places.items():
        try:
            found.append(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError):
            continue
    return tuple(found)


class Backends:
    """The backends of this process.

    numba is imported, and compiles or loads its code, on a thread of its own; torch operations serve until it is ready.
    Counts are equal, so nobody notices the change.
    """

    def __init__(self) -> None:
        self._kernel: Any = None
        self._thread: threading.Thread | None = None
        self._triton: Any = False
        """The CUDA kernel, False before its first use, None if it does not work here."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._forking, after_in_child=self._forked)

    def warm(self, wait: bool = False) -> None:
        """Begin loading the CPU kernel; with `wait`, return when it is there (or cannot be)."""
        if self._thread is None:
            # Not a daemon: one of those inside the compiler when the interpreter ends would abort the process.
            self._thread = threading.Thread(target=self._load, name="ampscope-warm")
            if importlib.util.find_spec("numba") is not None:
                self._thread.start()
        if wait and self._thread.is_alive():
            self._thread.join()

    def on_host(self, tensors: Sequence[torch.Tensor], last: Any) -> LayerStats | None:
        """Measure ordinary CPU tensors at once; None where they are not all that, or there is no kernel for them.

        `last` knows what they looked like the last time.
        """
        found: LayerStats | None = None if self._kernel is None else self._kernel.measure_ordinary(tensors, last)
        return found

    def measure(self, device: torch.device, index: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[Part]:
        """Start measuring `tensors[i]` for i in `index`, all of them on `device`."""
        mine = tensors if len(index) == len(tensors) else [tensors[i] for i in index]
        if device.type == "cpu" and self._cpu_kernel(mine):
            return [Here(index, *self._kernel.measure(mine))]
        plains = [rows.plain(t) for t in mine]
        if device.type == "cuda" and self._triton is not None:
            parts = self._by_triton(index, plains)
            if parts:
                return parts
        order, *results = torch_ops.measure(plains)
        part = Copying([index[i] for i in order], [plains[i] for i in order], *results)
        return [Here(*part.get())] if device.type == "cpu" else [part]

    def _cpu_kernel(self, tensors: Sequence[torch.Tensor]) -> bool:
        if self._kernel is None:
            self.warm()
            if self._thread is not None and self._thread.is_alive():
                self._thread.join(PATIENCE * sum(t.numel() for t in tensors))
        return self._kernel is not None

    def _by_triton(self, index: Sequence[int], plains: list[rows.Plain]) -> list[Part]:
        """Launch the CUDA kernel. Where Triton is missing or cannot compile it, give it up and return nothing."""
        try:
            from ampscope.probe.stats import triton_cuda
        except ImportError:
            self._triton = None
            return []
        if self._triton is False:
            self._triton = triton_cuda.TritonKernel()
        plains = [p if p.tensor.dtype in triton_cuda.KINDS else p._replace(tensor=p.tensor.float()) for p in plains]
        try:
            return list(self._triton.measure(index, plains))
        except _triton_errors() as error:
            self._triton = None
            text = f"ampscope: Triton does not work here ({error}); torch operations measure the gradients, slower."
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return []

    def _load(self) -> None:
        try:
            from numba.core.errors import NumbaError

            from ampscope.probe.stats import numba_cpu
        except ImportError:
            return
        kernel = numba_cpu.CpuKernel()
        try:
            for stage in numba_cpu.stages(kernel):
                if not threading.main_thread().is_alive():
                    return
                stage()
        except (NumbaError, RuntimeError):  # no compiler for this processor, or switched off: torch operations serve
            return
        self._kernel = kernel

    def _forking(self) -> None:
        """Let the loading end before the process forks: a child inherits the import locks of threads it does not have."""
        if self._thread is not None and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(LONGEST)

    def _forked(self) -> None:
        """Begin anew in a forked child. Where the parent was still loading, the child stays with torch operations."""
        if self._kernel is not None:
            self._kernel.forked()


BACKENDS = Backends()
"""Holds compiled code and the threads that run it, nothing of a watched scaler: one a process."""
