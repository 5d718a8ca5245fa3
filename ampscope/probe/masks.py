"""Infinities that are there on purpose, and data that only looks like them.

-inf alone is an attention mask until it is used as a number: a matrix product or a difference of it is non-finite because the data is.
Two masks of the lowest finite value add up to -inf in FP16, and -1e9 is cast to it: a mask still, which FP32 would hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ampscope.probe.operations import MATMULS, NORMS
from ampscope.probe.values import host, key

SENTINEL = -0.9 * 65504.0
"""From here down a tensor without a gradient is a mask of the lowest finite value (with a bias added, perhaps)."""
SUMS = {"add", "sub", "add_", "sub_"}
PRODUCTS = {"mul", "mul_"}


class Candidates:
    """Tensors that hold -inf and nothing else non-finite: masks, perhaps. Each has the note to make if it was data."""

    def __init__(self) -> None:
        self._notes: dict[int, Any] = {}

    def add(self, t: torch.Tensor, note: Any) -> None:
        """Take a tensor."""
        self._notes.setdefault(key(t), note)

    def used(
        self, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], nan: bool, pos: bool
    ) -> list[Any]:
        """Return the notes of inputs that an operation used as numbers: they were data. Otherwise its results are candidates too."""
        found = [self._notes[key(t)] for t in inputs if key(t) in self._notes]
        if not found:
            return []
        if pos or (nan and (name in MATMULS or any(n in name for n in NORMS))):
            self._notes = {k: n for k, n in self._notes.items() if all(n is not f for f in found)}
            return [n for i, n in enumerate(found) if all(n is not f for f in found[:i])]
        if not nan:
            for t in outputs:
                self._notes[key(t)] = found[0]
        return []


def of_cast(name: str, inputs: Sequence[torch.Tensor], nan: bool, pos: bool) -> bool:
    """Whether a cast made -inf of one value alone: -1e5 or -1e9, with which people mask. The caller keeps it as a candidate."""
    if nan or pos or name != "_to_copy" or not inputs or inputs[0].requires_grad or not host(inputs[0]):
        return False
    x = inputs[0].detach()
    lost = x[x < 1.1 * SENTINEL]
    return lost.numel() > 0 and bool((lost == lost[0]).all().numpy())


def of_masks(name: str, inputs: Sequence[torch.Tensor], nan: bool, pos: bool) -> bool:
    """Whether an operation's -inf is that of a mask: something was added to the lowest finite value, or that was multiplied."""
    alone = name in PRODUCTS and not any(t.requires_grad for t in inputs)
    if nan or pos or not (name in SUMS or alone):
        return False
    fixed = [t for t in inputs if not t.requires_grad and host(t) and t.numel()]
    return any(float(t.detach().amin().float().numpy()) <= SENTINEL for t in fixed)
