"""What one record gathers while its step is open, and how its numbers come to the host without a synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ampscope.record.step import MEASURED, NO_GRADIENT, Event, LayerStats, StepRecord

if TYPE_CHECKING:
    from ampscope.probe.losses import Loss


def host_value(tensor: torch.Tensor) -> float:
    """Return the sum of a CPU tensor's elements as float, without `aten::item` (a dispatch mode of the user's stays quiet)."""
    plain = tensor.detach()
    if plain.dtype is torch.float32 and plain.numel() == 1 and not plain.is_neg():
        return float(plain.numpy().item())
    if plain.dtype is torch.bfloat16:
        plain = plain.float()
    values = plain.resolve_conj().resolve_neg().numpy()
    total = values.sum(dtype=np.complex128 if plain.is_complex() else np.float64)
    return float(total.real)


class Fetch:
    """Scalars on their way from devices: `put` or `add` now, `ready` / `get` later. One copy a device.

    CPU tensors are read at once; others are gathered into one tensor a device and copied, asynchronously, to pinned memory.
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._waiting: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        self._copies: list[tuple[list[str], torch.Tensor, Any, Any]] = []

    def put(self, name: str, value: float | torch.Tensor) -> None:
        """Remember a number, or the sum of a tensor's elements, under `name`, in place of an earlier one."""
        self._values.pop(name, None)
        for items in self._waiting.values():
            items[:] = [item for item in items if item[0] != name]
        self.add(name, value)

    def add(self, name: str, value: float | torch.Tensor) -> None:
        """Add a number, or the sum of a tensor's elements, to what `name` holds."""
        if not isinstance(value, torch.Tensor):
            self._values[name] = self._values.get(name, 0.0) + float(value)
        elif value.device.type == "cpu":
            self._values[name] = self._values.get(name, 0.0) + host_value(value)
        else:
            wide = torch.float32 if value.device.type == "mps" else torch.float64
            self._waiting.setdefault(value.device, []).append((name, value.detach().to(wide).sum()))

    def absorb(self, other: Fetch) -> None:
        """Take over what another fetch, not sent yet, holds; sums are added up."""
        for name, value in other._values.items():
            self.add(name, value)
        for device, items in other._waiting.items():
            self._waiting.setdefault(device, []).extend(items)

    def send(self) -> None:
        """Start the copies. Nothing may be put afterwards."""
        for device, items in self._waiting.items():
            if not items:
                continue
            host = torch.stack([t for _, t in items])
            event = None
            if device.type == "cuda":
                stacked, host = host, torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
                host.copy_(stacked, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))
            # Held until the copy is here: memory of another stream's tensor may be given away as soon as nobody holds it.
            self._copies.append(([n for n, _ in items], host, event, items))
        self._waiting.clear()

    def ready(self) -> bool:
        """Whether `get` returns without waiting."""
        return all(event is not None and event.query() for _, _, event, _ in self._copies)

    def get(self) -> dict[str, float]:
        """Wait, and return every number."""
        for names, host, event, _ in self._copies:
            if event is not None:
                event.synchronize()
            for name, value in zip(names, host.cpu().numpy().tolist(), strict=True):
                self._values[name] = self._values.get(name, 0.0) + value
        self._copies.clear()
        return self._values


@dataclass(slots=True)
class Taken:
    """Statistics taken of one optimizer's gradients: `pending` rows belong to layers `index`."""

    index: np.ndarray[Any, np.dtype[np.int64]]
    missing: np.ndarray[Any, np.dtype[np.int64]]
    pending: Any


