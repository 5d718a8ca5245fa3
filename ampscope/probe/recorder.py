"""The lifecycle of a watched scaler: its calls come in, one `Pending` record goes out at each `update()`.

Nothing here may change training: the user's call always runs, with the user's arguments, outside the guard. What ampscope does
before and after runs inside it, and a fault there switches ampscope off with one warning.

When a record ends is not always known at once. `update()` ends one. Without it, a `scale()` after a step may be the second network's
of a GAN (the same record) or the next iteration's of a loop that never updates (a new one): what follows goes into a window of its own,
and is joined, or not, at the next `update()` or step of the same optimizer.

Just over 400 lines: one class, whose calls share the open window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from ampscope.probe import losses
from ampscope.probe.build import Amended, Builder
from ampscope.probe.guard import Guarded, say
from ampscope.probe.observer import Observer
from ampscope.probe.roster import Roster
from ampscope.probe.scaler_state import ScalerState
from ampscope.probe.taking import peak_memory, take, take_untouched, weigh
from ampscope.probe.window import Fetch, PendingRecord, Window, host_value
from ampscope.record.step import Event, Layer, Pending, Resolved, StepRecord

MOST_LOSSES = 1000
"""Losses a record keeps apart; further ones are added up as they come."""


class Recorder(Guarded):
    """Gathers what happens between two `update()` calls of one scaler (or two steps of one optimizer) into a record.

    Observers may read every attribute without an underscore. `layers` and `parameters` are aligned; `optimizers` maps id to
    optimizer in the order first seen.
    """

    def __init__(
        self,
        scaler: Any,
        models: dict[str, torch.nn.Module],
        *,
        every: int = 1,
        exponents_every: int = 10,
        first_step: int = 0,
        rank: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
        observers: Iterable[Observer] = (),
        submit: Callable[[Pending], None],
        submit_events: Callable[[list[Event]], None],
        set_layers: Callable[[list[Layer]], None],
    ) -> None:
        super().__init__(observers, rank, submit_events)
        self.scaler, self.models = scaler, models
        self.every, self.exponents_every = every, exponents_every
        self.step = first_step
        self.in_scaler_step = False
        self.in_scaler_call = False
        self.roster = Roster(models)
        self.only = optimizer if scaler is None else None
        self._submit, self._set_layers = submit, set_layers
        self._build = Builder(rank)
        self._clock = time.perf_counter()
        self._boundary: Window | None = None
        self._closed = self._begun_at = 0
        """Records closed so far, and how many they were when the current step began."""
        self._deferred = self._told_captured = False
        self._last: StepRecord | None = None
        self._amended: StepRecord | None = None
        self._state = ScalerState(scaler)
        self._settings = self._state.settings()
        if optimizer is not None:
            self.roster.plan(optimizer)
        self.window = self._open(self.step)
        self._each("attached", self)

    # What observers use

    @property
    def layers(self) -> list[Layer]:
        """The watched parameters, described."""
        return self.roster.layers

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The watched parameters."""
        return self.roster.parameters

    @property
    def optimizers(self) -> Any:
        """Mapping of id to optimizer, those seen so far that are still alive."""
        return self.roster.optimizers

    @property
    def micro_step(self) -> int:
        """How many `scale()` calls this record has seen."""
        return self.window.scale_calls + (self._boundary.scale_calls if self._boundary is not None else 0)

    def label(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the optimizer's name in the log, e.g. "Adam.0"."""
        return self.roster.label(optimizer)

    def index(self, param: torch.Tensor) -> int | None:
        """Return the layer index of a parameter, or None."""
        return self.roster.index(param)

    def keep_until_record_closes(self, handle: Any) -> None:
        """Remove a hook when the open record closes."""
        self.window.handles.append(handle)

    def looks_bad(self) -> bool:
        """Whether the open record is known, on the host already, to hold an overflow or a non-finite loss."""
        values = (x.value for x in self.window.losses)
        return self._state.overflowed() or any(isinstance(v, float) and not math.isfinite(v) for v in values)

    def add_event(self, event: Event) -> None:
        """Put an event into the open record."""
        self.window.events.append(event if event.rank == self.rank else replace(event, rank=self.rank))

    def observe(self, name: str, value: float | torch.Tensor) -> None:
        """Add `value` to the open record's `observed[name]`; a tensor is fetched without a synchronisation."""
        self.window.fetch.add("observed:" + name, value)

    def log(self, scalars: dict[str, float | torch.Tensor]) -> None:
        """Put the user's own scalars into the open record (the later of two values under one name wins)."""
        self.window.custom.update(scalars)

    # Calls of the scaler, in the order a loop makes them

    def before_scale(self) -> None:
        """`scale()` is about to run: if an optimizer has stepped, a record may end here."""
        if not self.window.ended:
            return
        sampled = self.window.sampled or (self._boundary is not None and self._boundary.sampled)
        self._join()
        self._boundary, self.window = self.window, self._open(self.step + 1)
        self.window.measuring |= sampled

    def after_scale(self, outputs: Any, scaled: Any) -> None:
        """Note the losses, after the observers: what one of them differentiates is not the user's backward."""
        window = self.window
        window.scale_calls += 1
        self._each("scaled", self, outputs, scaled)
        for output, part in losses.pairs(outputs, scaled):
            self._note_loss(losses.read(output), part, window.scale_calls)

    def lazily_scaled(self, scaled: torch.Tensor, call: int) -> None:
        """The user took one item of what `scale()` gave for an iterator."""
        value, scale = losses.read(scaled), self._state.scale()
        if value is not None and isinstance(scale, torch.Tensor) and scale.device.type != "cpu":
            value = torch.as_tensor(value).to(scale.device, non_blocking=True) / scale
        elif value is not None:
            value = value / (host_value(scale) if isinstance(scale, torch.Tensor) else scale)
        self._note_loss(value, scaled, call)

    def _note_loss(self, value: float | torch.Tensor | None, scaled: torch.Tensor, call: int) -> None:
        if value is not None:
            if len(self.window.losses) >= MOST_LOSSES:
                self.window.fold()
            self.window.losses.append(losses.note(value, scaled, call))

    def before_unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are complete and still scaled: take their statistics."""
        self._begin(optimizer, True)
        self.window.unscaled.add(id(optimizer))

    def unscale_disabled(self, optimizer: torch.optim.Optimizer) -> None:
        """A disabled scaler was asked to unscale, and does nothing: gradients are complete all the same."""
        if self.roster.holds(optimizer):
            self._begin(optimizer, True)

    def after_unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Off the sampling grid the statistics of a skipped step are still wanted: take them if the flag is on the host."""
        if not self.window.measuring and self._state.overflowed(optimizer):
            self._take(optimizer, unscaled=True, skipped=True)
        if not self.in_scaler_call:
            self._each("after_unscaled", optimizer)

    def asked_scale(self) -> None:
        """The user called `get_scale()`."""
        self._each("asked_scale")

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """`scaler.step(optimizer)` begins (or `optimizer.step()` outside it)."""
        if self._carries_scale():
            self._begin(optimizer, self.in_scaler_call)
        self._begun_at = self._closed
        self._each("before_optimizer_step", self, optimizer)
        if optimizer.param_groups and not (self.window.lr or (self._boundary is not None and self._boundary.lr)):
            self.window.lr = True
            self.window.fetch.put("lr", optimizer.param_groups[0].get("lr", float("nan")))

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The step returned; it may have been skipped, and a subclass's `step` that updates has closed the record already."""
        mine = self._begun_at == self._closed
        if mine:
            self.window.stepped.append(id(optimizer))
            if self._carries_scale():
                self.window.ended.add(id(optimizer))
        if mine and not self.window.measuring and self._state.overflowed(optimizer):
            self._take(optimizer, unscaled=id(optimizer) in self.window.unscaled, skipped=True)
        self._each("after_optimizer_step", self, optimizer)

    def before_update(self, new_scale: Any) -> None:
        """`update()` begins: read flags and scale now, since it adds the flags together and changes the scale in place."""
        self._join()
        self._each("before_update", self, new_scale)
        self._read_scaler()
        if new_scale is not None:
            self.observe("new_scale", 1.0)

    def after_update(self) -> None:
        """`update()` returned: the record is complete."""
        self._state.updated()
        self.window.fetch.put("scale_after", self._state.scale())
        self._finish()
        self._each("after_update", self)

    def failed(self, call: str, error: BaseException) -> None:
        """A call of the user's raised; it goes on to the user."""
        self._each("failed", self, call, error)

    def before_bare_step(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer.step()` is about to run, not through `scaler.step()`."""
        if not self.in_scaler_step and self.roster.holds(optimizer):
            self.before_step(optimizer)

    def after_bare_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It ran. Without a scaler it ends the record, if it is the optimizer that was named."""
        if self.in_scaler_step or not self.roster.holds(optimizer):
            return
        self.after_step(optimizer)
        if optimizer is self.only:
            self._each("before_update", self, None)
            self._read_scaler()
            self._finish()
            self._each("after_update", self)

    def captured(self) -> None:
        """A call of the scaler becomes part of a CUDA graph: neither it nor its replays can be seen. Say so once."""
        if not self._told_captured:
            self._told_captured = True
            text = "calls of the scaler were captured in a CUDA graph: what the graph replays is not recorded"
            self.add_event(Event(self.window.step, "note", phase="usage", message=text, data={"topic": "captured"}))
            say(f"ampscope: {text}.")

    def close(self) -> None:
        """Close the open record, if anything happened in it; nothing is recorded afterwards. `shut` follows."""
        if self._boundary is not None:
            self._split()
        if self.window.busy or (self.window.custom and self._last is None and not self._deferred):
            self._read_scaler()
            self._finish()
        elif self.window.custom:
            late = Fetch()
            for name, value in self.window.custom.items():
                late.put(name, value)
            late.send()
            self._submit(Amended(self.amended, late))
        self._each("closing", self)
        if self.window.events:
            self._submit_events(self.window.events)
            self.window.events = []
        self._release()
        self.enabled = False

    # Inside

    def _open(self, step: int) -> Window:
        sampled = step % self.every == 0
        return Window(step, sampled=sampled, measuring=sampled, keep_exponents=step % self.exponents_every == 0)

    def _join(self) -> None:
        """The record had not ended at the last `scale()`: put its two parts together."""
        if self._boundary is not None:
            later, self.window, self._boundary = self.window, self._boundary, None
            self.window.absorb(later)

    def _split(self) -> None:
        """The record had ended at the last `scale()`: close it, and go on with what came after."""
        if self._boundary is not None:
            later, self.window, self._boundary = self.window, self._boundary, None
            self._read_scaler()
            self._finish()
            self.window = later

    def _release(self) -> None:
        self.window.release()
        if self._boundary is not None:
            self._boundary.release()

    def _carries_scale(self) -> bool:
        """Whether gradients have the record's loss scale: not in a bare step before any scaled loss was back-propagated.

        (A network trained beside the scaler, in FP32 say. Divided by the loss scale its numbers would be wrong, so there are none.)
        """
        parts = [self.window] if self._boundary is None else [self.window, self._boundary]
        return self.in_scaler_call or not self._state.enabled or any(x.backward for part in parts for x in part.losses)

    def _begin(self, optimizer: torch.optim.Optimizer, by_scaler: bool) -> None:
        """An optimizer is unscaled or stepped. If the record has seen it step before, another one has begun."""
        key = id(optimizer)
        if self._boundary is not None and key in self._boundary.ended:
            self._split()
            self._each("closed_without_update", self)
        elif by_scaler and key in self.window.ended:
            self._read_scaler()
            self._finish()
            self._each("closed_without_update", self)
        if key not in self.window.begun:
            self.window.begun.add(key)
            self._each("before_unscale", self, optimizer)
            self._take(optimizer)

    def _take(self, optimizer: torch.optim.Optimizer, *, unscaled: bool = False, skipped: bool = False) -> None:
        """Measure an optimizer's gradients if they are wanted.

        Off the sampling grid they are if the step turns out to be skipped. On the host that is known in time. On a device it is not: they
        are measured at every step, and dropped later.
        """
        if self.window.measuring or skipped or self._state.on_device:
            plan = self.roster.plan(optimizer, closely=self.window.keep_exponents)
            take(self.window, plan, self.scaler._scale if unscaled else None)

    def _read_scaler(self) -> None:
        """Put flags, scale and growth tracker, as they are now, into the record; each flag goes into one record."""
        fetch = self.window.fetch
        for key, flag in self._state.new_flags():
            optimizer = self.optimizers.get(key)
            if optimizer is not None:
                fetch.add(f"flag:{self.label(optimizer)}", flag)
        fetch.put("loss_scale", self._state.scale())
        if self._state.enabled:
            fetch.put("growth_tracker", self._state.tracker())

    def _finish(self) -> None:
        """Close the open window and hand it on; open the next."""
        window, fetch = self.window, self.window.fetch
        self._see_settings(window)
        chosen = losses.objective(window.losses)
        for loss in chosen:
            fetch.add("loss", loss.value)
        if window.scale_calls:
            fetch.put("micro_steps", float(window.folded + len({loss.call for loss in chosen})))
        for name, value in window.custom.items():
            fetch.put("custom:" + name, value)
        window.release()
        if window.keep_exponents:
            weigh(window, self.roster)
        if window.taken:
            take_untouched(window, self.roster)
        devices = self.roster.cuda_devices()
        if devices:
            fetch.put("peak_memory_bytes", peak_memory(devices))
        if self.roster.changed:
            self.roster.changed = False
            self._set_layers(list(self.layers))
        window.n_layers = len(self.layers)
        now = time.perf_counter()
        if self._began is not None:
            window.overhead += now - self._began
            self._began = now
        fetch.put("overhead_seconds", window.overhead)
        fetch.put("step_seconds", now - self._clock)
        fetch.put("time", time.time())
        self._clock = now
        fetch.send()
        self._closed += 1
        self.step = window.step + 1
        self.window = self._open(self.step)
        pending = PendingRecord(window, self._build)
        self._deferred = self._deferred or not pending.ready()  # once one waits, those after it wait behind it
        if self._deferred:
            self._submit(pending)
        else:
            record = pending.resolve()
            self.resolved(record)
            self._submit(Resolved(record))

    def _see_settings(self, window: Window) -> None:
        settings = self._state.settings()
        if settings != self._settings:
            changed = ", ".join(f"{k} = {v}" for k, v in settings.items() if self._settings.get(k) != v)
            self._settings = settings
            text, data = f"scaler settings changed: {changed}", {"topic": "scaler", **settings}
            window.events.append(Event(window.step, "settings", self.rank, message=text, data=data))

    def resolved(self, record: StepRecord) -> None:
        """A record's numbers are on the host: let the observers see it (any thread)."""
        if record is not self._amended:
            self._last = record
            self._each("resolved", record)
            if self.rank:
                record.events = [e if e.rank == self.rank else replace(e, rank=self.rank) for e in record.events]

    def amended(self, custom: dict[str, float]) -> StepRecord:
        """Return the last record again, with what `.log()` added after it; any thread, after every other record."""
        last = self._last
        if last is None:
            last = StepRecord(max(self.step - 1, 0), time.time(), {})
        self._amended = replace(last, custom={**last.custom, **custom}, events=[])
        return self._amended
