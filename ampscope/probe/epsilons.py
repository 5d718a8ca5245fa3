"""Epsilons that FP16 cannot hold, followed from where they are added to where they divide: clamp_min(x, 1e-12), x + 1e-8."""

from __future__ import annotations

from typing import Any

import torch

from ampscope.probe.operations import FP16_FLUSH, VIEWS_KEEP
from ampscope.probe.values import key

ADDS = ("clamp_min", "clamp", "add", "maximum", "sub")
"""Operations that people keep a denominator away from 0 with."""


class Epsilons:
    """FP16 tensors whose epsilon became zero."""

    def __init__(self) -> None:
        self._found: dict[int, float] = {}

    def of(self, t: torch.Tensor) -> float | None:
        """Return the epsilon that vanished in a tensor, or None."""
        return self._found.get(key(t))

    def see(self, name: str, args: Any, inputs: list[torch.Tensor], out: torch.Tensor) -> None:
        """Look at an operation."""
        at = key(out)
        if out.dtype is torch.float16 and name.rstrip("_") in ADDS:
            scalars = [a for a in args if isinstance(a, float) and 0 < abs(a) <= FP16_FLUSH]
            if scalars:
                self._found[at] = scalars[0]
                return
        carried = [self._found[key(t)] for t in inputs if key(t) in self._found]
        if carried and name.rstrip("_") in VIEWS_KEEP:
            self._found[at] = carried[0]
        elif name.endswith("_") or all(key(t) != at for t in inputs):  # a view (detach) changes nothing
            self._found.pop(at, None)
