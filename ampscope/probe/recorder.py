"""The lifecycle of a watched scaler: its calls come in, one `Pending` record goes out at each `update()`.

Nothing here may change training: the user's call always runs, with the user's arguments, outside the guard. What ampscope
does before and after runs inside it, and a fault there switches ampscope off with one warning.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ampscope.probe import names
from ampscope.probe.observer import Observer
from ampscope.probe.stats import measure
from ampscope.probe.window import Fetch, Loss, PendingRecord, Taken, Window, host_value, merge
from ampscope.record.step import Event, Layer, Resolved, StepRecord


class Recorder:
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
        optimizer: torch.optim.Optimizer | None = None,
        observers: Iterable[Observer] = (),
        submit: Callable[[Any], None],
        submit_events: Callable[[list[Event]], None],
        set_layers: Callable[[list[Layer]], None],
    ) -> None:
        self.scaler, self.models = scaler, models
        self.every, self.exponents_every = every, exponents_every
        self.step = first_step
        self.observers = list(observers)
        self.enabled = True
        self.in_scaler_step = False
        self.in_scaler_call = False
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self._labels: dict[int, str] = {}
        self._submit, self._submit_events, self._set_layers = submit, submit_events, set_layers
        found = names.collect(models)
        self.parameters = [p for _, p in found]
        self.layers = [names.make_layer(n, p) for n, p in found]
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        self._layers_changed = False
        self._plans: dict[int, tuple[tuple[int, ...], np.ndarray[Any, Any]]] = {}
        self._clock = time.perf_counter()
        self._boundary: Window | None = None
        self._losses_handles: list[Any] = []
        self._previous_scale: float | None = None
        self._settings = self._read_settings()
        self.only = optimizer
        if optimizer is not None:
            self._learn(optimizer)
        self.window = self._open()
        for observer in list(self.observers):
            self._tell(observer, "attached", self)

    # What observers use

    @property
    def micro_step(self) -> int:
        """How many `scale()` calls this record has seen."""
        return self.window.scale_calls

    def label(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the optimizer's name in the log, e.g. "Adam.0"."""
        self._learn(optimizer)
        return self._labels[id(optimizer)]

    def index(self, param: torch.Tensor) -> int | None:
        """Return the layer index of a parameter, or None."""
        return self._index.get(id(param))

    def keep_until_record_closes(self, handle: Any) -> None:
        """Remove a hook when the open record closes."""
        self._losses_handles.append(handle)

    def looks_bad(self) -> bool:
        """Whether the open record is known, on the host already, to hold an overflow or a non-finite loss."""
        flags = (f for _, s in self._states() for f in s["found_inf_per_device"].values())
        losses = (x.value for x in self.window.losses)
        return any(f.device.type == "cpu" and host_value(f) > 0 for f in flags) or any(
            isinstance(v, float) and not math.isfinite(v) for v in losses
        )

    def add_event(self, event: Event) -> None:
        """Put an event into the open record."""
        self.window.events.append(event)

    def observe(self, name: str, value: float | torch.Tensor) -> None:
        """Add `value` to the open record's `observed[name]`; a tensor is fetched without a synchronisation."""
        self.window.fetch.add("observed:" + name, value)

    def log(self, **scalars: float) -> None:
        """Put the user's own scalars into the open record (the later of two values under one name wins)."""
        self.window.custom.update(scalars)

    # The guard

    def guarded(self, method: str, *args: Any) -> None:
        """Run one of this recorder's steps; a fault in it disables ampscope with one warning and goes no further."""
        if not self.enabled:
            return
        start = time.perf_counter()
        try:
            getattr(self, method)(*args)
        except Exception as error:  # the one guarded boundary: a monitor must not end a job
            self.disable(f"{type(error).__name__} in {method}: {error}")
        finally:
            self.window.overhead += time.perf_counter() - start

    def disable(self, why: str) -> None:
        """Stop recording, say so once, and take everything out."""
        if self.enabled:
            self.enabled = False
            self._close_observers()
            self._drop_loss_hooks()
            warnings.warn(f"ampscope stopped recording ({why}). Training goes on unwatched.", RuntimeWarning, stacklevel=3)

    def _tell(self, observer: Observer, what: str, *args: Any) -> None:
        try:
            getattr(observer, what)(*args)
        except Exception as error:  # a fault in one observer costs that observer, not the record
            if observer in self.observers:
                self.observers.remove(observer)
            warnings.warn(
                f"ampscope switched {type(observer).__name__} off ({type(error).__name__} in {what}: {error}). "
                "Recording and training go on.",
                RuntimeWarning,
                stacklevel=4,
            )
            if what != "closed":
                self._tell(observer, "closed")

    def _each(self, what: str, *args: Any) -> None:
        for observer in tuple(self.observers):
            self._tell(observer, what, *args)

    def _close_observers(self) -> None:
        self._each("closed")
        self.observers.clear()

    # Calls of the scaler, in the order a loop makes them

    def before_scale(self) -> None:
        """`scale()` is about to run: if an optimizer has stepped, a record may end here (known for sure only later)."""
        if self.window.stepped:
            self._boundary, self.window = self._joined(), self._open(self.step + 1)

    def after_scale(self, outputs: Any, scaled: Any) -> Any:
        """Note the losses; return what the user gets (the same object, or a lazy pass-through for an iterator)."""
        self.window.scale_calls += 1
        if isinstance(scaled, torch.Tensor):
            self._note_loss(outputs, scaled)
        elif isinstance(scaled, (list, tuple)) and isinstance(outputs, (list, tuple)):
            for out, sca in zip(outputs, scaled, strict=False):
                if isinstance(sca, torch.Tensor):
                    self._note_loss(out, sca)
        self._each("scaled", self, outputs, scaled)

    def _note_loss(self, output: torch.Tensor, scaled: torch.Tensor) -> None:
        from ampscope.probe import hooks  # circular at import time otherwise

        value = host_value(output) if output.device.type == "cpu" else output.detach()
        loss = Loss(value)
        self.window.losses.append(loss)

        def seen() -> None:
            loss.backward = True

        handle = hooks.on_backward(scaled, seen) if scaled is not output else None
        if handle is not None:
            self._losses_handles.append(handle)
        else:
            loss.backward = output.requires_grad

    def before_unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are complete and still scaled: take their statistics."""
        self._begin(optimizer)
        self.window.unscaled.add(id(optimizer))

    def after_unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Off the sampling grid the statistics of a skipped step are still wanted: take them if the flag is on the host."""
        if not self.window.sampled and self._flag_on_host(optimizer):
            self._take(optimizer, rescale=True)
        if not self.in_scaler_call:
            self._each("after_unscaled", optimizer)

    def asked_scale(self) -> None:
        """The user called `get_scale()`."""
        self._each("asked_scale")

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """`scaler.step(optimizer)` begins (or `optimizer.step()` outside it)."""
        self._begin(optimizer)
        self._each("before_optimizer_step", self, optimizer)
        if optimizer.param_groups and not (self.window.lr or (self._boundary is not None and self._boundary.lr)):
            self.window.lr = True
            self.window.fetch.put("lr", optimizer.param_groups[0].get("lr", float("nan")))

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The step returned; it may have been skipped."""
        self.window.stepped.append(id(optimizer))
        if not self.window.sampled and self._flag_on_host(optimizer):
            self._take(optimizer, rescale=id(optimizer) in self.window.unscaled)
        self._each("after_optimizer_step", self, optimizer)

    def before_update(self, new_scale: Any) -> None:
        """`update()` begins: read flags and scale now, since it adds the flags together and changes the scale in place."""
        if self._boundary is not None:
            self.window = self._joined()
        self._each("before_update", self, new_scale)
        self._read_scaler()
        if new_scale is not None:
            self.observe("new_scale", 1.0)

    def after_update(self) -> None:
        """`update()` returned: the record is complete."""
        self._put_scale("scale_after")
        self._finish()
        self._each("after_update", self)

    def failed(self, call: str, error: BaseException) -> None:
        """A call of the user's raised; it goes on to the user."""
        self._each("failed", self, call, error)

    def outside_step(self, optimizer: torch.optim.Optimizer, after: bool) -> None:
        """`optimizer.step()` ran, or is about to, outside `scaler.step()`."""
        if after:
            self.after_step(optimizer)
            if self.scaler is None and optimizer is self.only:
                self._each("before_update", self, None)
                self._read_scaler()
                self._finish()
                self._each("after_update", self)
        else:
            self.before_step(optimizer)

    def watches(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a bare step of this optimizer concerns the watched parameters."""
        if self.only is not None:
            return optimizer is self.only
        if id(optimizer) in self.optimizers and self.optimizers[id(optimizer)] is optimizer:
            return True
        return any(id(p) in self._index for _, _, p in names.optimizer_parameters(optimizer))

    def close(self) -> None:
        """Close the open record, if anything happened in it, and every observer."""
        if self.enabled:
            if self._boundary is not None:
                boundary, rest = self._boundary, self.window
                self._boundary = None
                self.window = boundary
                self._finish()
                rest.step = self.step
                self.window = rest
            if self.window.busy:
                self._read_scaler()
                self._finish()
            elif self.window.events:
                self._submit_events(self.window.events)
            self._close_observers()
        self._drop_loss_hooks()
        self.enabled = False

    # Inside

    def _open(self, step: int | None = None) -> Window:
        window = Window(self.step if step is None else step)
        window.sampled = window.step % self.every == 0
        window.keep_exponents = window.step % self.exponents_every == 0
        return window

    def _joined(self) -> Window:
        """Join the part before an assumed end of record with the part after it: it was one record after all."""
        if self._boundary is None:
            return self.window
        first, second = self._boundary, self.window
        self._boundary = None
        first.fetch.absorb(second.fetch)
        first.losses += second.losses
        first.scale_calls += second.scale_calls
        first.taken += second.taken
        first.measured |= second.measured
        first.stepped += second.stepped
        first.begun |= second.begun
        first.unscaled |= second.unscaled
        first.events += second.events
        first.custom.update(second.custom)
        first.lr |= second.lr
        first.overhead += second.overhead
        first.probed_flushed = second.probed_flushed if second.probed_flushed is not None else first.probed_flushed
        return first

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is unscaled or stepped. If it was stepped before in this record, the assumed end was a real one."""
        self._learn(optimizer)
        if self._boundary is not None and id(optimizer) in self._boundary.stepped:
            later = self.window
            self.window, self._boundary = self._boundary, None
            self._read_scaler()
            self._finish()
            later.step = self.step
            self.window = later
        elif id(optimizer) in self.window.stepped:
            self._read_scaler()
            self._finish()
        if id(optimizer) not in self.window.begun:
            self.window.begun.add(id(optimizer))
            self._each("before_unscale", self, optimizer)
            self._take(optimizer)

    def _learn(self, optimizer: torch.optim.Optimizer) -> None:
        """Label an optimizer seen for the first time, and find its parameters, new groups included."""
        key = id(optimizer)
        if self.optimizers.get(key) is not optimizer:
            self._labels[key] = f"{type(optimizer).__name__}.{len(self.optimizers)}"
            self.optimizers[key] = optimizer
            self._plans.pop(key, None)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        ids = tuple(map(id, params))
        if key in self._plans and self._plans[key][0] == ids:
            return
        label, taken = self._labels[key], {layer.name for layer in self.layers}
        for g, i, p in names.optimizer_parameters(optimizer):
            at = self._index.get(id(p))
            if at is None:
                name = f"optimizer.{g}.{i}"
                if name in taken:
                    name = f"optimizer.{label}.{g}.{i}"
                self._index[id(p)] = len(self.parameters)
                self.parameters.append(p)
                self.layers.append(names.make_layer(name, p, label))
                self._layers_changed = True
            elif self.layers[at].optimizer != label or self.layers[at].numel == 0:
                self.layers[at] = names.make_layer(self.layers[at].name, p, label)
                self._layers_changed = True
        self._plans[key] = (ids, np.array([self._index[i] for i in ids], dtype=np.int64))

    def _take(self, optimizer: torch.optim.Optimizer, rescale: bool = False) -> None:
        """Start measuring the gradients of an optimizer's parameters, each parameter once a record."""
        window = self.window
        if not (window.sampled or rescale or self._device_flags()):
            return
        grads, index, missing = [], [], []
        for at in self._plans[id(optimizer)][1].tolist():
            if at in window.measured:
                continue
            grad = self.parameters[at].grad
            if grad is None:
                missing.append(at)
            else:
                grads.append(grad)
                index.append(at)
                window.measured.add(at)
        if rescale and grads:
            grads = [g.detach() * self.scaler._scale.to(g.device) for g in grads]
        if grads or missing:
            window.taken.append(Taken(np.array(index, np.int64), np.array(missing, np.int64), measure(grads)))

    def _device_flags(self) -> bool:
        """Whether found_inf is not on the host in time: then every step is measured and the record drops what nobody wants."""
        scale = getattr(self.scaler, "_scale", None)
        return scale is not None and scale.device.type != "cpu"

    def _states(self) -> Iterator[tuple[int, dict[str, Any]]]:
        states = getattr(self.scaler, "_per_optimizer_states", None)
        if states:
            yield from states.items()

    def _flag_on_host(self, optimizer: torch.optim.Optimizer) -> bool:
        for key, state in self._states():
            if key == id(optimizer):
                flags = state["found_inf_per_device"].values()
                return any(f.device.type == "cpu" and host_value(f) > 0 for f in flags)
        return False

    def _read_scaler(self) -> None:
        """Put flags, scale and growth tracker, as they are now, into the record."""
        fetch = self.window.fetch
        for key, state in self._states():
            if key in self.window.flagged:
                continue
            self.window.flagged.add(key)
            for flag in state["found_inf_per_device"].values():
                fetch.add(f"flag:{self._labels.get(key, '?')}", flag)
        self._put_scale("loss_scale")
        if self.scaler is not None and self.scaler.is_enabled():
            tracker = self.scaler._growth_tracker
            fetch.put("growth_tracker", self.scaler._init_growth_tracker if tracker is None else tracker)

    def _put_scale(self, name: str) -> None:
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled():
            value: Any = 1.0
        else:
            value = scaler._init_scale if scaler._scale is None else scaler._scale
        self.window.fetch.put(name, value)

    def _read_settings(self) -> dict[str, Any]:
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled():
            return {"enabled": False}
        return {
            "enabled": True,
            "growth_factor": scaler._growth_factor,
            "backoff_factor": scaler._backoff_factor,
            "growth_interval": scaler._growth_interval,
        }

    def _finish(self) -> None:
        """Close the open window and hand it on; open the next."""
        window = self.window
        settings = self._read_settings()
        if settings != self._settings:
            changed = {k: v for k, v in settings.items() if self._settings.get(k) != v}
            text = ", ".join(f"{k} = {v}" for k, v in changed.items())
            window.events.append(
                Event(window.step, "settings", message=f"scaler settings changed: {text}", data={"topic": "scaler", **settings})
            )
            self._settings = settings
        for loss in window.losses:
            if loss.backward:
                window.fetch.add("loss", loss.value)
        window.fetch.put("micro_steps", float(sum(x.backward for x in window.losses)))
        self._drop_loss_hooks()
        if window.keep_exponents:
            self._weigh(window)
        now = time.perf_counter()
        window.fetch.put("step_seconds", now - self._clock)
        window.fetch.put("time", time.time())
        self._clock = now
        self._peak_memory(window.fetch)
        if self._layers_changed:
            self._layers_changed = False
            self._set_layers(list(self.layers))
        window.n_layers = len(self.layers)
        window.fetch.put("overhead_seconds", window.overhead)
        window.fetch.send()
        self.step = window.step + 1
        pending = PendingRecord(window, self._build)
        if pending.ready():
            record = pending.resolve()
            self.resolved(record)
            self._submit(Resolved(record))
        else:
            self._submit(pending)
        self.window = self._open()

    def _drop_loss_hooks(self) -> None:
        while self._losses_handles:
            self._losses_handles.pop().remove()

    def _weigh(self, window: Window) -> None:
        """Start computing the parameters' norms (meta and lazy ones excepted)."""
        index = [i for i, p in enumerate(self.parameters) if p.device.type != "meta" and p.numel() and self.layers[i].optimizer]
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i in index:
            p = self.parameters[i]
            groups.setdefault((p.device, p.dtype), []).append(i)
        order: list[int] = []
        with torch.no_grad():
            for members in groups.values():
                tensors = [getattr(self.parameters[i], "_local_tensor", self.parameters[i]).detach() for i in members]
                norms = torch._foreach_norm([t.to_dense() if t.is_sparse else t for t in tensors])
                for i, norm in zip(members, norms, strict=True):
                    window.fetch.put(f"weight:{i}", norm.abs() if norm.is_complex() else norm)
                order += members
        window.weight_index = np.array(order, np.int64)

    def _peak_memory(self, fetch: Fetch) -> None:
        devices = {p.device for p in self.parameters if p.device.type == "cuda"}
        if devices:
            fetch.put("peak_memory_bytes", float(max(torch.cuda.max_memory_allocated(d) for d in devices)))

    def _build(self, window: Window) -> StepRecord:
        """Make the record; any thread."""
        got = window.fetch.get()
        flags = {k[5:]: v for k, v in got.items() if k.startswith("flag:")}
        observed = {k[9:]: v for k, v in got.items() if k.startswith("observed:")}
        observed.update({f"skipped/{k}": float(v > 0) for k, v in flags.items()})
        skipped = any(v > 0 for v in flags.values())
        scalars = {
            k: got[k]
            for k in ("time", "loss", "loss_scale", "growth_tracker", "micro_steps", "lr", "step_seconds",
                      "overhead_seconds", "peak_memory_bytes")
            if k in got
        }  # fmt: skip
        scalars["skipped"] = float(skipped)
        scalars.setdefault("growth_tracker", 0.0)
        record = StepRecord(window.step, got["time"], scalars, custom=window.custom, observed=observed, events=window.events)
        if window.taken and (window.sampled or skipped):
            record.layers = merge(window.taken, window.n_layers)
            record.keep_exponents = window.keep_exponents or skipped
        if window.weight_index is not None:
            record.weight_norm = np.full(window.n_layers, np.nan)
            for i in window.weight_index.tolist():
                record.weight_norm[i] = got[f"weight:{i}"]
        probed = window.probed_flushed
        record.probed_flushed = probed(window.n_layers) if callable(probed) else probed
        self._scale_events(record, got.get("scale_after"), "new_scale" in observed)
        return record

    def _scale_events(self, record: StepRecord, after: float | None, by_hand: bool) -> None:
        """Tell growth, backoff and hand-set scales apart."""
        step, scale, previous = record.step, record.scalars["loss_scale"], self._previous_scale
        if previous is not None and scale != previous:
            text = f"loss scale set from {previous:g} to {scale:g} outside update()"
            record.events.append(Event(step, "settings", message=text, data={"topic": "scale", "from": previous, "to": scale}))
        self._previous_scale = scale if after is None else after
        if after is None or after == scale:
            return
        data = {"from": scale, "to": after}
        if by_hand:
            text = f"update(new_scale) set the loss scale from {scale:g} to {after:g}"
            record.events.append(Event(step, "settings", message=text, data={"topic": "new_scale", **data}))
        elif after > scale:
            record.events.append(Event(step, "growth", message=f"loss scale {scale:g} → {after:g}", data=data))
        else:
            record.events.append(Event(step, "backoff", message=f"loss scale {scale:g} → {after:g}", data=data))

    def resolved(self, record: StepRecord) -> None:
        """A record's numbers are on the host: let the observers see it (any thread)."""
        self._each("resolved", record)
