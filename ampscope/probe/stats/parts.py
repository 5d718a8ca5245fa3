"""Results of a backend, on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ampscope.probe.stats import rows


class Part(Protocol):
    """Statistics of some of the tensors."""

    def ready(self) -> bool:
        """Whether `get` returns without waiting."""

    def get(self) -> tuple[Sequence[int], rows.Ints, rows.Reals]:
        """Wait; return positions, int64 [n, WIDTH] and float64 [n, 2] rows in the order of the positions."""


class Here:
    """Results that are on the host."""

    def __init__(self, positions: Sequence[int], ints: rows.Ints, reals: rows.Reals) -> None:
        self._found = positions, ints, reals

    def ready(self) -> bool:
        """Return True."""
        return True

    def get(self) -> tuple[Sequence[int], rows.Ints, rows.Reals]:
        """Return them."""
        return self._found


class Copying:
    """Results copied from a device without waiting: to pinned memory with an event on CUDA, on reading elsewhere."""

    def __init__(self, positions: Sequence[int], plains: Sequence[rows.Plain], *tensors: torch.Tensor) -> None:
        self._positions = positions
        self._notes = [(i, p.note) for i, p in enumerate(plains) if p.note is not None]
        self._event: Any = None
        self._tensors = tensors
        if tensors[0].device.type == "cuda":
            self._tensors = tuple(_pinned(t) for t in tensors)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensors[0].device))

    def ready(self) -> bool:
        """Whether the copy is here. Without an event nobody can tell: then `get` waits, on the writer's thread."""
        return self._event is not None and bool(self._event.query())

    def get(self) -> tuple[Sequence[int], rows.Ints, rows.Reals]:
        """Wait for the copy; return it."""
        if self._event is not None:
            self._event.synchronize()
        ints, reals = self._unpack([t.cpu().numpy() for t in self._tensors])
        rows.amend(ints, reals, self._notes)
        return self._positions, ints, reals

    def _unpack(self, arrays: list[np.ndarray[Any, Any]]) -> tuple[rows.Ints, rows.Reals]:
        return arrays[0], arrays[1].astype(np.float64)


def _pinned(t: torch.Tensor) -> torch.Tensor:
    host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
    return host.copy_(t, non_blocking=True)
