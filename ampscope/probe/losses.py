"""The losses of a step: what went through `scale()`, and what of it was back-propagated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampscope.probe import hooks
from ampscope.probe.window import host_value


@dataclass(slots=True)
class Loss:
    """One tensor that went through `scale()`: its unscaled value (a tensor where it is on a device), and what became of it."""

    value: torch.Tensor | float
    call: int
    """Which `scale()` call of the record it came through."""
    backward: bool = False
    """A `backward()` went through it: it is part of the objective."""
    differentiated: bool = False
    """At least an `autograd.grad()` did."""
    handle: hooks.Handle | None = None


def note(value: torch.Tensor | float, scaled: torch.Tensor, call: int) -> Loss:
    """Remember a loss, and listen for the backward of what became of it."""
    loss = Loss(value, call)

    def seen(accumulates: bool) -> None:
        loss.differentiated = True
        loss.backward |= accumulates

    loss.handle = hooks.on_loss_backward(scaled, seen)
    return loss


def read(tensor: torch.Tensor) -> torch.Tensor | float | None:
    """Return a loss as float (on the host) or as detached copy; None where it has no value (in a functional transform, say)."""
    plain = getattr(tensor, "_local_tensor", tensor)
    if plain.device.type == "meta":
        return None
    try:
        return host_value(plain) if plain.device.type == "cpu" else plain.detach().clone()
    except (RuntimeError, TypeError, NotImplementedError):  # a tensor subclass or wrapper without storage
        return None


def pairs(outputs: Any, scaled: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (output, scaled) of whatever `scale()` took and gave, nested lists and tuples included."""
    if isinstance(scaled, torch.Tensor) and isinstance(outputs, torch.Tensor):
        yield outputs, scaled
    elif isinstance(scaled, (list, tuple)) and isinstance(outputs, (list, tuple)):
        for output, part in zip(outputs, scaled, strict=False):
            yield from pairs(output, part)


def lazily(scaled: Iterator[Any], see: Callable[[torch.Tensor], None]) -> Iterator[Any]:
    """Return what `scale()` gave for an iterator: the same items, as late as before, each one seen on its way."""

    def look(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            see(item)
        return item

    return map(look, scaled)


def objective(losses: Sequence[Loss]) -> list[Loss]:
    """Return the losses whose gradient the step carries: those back-propagated, else those differentiated (`.grad` set by hand)."""
    return [x for x in losses if x.backward] or [x for x in losses if x.differentiated]
