"""Whether a loss divides by the loss scale: the scalar factors in its graph. No synchronisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

WALK = 20_000
"""Nodes of a graph that are looked at, at most, for a division by the loss scale."""


def divides(tensor: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether the graph of `tensor` multiplies by 1/scale or divides by the scale somewhere.

    A factor that is on a device is not looked at (that would wait for it): then any scalar factor counts.
    """
    value = float(scale.detach().numpy()) if scale.device.type == "cpu" else None
    for name, other in _factors(tensor):
        if other.device.type != "cpu" or value is None:
            return True
        number = _number(other)
        wanted = value if name.startswith("Div") else 1.0 / value if value else 0.0
        if wanted and abs(number / wanted - 1.0) < 1e-3:
            return True
    return False


_NUMPY: dict[torch.dtype, Any] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.int64: np.int64,
}


def _number(tensor: torch.Tensor) -> float:
    """Return a one-element host tensor's value; NaN for an unusual dtype.

    Read from its storage: an operation on a factor that was a Python number fails below a dispatch mode.
    """
    dtype = _NUMPY.get(tensor.dtype)
    storage = tensor.untyped_storage()
    if dtype is None or storage.nbytes() > WALK:
        return float("nan")
    raw = bytes(storage.tolist())  # type: ignore[no-untyped-call]  # torch annotates it not
    return float(np.frombuffer(raw, dtype)[tensor.storage_offset()])


def _factors(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (node name, factor) of the multiplications and divisions by a scalar in a tensor's graph."""
    todo: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while todo and len(seen) < WALK:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        name = node.name()
        if name.startswith(("MulBackward", "DivBackward")):
            for attribute in ("_saved_other", "_saved_self"):
                try:
                    saved = getattr(node, attribute, None)
                except RuntimeError:  # freed by a backward
                    continue
                if isinstance(saved, torch.Tensor) and saved.numel() == 1 and not saved.requires_grad:
                    yield name, saved
