"""Gradients from one moment to another: stamps (is it the same tensor, untouched?) and sizes (was it divided by hand?).

Stamps read no value. Sizes stay on the gradient's device. No synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

SAMPLE = 4
"""Parameters an optimizer that are looked at where looking at all would cost."""
SIZED, ELEMENTS = 32, 256
"""Parameters, spread over the model, and leading elements of each whose size is kept."""

Stamp = tuple[int, int]
"""Identity and version counter of a gradient."""


def params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def spread(found: Sequence[torch.Tensor], most: int) -> Sequence[torch.Tensor]:
    """Return at most `most` of them, evenly spread, the first and the last among them."""
    return found if len(found) <= most else [found[i * (len(found) - 1) // (most - 1)] for i in range(most)]


def some(optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
    """Return a few parameters of an optimizer, spread over it."""
    return spread(params(optimizer), SAMPLE)


def stamp(param: torch.Tensor) -> Stamp | None:
    """Return what changes when a parameter's gradient is another tensor or was changed in place."""
    return (id(param.grad), param.grad._version) if param.grad is not None else None


def stamps(optimizer: torch.optim.Optimizer) -> dict[int, Stamp]:
    """Return the stamps of a few parameters of an optimizer, by id."""
    return {id(p): found for p in some(optimizer) if (found := stamp(p)) is not None}


def holds(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's gradients are there and, as far as the host can tell, not all zero."""
    return any(p.grad is not None and not _zero(p.grad) for p in some(optimizer))


def on_host(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the host can tell what `holds` asks."""
    return all(p.device.type == "cpu" for p in some(optimizer))


def _zero(grad: torch.Tensor) -> bool:
    """Whether a gradient is known to be all zero (dense host tensors only)."""
    return (
        grad.device.type == "cpu" and grad.layout is torch.strided and not bool(grad.detach().count_nonzero().numpy())
    )


def head(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """Return a dense tensor's leading elements, of the local part where it is sharded."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return local.reshape(-1)[:elements] if local.is_contiguous() else local.flatten()[:elements]


class Sizes:
    """Leading elements of a few gradients as backward left them, to compare with what an optimizer is stepped on."""

    def __init__(self, found: Sequence[torch.Tensor]) -> None:
        self._wanted = {id(p) for p in spread(found, SIZED)}
        self._heads: dict[int, torch.Tensor] = {}

    def note(self, param: torch.Tensor) -> None:
        """Backward has just accumulated into this parameter's gradient."""
        grad = param.grad
        if id(param) in self._wanted and grad is not None and grad.layout is torch.strided:
            self._heads[id(param)] = head(grad, ELEMENTS).clone()

    def ratio(self, found: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Return their largest |gradient| now over the largest then; None where none was noted."""
        now, then = [], []
        for p in found:
            grad, noted = p.grad, self._heads.get(id(p))
            if noted is not None and grad is not None and grad.layout is torch.strided:
                now.append(_largest(head(grad, ELEMENTS)))
                then.append(_largest(noted))
        if not now or len({x.device for x in now}) > 1:
            return None
        return torch.stack(now).max() / torch.stack(then).max()

    def clear(self) -> None:
        """Forget tensors."""
        self._heads.clear()


def _largest(elements: torch.Tensor) -> torch.Tensor:
    return elements.abs().float().amax() if elements.numel() else elements.new_zeros((), dtype=torch.float32)