@dataclass(slots=True)
class Window:
    """Everything gathered for the record that is open."""

    step: int
    fetch: Fetch = field(default_factory=Fetch)
    losses: list[Loss] = field(default_factory=list)
    scale_calls: int = 0
    folded: int = 0
    """`scale()` calls whose losses `fold` has added up."""
    taken: list[Taken] = field(default_factory=list)
    measured: set[int] = field(default_factory=set)
    stepped: list[int] = field(default_factory=list)
    """ids of optimizers stepped, in order."""
    ended: set[int] = field(default_factory=set)
    """ids of those whose step used this record's scaled gradients: after it the record may end."""
    begun: set[int] = field(default_factory=set)
    """ids of optimizers whose gradients were looked at."""
    unscaled: set[int] = field(default_factory=set)
    """ids of optimizers whose gradients `unscale_` has divided by the scale."""
    events: list[Event] = field(default_factory=list)
    custom: dict[str, float | torch.Tensor] = field(default_factory=dict)
    lr: bool = False
    overhead: float = 0.0
    keep_exponents: bool = False
    sampled: bool = True
    """The record has layer statistics though nothing happens."""
    measuring: bool = True
    """Statistics are taken; what is not `sampled` may be dropped later."""
    n_layers: int = 0
    weights: Taken | None = None
    handles: list[Any] = field(default_factory=list)
    """Hooks that go when the record closes."""
    probed_flushed: Any = None
    """int64 [L] array, or a callable that gives it once the record is resolved."""

    @property
    def busy(self) -> bool:
        """Whether anything happened that deserves a record."""
        return bool(self.stepped or self.begun or any(loss.differentiated for loss in self.losses))

    def absorb(self, later: Window) -> None:
        """Take in what came after an assumed end of record: it was one record after all."""
        self.fetch.absorb(later.fetch)
        for loss in later.losses:
            loss.call += self.scale_calls
        self.losses += later.losses
        self.scale_calls += later.scale_calls
        self.folded += later.folded
        self.taken += later.taken
        self.measured |= later.measured
        self.stepped += later.stepped
        self.ended |= later.ended
        self.begun |= later.begun
        self.unscaled |= later.unscaled
        self.events += [replace(e, step=self.step) if e.step == later.step else e for e in later.events]
        self.custom.update(later.custom)
        self.lr |= later.lr
        self.overhead += later.overhead
        self.handles += later.handles
        if later.probed_flushed is not None:
            self.probed_flushed = later.probed_flushed

    def fold(self) -> None:
        """Add up the losses so far: a record that never ends (its steps are hidden in a compiled function) must not grow."""
        done = [loss for loss in self.losses if loss.backward]
        for loss in done:
            self.fetch.add("loss", loss.value)
        self.folded += len({loss.call for loss in done})
        self.release()
        self.losses.clear()

    def release(self) -> None:
        """Remove the hooks that served this record alone."""
        while self.handles:
            self.handles.pop().remove()
        for loss in self.losses:
            if loss.handle is not None:
                loss.handle.remove()
                loss.handle = None


def merge(taken: Sequence[Taken], n: int) -> LayerStats:
    """Put the rows of all optimizers in their places among `n` layers."""
    parts = [part for part in taken if len(part.index)]
    if len(parts) == 1 and len(parts[0].index) == n and _is_range(parts[0].index):
        rows: LayerStats = parts[0].pending.resolve()
        return rows
    out = LayerStats.empty(n)
    for part in taken:
        out.state[part.missing] = NO_GRADIENT
    for part in parts:
        rows = part.pending.resolve()
        # a range is copied ten times faster than a list of places
        place = slice(part.index[0], part.index[-1] + 1) if _is_range(part.index) else part.index
        for name in LayerStats.__dataclass_fields__:
            getattr(out, name)[place] = getattr(rows, name)
        out.state[place] = MEASURED
    return out


def _is_range(index: np.ndarray[Any, np.dtype[np.int64]]) -> bool:
    return bool(index[-1] - index[0] + 1 == len(index) and (index[1:] > index[:-1]).all())


class PendingRecord:
    """A closed window whose numbers may still be on a device."""

    def __init__(self, window: Window, build: Callable[[Window], StepRecord]) -> None:
        self._window, self._build = window, build

    def ready(self) -> bool:
        """Whether `resolve` returns without waiting."""
        parts = self._window.taken if self._window.weights is None else [*self._window.taken, self._window.weights]
        return self._window.fetch.ready() and all(t.pending.ready() for t in parts)

    def resolve(self) -> StepRecord:
        """Wait for the numbers; return the record."""
        return self._build(self._window)
