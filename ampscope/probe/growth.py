"""How large gradients are on their way back, module by module and call by call, and which node made a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ampscope.probe.places import Place
from ampscope.probe.values import key

MOST = 4096
"""Entries kept of a step."""


class Growth:
    """Follows backward; fills `chain` with (module, largest |gradient|)."""

    def __init__(self, chain: list[tuple[str, float]]) -> None:
        self._chain = chain
        self._makers: dict[int, str] = {}
        self._visit: dict[tuple[str, str], int] = {}
        """Nodes of the module whose backward runs, by kind and line of the forward → sequence number."""

    def maker(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return the node that made the first of these gradients that is known, "" if none is."""
        return next((self._makers[key(t)] for t in tensors if key(t) in self._makers), "")

    def see(self, node: Any, number: int, place: Place | None, outputs: Sequence[torch.Tensor], largest: float) -> None:
        """Look at an operation of backward.

        Args:
            node: the autograd node that runs.
            number: its sequence number.
            place: where its forward operation belongs, if known.
            outputs: what the operation made.
            largest: their largest finite |x|.

        """
        name = str(node.name())
        for t in outputs:
            self._makers[key(t)] = name
        if place is None or not place.modules:
            return
        module, mark = place.modules[0], (name, place.where)
        again = self._visit.get(mark, number) != number  # the same line once more: another call of the module
        if self._chain and self._chain[-1][0] == module and not again:
            self._chain[-1] = (module, max(self._chain[-1][1], largest))
        elif len(self._chain) < MOST:
            self._chain.append((module, largest))
            self._visit.clear()
        self._visit[mark] = number
