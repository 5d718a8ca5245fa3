"""Does a hidden overflow matter? The FP32 value of what overflowed is carried along until its result is finite again, and compared.

tanh of inf is 1, and so is tanh of the 70,000 that FP16 could not hold: nothing was lost. 1 / inf is 0, but 1 / 70,000 is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_unflatten

from ampscope.probe.values import FLOATS, host, repeated

MOST = 1 << 24
"""Elements carried along in a traced step, at most: 64 MB. Once NaN has spread, everything behind it would be carried."""
CLOSE, CLOSE_TO_LARGEST = 2.0**-6, 2.0**-8
"""A result is as in FP32 within this share of itself plus this share of the largest: a few FP16 roundings."""

_Key = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def _key(t: torch.Tensor) -> _Key:
    return int(t.untyped_storage()._cdata), int(t.storage_offset()), tuple(t.shape), tuple(t.stride())


class Shadow:
    """FP32 values of tensors that hold an overflow."""

    def __init__(self) -> None:
        self._values: dict[_Key, torch.Tensor] = {}
        self._room = MOST

    def __bool__(self) -> bool:
        return bool(self._values)

    def begin(self, outputs: Sequence[torch.Tensor], wide: Sequence[torch.Tensor] | None) -> None:
        """Carry the FP32 results of an operation that overflowed."""
        for t, value in zip(outputs, wide or (), strict=False):
            if t.numel() <= self._room and value.shape == t.shape and bool(torch.isfinite(value).all().numpy()):
                self._values[_key(t)] = value
                self._room -= t.numel()

    def follow(
        self, func: Any, args: Any, kwargs: Any, kept: Any, outputs: Sequence[torch.Tensor], finite: bool
    ) -> bool | None:
        """Repeat an operation on what is carried along.

        Args:
            func, args, kwargs: the operation, as it was called.
            kept: its positional arguments from before it ran, if it changes them.
            outputs: its results.
            finite: whether they are all finite.

        Returns:
            whether finite results agree with FP32; None where nothing is known.

        """
        given, shape = torch.utils._pytree.tree_flatten((list(args), kwargs))
        before = tree_leaves((list(kept if kept is not None else args), kwargs))
        found = [self._values.get(_key(t)) if isinstance(t, torch.Tensor) and host(t) else None for t in given]
        if all(v is None for v in found) or len(before) != len(given):
            return None
        leaves = [old if value is None else value for old, value in zip(before, found, strict=True)]
        wide_args, wide_kwargs = tree_unflatten(leaves, shape)
        wide = repeated(func, wide_args, wide_kwargs)
        if wide is None or len(wide) != len(outputs):
            return None
        if not finite:
            self.begin(outputs, wide)
            return None
        return all(_agree(t, value) for t, value in zip(outputs, wide, strict=True))


def _agree(narrow: torch.Tensor, wide: torch.Tensor) -> bool:
    if narrow.shape != wide.shape or narrow.dtype not in FLOATS:
        return False
    x = narrow.detach().to(wide.dtype)
    limit = CLOSE * wide.abs() + CLOSE_TO_LARGEST * wide.abs().amax()
    return bool(((x - wide).abs() <= limit).all().numpy())
