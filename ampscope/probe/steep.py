"""Normalisations written by hand: which operations divide by something very small, so that gradients are multiplied by its inverse.

nn.LayerNorm and its like tell their 1/σ themselves; x * rsqrt(var + eps) and x / (x.std() + eps) are seen here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from ampscope.probe.places import Place, Places
from ampscope.probe.values import host, summary

STEEP = 1e3
"""Factor from which on an operation is noted."""
LINES = 8
"""Lines that what belongs together is apart."""
NAMED = re.compile(r"norm|standard", re.IGNORECASE)


class Steep:
    """Largest factors, by place."""

    def __init__(self) -> None:
        self._found: list[tuple[Place, float]] = []

    def see(
        self,
        name: str,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        parameters: Mapping[int, str],
        places: Places,
    ) -> None:
        """Look at an operation of the forward."""
        factor = 0.0
        if name in ("rsqrt", "reciprocal"):
            factor = summary(outputs[0])[1]
        elif name == "div" and len(inputs) == 2 and host(inputs[1]) and inputs[1].data_ptr() not in parameters:
            dividend, divisor = inputs
            spread = any(s == 0 and n > 1 for s, n in zip(divisor.stride(), divisor.shape, strict=True))
            if divisor.dim() and (spread or divisor.numel() < dividend.numel()):
                small = divisor.detach().abs().float()
                least = float(torch.where(small > 0, small, torch.inf).amin().numpy())
                factor = 1.0 / least
        if factor > STEEP:
            self._found.append((places.here(), factor))

    def at(self, place: Place) -> float | None:
        """Return the largest factor near a module's place: a few lines away, or anywhere in the function of a normalisation."""
        if not place.modules:
            return None
        named = NAMED.search(" ".join([*place.types[:1], place.function]))
        near = [
            f
            for p, f in self._found
            if p.modules[:1] == place.modules[:1] and p.function == place.function and (named or _close(p, place))
        ]
        return max(near, default=None)


def _close(a: Place, b: Place) -> bool:
    (file, _, line), (other, _, number) = a.where.rpartition(":"), b.where.rpartition(":")
    return file == other and line.isdigit() and number.isdigit() and abs(int(line) - int(number)) <= LINES
