"""Looking at tensors on the host without leaving a trace: whether, and where, they are non-finite. No operation here synchronises a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def key(t: torch.Tensor) -> int:
    """Return what identifies a tensor's memory: views share it."""
    try:
        return int(t.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(t)


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested structure."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def host(t: torch.Tensor) -> bool:
    """Whether a tensor can be looked at without a synchronisation."""
    return t.device.type == "cpu" and t.layout is torch.strided and type(t) in (torch.Tensor, torch.nn.Parameter)


def summary(t: torch.Tensor) -> tuple[int, float]:
    """Return (non-finite elements, largest finite |x|) of a tensor on the host."""
    x = t.detach()
    if x.numel() == 0:
        return 0, 0.0
    top = x.abs().amax()
    value = float(top.float().numpy())
    if value == value and value != float("inf"):
        return 0, value
    finite = torch.isfinite(x)
    bad = x.numel() - int(finite.sum().numpy())
    rest = torch.where(finite, x, torch.zeros((), dtype=x.dtype))
    return bad, float(rest.abs().amax().float().numpy())


def kinds(t: torch.Tensor) -> tuple[bool, bool, bool]:
    """Return whether a tensor on the host holds NaN, +inf, -inf."""
    x = t.detach()
    return bool(x.isnan().any().numpy()), bool(x.isposinf().any().numpy()), bool(x.isneginf().any().numpy())


def bad_rows(t: torch.Tensor) -> Any:
    """Return the indices along the first dimension that hold a non-finite element: int64 [N]."""
    bad = ~torch.isfinite(t.detach())
    flat = bad.reshape(t.shape[0], -1).any(1) if t.dim() else bad.reshape(1)
    return flat.numpy().nonzero()[0]


def repeated(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor] | None:
    """Evaluate an operation on the same inputs in FP32 (FP64 where they are FP32): its results of a floating dtype.

    None where it cannot be repeated: random, or a size or dtype that does not go.
    """
    if any(w in func.overloadpacket.__name__ for w in ("dropout", "rand", "bernoulli", "normal_", "uniform_")):
        return None
    leaves = [t for t in tensors((args, kwargs)) if t.dtype in FLOATS]
    wide = torch.float64 if leaves and all(t.dtype in (torch.float32, torch.float64) for t in leaves) else torch.float32

    def up(t: torch.Tensor) -> torch.Tensor:
        return t.detach().to(wide) if t.dtype in FLOATS else t

    try:
        with torch.no_grad():
            wide_kwargs = {
                k: wide if k == "dtype" and v in FLOATS else v
                for k, v in tree_map_only(torch.Tensor, up, kwargs).items()
            }
            wide_args = [
                wide if isinstance(a, torch.dtype) and a in FLOATS else a
                for a in tree_map_only(torch.Tensor, up, list(args))
            ]
            if func._schema.is_mutable and wide_args and isinstance(wide_args[0], torch.Tensor):
                wide_args[0] = wide_args[0].clone()
            return [t for t in tensors(func(*wide_args, **wide_kwargs)) if t.dtype in FLOATS and t.numel() and host(t)]
    except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
        return None


def judged(wide: list[torch.Tensor] | None) -> tuple[bool | None, float]:
    """Return whether an operation that was repeated in FP32 is finite there, and its largest |x|; None where it could not be."""
    found = [summary(t) for t in wide or ()]
    if not found:
        return None, float("nan")
    return not any(bad for bad, _ in found), max(m for _, m in found)
