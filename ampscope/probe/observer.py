"""What a part of the probe may listen to. The recorder drives every observer; observers never see each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ampscope.probe.recorder import Recorder
    from ampscope.record.step import StepRecord


class Observer:
    """Listens to a watched scaler. Every method does nothing by default.

    All but `resolved` run on the user's training thread, inside the recorder's guard: an exception that leaves an observer
    disables that observer with one warning and never reaches the user. None may synchronise with a device.
    """

    def attached(self, recorder: Recorder) -> None:
        """Called once, in `watch()`, when layers and names are known."""

    def scaled(self, recorder: Recorder, loss: Any, scaled: Any) -> None:
        """`scaler.scale(loss)` is about to hand `scaled` back; backward has not run."""

    def before_unscale(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """Gradients of `optimizer` are still scaled; called once an optimizer and record, before statistics are taken."""

    def after_unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """The user's own call of `unscale_(optimizer)` returned."""

    def asked_scale(self) -> None:
        """The user called `get_scale()`."""

    def before_optimizer_step(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """`scaler.step(optimizer)` was called, or `optimizer.step()` directly (`recorder.in_scaler_call` tells)."""

    def after_optimizer_step(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        """`scaler.step(optimizer)` returned, or `optimizer.step()` directly."""

    def before_update(self, recorder: Recorder, new_scale: Any) -> None:
        """`scaler.update(new_scale)` was called; the record of this step is about to close."""

    def after_update(self, recorder: Recorder) -> None:
        """`scaler.update()` returned; `recorder.step` is the next step."""

    def closed_without_update(self, recorder: Recorder) -> None:
        """A record closed although no `update()` came; `recorder.step` is the next step."""

    def failed(self, recorder: Recorder, call: str, error: BaseException) -> None:
        """A scaler method raised `error`, which goes on to the user unchanged. `call` is "scale", "unscale_", "step" or "update"."""

    def resolved(self, record: StepRecord) -> None:
        """A record's numbers are on the host. May run on the writer's thread; may add to `record.events` and `record.observed`."""

    def closing(self, recorder: Recorder) -> None:
        """The last record is closed; events added now are still written."""

    def closed(self) -> None:
        """`unwatch`, interpreter exit or a fault: remove everything that was installed."""
