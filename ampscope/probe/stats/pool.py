"""Memory for results that is used again: fresh memory from the system costs more than the counting of small tensors."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

LARGEST = 16 << 20
"""Bytes of an array from which on memory is left to the system."""
MOST = 32 << 20
"""Bytes kept for later."""


class Pool:
    """Gives arrays of zeros, and takes their memory back when nothing refers to them or to views of them any more. Any thread."""

    def __init__(self) -> None:
        self._free: dict[int, list[bytearray]] = {}

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        """Return an array of zeros."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if not 0 < size <= LARGEST:
            return np.zeros(shape, dtype)
        free = self._free.get(size)
        if free is None:  # tensors of another shape, or a layer less: what was kept is of no use
            if len(self._free) >= 8:
                self._free = {}
            free = self._free.setdefault(size, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = bytearray(size)
            whole = np.frombuffer(memory, dtype)
        else:
            whole = np.frombuffer(memory, dtype)
            whole.fill(0)
        # Every view's base is `whole` (NumPy joins chains of views), so that it dies with the last of them.
        back = weakref.finalize(whole, _give_back, free, memory)
        back.atexit = False
        return whole.reshape(shape)


def _give_back(free: list[bytearray], memory: bytearray) -> None:
    if (len(free) + 1) * len(memory) <= MOST:
        free.append(memory)
