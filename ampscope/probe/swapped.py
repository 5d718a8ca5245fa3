"""The methods of a watched scaler's class: the original calls, with the recorder told before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ampscope.probe import hooks, losses
from ampscope.probe.recorder import Recorder


def methods(scaler: Any, recorder: Recorder, close: Callable[[], None]) -> dict[str, Any]:
    """Return the methods to add to the class of `scaler`.

    Where the recorder is switched off, where it is not this very object, in code that torch.compile traces and while a CUDA graph is
    captured, the original runs and nothing else. What a call raises reaches the user as it is.
    """
    original = type(scaler)

    def off(self: Any) -> bool:
        if not recorder.enabled or self is not scaler or torch.compiler.is_compiling():
            return True
        if hooks.hands_off():
            recorder.guarded("captured")
            return True
        return False

    def call(name: str, self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return getattr(original, name)(self, *args, **kwargs)
        except BaseException as error:
            recorder.guarded("failed", name, error)
            raise

    @hooks.wraps_method(original.scale)
    def scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        if off(self):
            return original.scale(self, *args, **kwargs)
        recorder.guarded("before_scale")
        scaled = call("scale", self, args, kwargs)
        recorder.guarded("after_scale", first(args, kwargs), scaled)
        if isinstance(scaled, Iterator) and not isinstance(scaled, torch.Tensor):
            count = recorder.window.scale_calls
            return losses.lazily(scaled, lambda item: recorder.guarded("lazily_scaled", item, count))
        return scaled

    @hooks.wraps_method(original.unscale_)
    def unscale_(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = first(args, kwargs)
        if off(self) or not hasattr(optimizer, "param_groups"):
            return original.unscale_(self, *args, **kwargs)
        if not self._enabled:  # FP32 by the same code: measured where AMP's gradients are, before clipping
            recorder.guarded("unscale_disabled", optimizer)
            return original.unscale_(self, *args, **kwargs)
        recorder.guarded("before_unscale", optimizer)
        out = call("unscale_", self, args, kwargs)
        recorder.guarded("after_unscale", optimizer)
        return out

    @hooks.wraps_method(original.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = first(args, kwargs)
        if off(self) or not hasattr(optimizer, "param_groups"):
            return original.step(self, *args, **kwargs)
        recorder.in_scaler_call = recorder.in_scaler_step = True
        try:
            recorder.guarded("before_step", optimizer)
            out = call("step", self, args, kwargs)
            recorder.guarded("after_step", optimizer)
        finally:
            recorder.in_scaler_call = recorder.in_scaler_step = False
        return out

    @hooks.wraps_method(original.update)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        if off(self):
            return original.update(self, *args, **kwargs)
        recorder.guarded("before_update", first(args, kwargs))
        out = call("update", self, args, kwargs)
        recorder.guarded("after_update")
        return out

    @hooks.wraps_method(original.get_scale)
    def get_scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not off(self):
            recorder.guarded("asked_scale")
        return original.get_scale(self, *args, **kwargs)

    def __enter__(self: Any) -> Any:
        return self

    def __exit__(self: Any, *exc: object) -> None:
        close()

    return {
        "scale": scale, "unscale_": unscale_, "step": step, "update": update, "get_scale": get_scale,
        "__enter__": __enter__, "__exit__": __exit__,
    }  # fmt: skip


def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first argument, whatever a subclass calls it, or None."""
    return args[0] if args else next(iter(kwargs.values()), None)
