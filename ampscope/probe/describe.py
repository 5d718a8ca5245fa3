"""The header of a log: what is known before the first step."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

from ampscope.log.rundir import RunClaim
from ampscope.log.schema import Header
from ampscope.probe import names
from ampscope.probe.window import host_value
from ampscope.version import VERSION


def make_header(
    scaler: Any,
    models: Mapping[str, torch.nn.Module],
    found: RunClaim,
    rank: int,
    world: int,
    settings: Mapping[str, Any],
) -> Header:
    """Describe a run: layers, scaler, versions, device, how gradients are spread over ranks, settings of `watch`."""
    device = next((str(p.device) for m in models.values() for p in m.parameters()), "cpu")
    return Header(
        layers=[names.make_layer(n, p) for n, p in names.collect(models)],
        session=found.session,
        rank=rank,
        world_size=world,
        first_step=found.first_step,
        scaler=describe_scaler(scaler),
        versions={"ampscope": VERSION, "torch": torch.__version__, "python": platform.python_version()},
        device=device,
        device_name=torch.cuda.get_device_name(torch.device(device))
        if device.startswith("cuda")
        else platform.machine(),
        gradients=spread(models, world),
        settings={**settings, "tables": tables(models)},
    )


def tables(models: Mapping[str, torch.nn.Module]) -> list[str]:
    """Return the names of weights whose rows are looked up (embeddings): an empty row of their gradient was not.

    Not those that another module computes with too (a tied output layer): every row of theirs has a gradient.
    """
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    found, shared = [], set()
    for prefix, root in models.items():
        for name, module in names.named_modules(root):
            if isinstance(module, kinds):
                found.append((".".join(x for x in (prefix, name, "weight") if x), module.weight))
            else:
                shared |= {id(p) for p in module.parameters(recurse=False)}
    return [name for name, weight in found if id(weight) not in shared]


def describe_scaler(scaler: Any) -> dict[str, Any]:
    """Return the scaler's configuration; `init_scale` is the scale it has now."""
    if scaler is None:
        return {"enabled": False, "type": None}
    out: dict[str, Any] = {"enabled": bool(scaler.is_enabled()), "type": type(scaler).__name__}
    if out["enabled"]:
        started = scaler._scale is not None  # watched in mid-training: one synchronisation, in watch() itself
        out |= {
            "init_scale": _number(scaler._scale) if started else float(scaler._init_scale),
            "growth_tracker": int(_number(scaler._growth_tracker) if started else scaler._init_growth_tracker),
            "growth_factor": float(scaler._growth_factor),
            "backoff_factor": float(scaler._backoff_factor),
            "growth_interval": int(scaler._growth_interval),
        }
    return out


def _number(tensor: torch.Tensor) -> float:
    return host_value(tensor if tensor.device.type == "cpu" else tensor.cpu())


def spread(models: Mapping[str, torch.nn.Module], world: int) -> str:
    """Return "sharded" (FSDP: add statistics up over ranks), "replicated" (DDP: never) or "" (one process)."""
    for root in models.values():
        if any(hasattr(p, "_local_tensor") for p in root.parameters()):
            return "sharded"
        if any(type(m).__name__ in ("FullyShardedDataParallel", "FSDP") for m in root.modules()):
            return "sharded"
    return "replicated" if world > 1 else ""
