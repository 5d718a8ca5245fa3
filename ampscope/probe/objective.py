"""How a user's loss function is called: by what it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ampscope.errors import AmpscopeError

FORMS = "loss_fn(model, batch), loss_fn(batch), or a criterion of torch.nn for a batch (inputs, target)"


def loss_of(loss_fn: Callable[..., Any], model: Any, batch: Any) -> torch.Tensor:
    """Return the loss of one batch.

    Called is `loss_fn(model, batch)`; `loss_fn(batch)` when it has one argument; and for a module or a function of
    `torch.nn.functional`, `loss_fn(model(inputs), target)` where `batch` is `(inputs, target)`.

    Raises:
        AmpscopeError: a criterion with a batch that is no pair, or no scalar tensor that requires a gradient was returned.
    """
    if not callable(loss_fn):
        raise AmpscopeError(f"audit(): loss_fn must be callable as {FORMS}, not {type(loss_fn).__name__}")
    if isinstance(loss_fn, torch.nn.Module) or getattr(torch.nn.functional, _name(loss_fn), None) is loss_fn:
        if not isinstance(batch, Sequence) or len(batch) != 2 or not callable(model):
            raise AmpscopeError(
                f"audit(): a criterion needs one model and a batch (inputs, target); loss_fn can be {FORMS}"
            )
        loss = loss_fn(model(batch[0]), batch[1])
    else:
        loss = loss_fn(batch) if _takes_one(loss_fn) else loss_fn(model, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise AmpscopeError("audit(): loss_fn must return a scalar tensor that requires a gradient")
    return loss


def _name(f: Any) -> str:
    return str(getattr(f, "__name__", ""))


def _takes_one(f: Callable[..., Any]) -> bool:
    try:
        given = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    places = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_POSITIONAL for p in given):
        return False
    return len(places) == 1 or (len(places) > 1 and all(p.default is not p.empty for p in places[1:]))
