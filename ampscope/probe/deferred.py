"""Births on a device: flags stay there, are read with one copy, and are sorted out when the copy has arrived.

Off the host an operation cannot be judged when it runs. For each one kept here: a flag "output non-finite, inputs finite", computed on the
device, its largest input, and where it belongs. Nothing waits: `ready` asks the copy's event. What needs values at once (FP32 on the
same inputs, vanished constants, 1/σ) is not known of these births.
"""

from __future__ import annotations

from typing import Any

import torch

from ampscope.probe.births import Birth, Trace

CARRY = {
    "add",
    "sub",
    "expand",
    "view",
    "_unsafe_view",
    "unsqueeze",
    "transpose",
    "t",
    "clone",
    "_to_copy",
    "slice",
    "select",
    "reshape",
    "permute",
}
"""Operations through which a meant -inf (an attention mask) goes on being meant."""


class Deferred:
    """Flags of one traced step on one or more devices."""

    def __init__(self) -> None:
        self._flags: dict[int, torch.Tensor] = {}
        self._masked: set[int] = set()
        self._births: list[tuple[Birth, torch.Tensor]] = []
        self._loss: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        self._copies: list[tuple[list[tuple[str, Any]], torch.Tensor, Any]] = []

    @property
    def any(self) -> bool:
        """Whether anything lies on a device."""
        return bool(self._births or self._loss or self._gradients)

    def before(self, tensors: list[torch.Tensor], key: Any) -> list[torch.Tensor]:
        """Return a flag for each input: known from where it was made, or computed now."""
        return [self._flags[key(t)] if key(t) in self._flags else bad(t) for t in tensors]

    def after(self, birth: Birth, name: str, inputs: list[torch.Tensor], flags: list[torch.Tensor], outputs: list[torch.Tensor], key: Any, meant: bool, log: bool) -> None:  # fmt: skip
        """Take one operation: `flags` are those of its inputs, `meant` says that its constants may be -inf, `log` that it has a pole."""
        masked = meant or (name in CARRY and any(key(t) in self._masked for t in inputs))
        made = [bad(t, poles=log) for t in outputs]
        for t, flag in zip(outputs, made, strict=True):
            k = key(t)
            if masked:
                self._masked.add(k)
                self._flags[k] = torch.zeros_like(flag)
            else:
                self._masked.discard(k)
                self._flags[k] = flag
        if masked:
            return
        device = made[0].device
        out = torch.stack(made).any()
        here = [f for f in flags if f.device == device]
        born = out & ~torch.stack(here).any() if here else out
        nan = torch.stack([t.detach().isnan().any() for t in outputs]).any()
        sizes = [t.detach().abs().amax().double() for t in inputs[:2] if t.numel() and t.device == device]
        largest = torch.stack(sizes).amax() if sizes else torch.zeros((), dtype=torch.float64, device=device)
        self._births.append((birth, torch.stack([born.double(), nan.double(), largest])))

    def see(self, tensor: torch.Tensor, loss: bool) -> None:
        """Take the loss, or a gradient."""
        (self._loss if loss else self._gradients).append(bad(tensor).double())

    def send(self) -> None:
        """Start the copies: one a device."""
        by_device: dict[torch.device, list[tuple[tuple[str, Any], torch.Tensor]]] = {}
        for birth, values in self._births:
            by_device.setdefault(values.device, []).append((("birth", birth), values))
        for kind, flags in (("loss", self._loss), ("gradient", self._gradients)):
            for flag in flags:
                row = torch.stack([flag, torch.zeros_like(flag), torch.zeros_like(flag)])
                by_device.setdefault(flag.device, []).append(((kind, None), row))
        for device, items in by_device.items():
            stacked, event = torch.stack([v for _, v in items]), None
            if device.type == "cuda":
                host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
                host.copy_(stacked, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))
                stacked = host
            self._copies.append(([k for k, _ in items], stacked, event))
        self._births.clear()
        self._loss.clear()
        self._gradients.clear()
        self._flags.clear()

    def ready(self) -> bool:
        """Whether `settle` returns without waiting."""
        return all(event is None or event.query() for _, _, event in self._copies)

    def settle(self, trace: Trace) -> None:
        """Put what turned out to be a birth into the trace, in the order the operations ran."""
        for keys, values, event in self._copies:
            if event is not None:
                event.synchronize()
            rows = values.cpu().numpy()
            for (kind, birth), (flag, nan, largest) in zip(keys, rows.tolist(), strict=True):
                if kind == "loss":
                    trace.loss_bad |= flag > 0
                elif kind == "gradient":
                    trace.gradients_bad |= flag > 0
                elif flag > 0:
                    birth.nan, birth.pos_inf, birth.input_max = nan > 0, not nan > 0, largest
                    birth.order = len(trace.births)
                    trace.births.append(birth)
        self._copies.clear()
        # What reached the loss is not followed on a device: the first birth of a bad step is taken for its root.
        wanted = "forward" if trace.loss_bad else "backward"
        if trace.loss_bad or trace.gradients_bad:
            for birth in trace.births:
                if birth.phase == wanted:
                    birth.healed = False
                    break


def bad(t: torch.Tensor, poles: bool = False) -> torch.Tensor:
    """Return a 0-d bool on the tensor's device: is anything non-finite? With `poles`, -inf does not count."""
    x = t.detach()
    if poles:
        return (x.isnan() | x.isposinf()).any()
    return ~torch.isfinite(x).all()
