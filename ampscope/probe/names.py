"""Parameters, their names, and the layers of a record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ampscope.errors import AmpscopeError
from ampscope.record.step import Layer

_WRAPPER_CHILD = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
"""Wrappers that add a prefix to names, by class, and the child they add it with. A user's own submodule called `module` stays."""


def wrapper_child(module: nn.Module) -> str | None:
    """Return the name of the child that `module` only wraps, or None if it is no wrapper."""
    for cls in type(module).__mro__:
        child = _WRAPPER_CHILD.get(cls.__name__)
        if child is not None and child in module._modules:
            return child
    return None


def _walk(root: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield (name, module, whether it only wraps another) in the order of `named_modules()`; each module once."""
    seen: set[int] = set()

    def walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        wrapped = wrapper_child(module)
        yield prefix, module, wrapped is not None
        for name, child in module._modules.items():
            if child is not None:
                yield from walk(prefix if name == wrapped else f"{prefix}.{name}" if prefix else name, child)

    yield from walk("", root)


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) as `root.named_modules()` does, without wrappers and the prefixes they add; each module once."""
    for name, module, wraps in _walk(root):
        if not wraps:
            yield name, module


def named_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) as `root.named_parameters()` does, without wrappers' prefixes; a tied parameter once.

    A wrapper's own parameters (FSDP's flat ones) have the name of what it wraps.
    """
    seen: set[int] = set()
    for prefix, module, _ in _walk(root):
        for name, param in module._parameters.items():
            if param is not None and id(param) not in seen:
                seen.add(id(param))
                yield f"{prefix}.{name}" if prefix else name, param


def as_models(model: Any) -> dict[str, nn.Module]:
    """Return {prefix: module} for a module ("" is its prefix), a list or a dict of modules.

    Raises:
        AmpscopeError: `model` is none of these, or empty.
    """
    if isinstance(model, nn.Module):
        return {"": model}
    found: dict[Any, Any]
    if isinstance(model, Mapping):
        found = dict(model)
    elif isinstance(model, Sequence) and not isinstance(model, str):
        found = dict(enumerate(model))
    else:
        kind = type(model).__name__
        raise AmpscopeError(f"watch(): model must be a torch.nn.Module, or a list or dict of them, not {kind}")
    if not found:
        raise AmpscopeError("watch(): model is empty: pass at least one torch.nn.Module")
    for key, value in found.items():
        if not isinstance(value, nn.Module):
            raise AmpscopeError(f"watch(): model[{key!r}] must be a torch.nn.Module, not {type(value).__name__}")
    return {str(key): value for key, value in found.items()}


def collect(models: Mapping[str, nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Return (name, parameter) over all models, in registration order; a parameter shared between models once."""
    seen: set[int] = set()
    out: list[tuple[str, torch.Tensor]] = []
    for prefix, module in models.items():
        for name, param in named_parameters(module):
            if id(param) not in seen:
                seen.add(id(param))
                out.append((f"{prefix}.{name}" if prefix else name, param))
    return out


def make_layer(name: str, param: torch.Tensor, optimizer: str = "") -> Layer:
    """Describe a parameter. A sharded tensor counts its local part, a complex element counts as two."""
    local = getattr(param, "_local_tensor", param)
    numel = 0 if _is_lazy(param) else local.numel() * (2 if local.is_complex() else 1)
    shape = () if _is_lazy(param) else tuple(local.shape)
    return Layer(name, shape, numel, str(param.dtype).removeprefix("torch."), optimizer)


def _is_lazy(param: torch.Tensor) -> bool:
    return isinstance(param, nn.parameter.UninitializedParameter)


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> Iterable[tuple[int, int, torch.Tensor]]:
    """Yield (group, index, parameter) over an optimizer's groups."""
    for g, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            yield g, i, param
