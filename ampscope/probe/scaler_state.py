"""What a scaler knows, read without a synchronisation; a disabled scaler, or none, has a loss scale of 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ampscope.probe.window import host_value


class ScalerState:
    """Reads one scaler's attributes. Flags are read once each: `update()` adds them together in place and then drops them."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self._read: dict[int, Any] = {}

    @property
    def enabled(self) -> bool:
        """Whether there is a scaler and it scales."""
        return self.scaler is not None and bool(self.scaler.is_enabled())

    @property
    def on_device(self) -> bool:
        """Whether overflow flags are on a device, where the host cannot see them in time."""
        scale = getattr(self.scaler, "_scale", None)
        return scale is not None and scale.device.type != "cpu"

    def scale(self) -> float | torch.Tensor:
        """Return the loss scale: a number, or the scaler's own tensor."""
        if not self.enabled:
            return 1.0
        value: float | torch.Tensor = self.scaler._init_scale if self.scaler._scale is None else self.scaler._scale
        return value

    def tracker(self) -> float | torch.Tensor:
        """Return the growth tracker: a number, or the scaler's own tensor."""
        if not self.enabled:
            return 0.0
        tracker = self.scaler._growth_tracker
        value: float | torch.Tensor = self.scaler._init_growth_tracker if tracker is None else tracker
        return value

    def settings(self) -> dict[str, Any]:
        """Return what the user may change while training."""
        if not self.enabled:
            return {"enabled": False}
        names = ("growth_factor", "backoff_factor", "growth_interval")
        return {"enabled": True, **{name: getattr(self.scaler, "_" + name) for name in names}}

    def _states(self) -> Iterator[tuple[int, Any]]:
        for key, state in (getattr(self.scaler, "_per_optimizer_states", None) or {}).items():
            yield key, state["found_inf_per_device"]

    def overflowed(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Whether the host knows already that this optimizer (None: any) skips its step."""
        return any(
            flag.device.type == "cpu" and host_value(flag) > 0
            for key, found in self._states()
            if optimizer is None or key == id(optimizer)
            for flag in found.values()
        )

    def new_flags(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (id of optimizer, flag) that were not read before."""
        for key, found in self._states():
            if found and self._read.get(key) is not found:
                self._read[key] = found
                for flag in found.values():
                    yield key, flag

    def updated(self) -> None:
        """`update()` ran: the scaler has dropped its flags."""
        self._read.clear()
