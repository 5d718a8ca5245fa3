"""`watch`, `unwatch`, `handle`: arguments checked, parts wired together."""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

from ampscope.errors import AmpscopeError
from ampscope.log.rundir import RunClaim, claim
from ampscope.log.schema import Header
from ampscope.log.writer import LogWriter, NullWriter
from ampscope.probe import hooks, names
from ampscope.probe.armed import ArmedTracer
from ampscope.probe.culprit import Culprit
from ampscope.probe.observer import Observer
from ampscope.probe.recorder import Recorder
from ampscope.probe.usage import Usage
from ampscope.record.step import Event, Layer

Scaler = TypeVar("Scaler")


class Watch:
    """A watched scaler (or, with `scaler=None`, optimizer). Closes on `close()`, `unwatch`, the end of `with`, or exit.

    Attributes:
        run_dir: the run's folder, or None where the log folder could not be used.
        step: number of the record now open.
    """

    def __init__(self, scaler: Any, recorder: Recorder, writer: LogWriter | NullWriter, run_dir: Path | None) -> None:
        self.scaler, self.recorder, self.run_dir = scaler, recorder, run_dir
        self._writer = writer
        self._handles = hooks.Handles()
        self._closed = False

    @property
    def step(self) -> int:
        """Number of the record now open."""
        return self.recorder.window.step

    def log(self, **scalars: float) -> None:
        """Record scalars of your own with the open step; numbers or 0-d tensors on the host.

        Raises:
            AmpscopeError: a value is not a number.
        """
        values = {}
        for name, value in scalars.items():
            try:
                values[name] = float(value)
            except (TypeError, ValueError):
                raise AmpscopeError(f"log({name}=...): {type(value).__name__} is not a number") from None
        self.recorder.log(**values)

    def flush(self) -> None:
        """Return when every closed record is on disk."""
        self._writer.flush()

    def close(self) -> None:
        """Close the open record, write everything, remove every hook, give the scaler its class back."""
        if self._closed:
            return
        self._closed = True
        self.recorder.guarded("close")
        self._handles.remove()
        self._writer.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def watch(
    scaler: Any,
    model: Any,
    *,
    log_dir: str | os.PathLike[str] = "logs",
    run: str | None = None,
    step: int | None = None,
    every: int = 1,
    exponents_every: int = 10,
    probe_every: int = 0,
    activations: bool = False,
    tensorboard: Any = True,
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    """Watch a gradient scaler in place and record every step of the training it drives.

    Args:
        scaler: a `torch.amp.GradScaler` (any device, deprecated spellings, subclasses, disabled ones), or None with `optimizer`.
        model: a module, or a list or dict of modules, whose parameters are the layers of the record.
        log_dir: folder of runs.
        run: the run's name, one folder name; None names it by date, time and a random suffix. An existing run goes on as a new session.
        step: number of the first step; default 0, or the one after the last recorded step.
        every: layer statistics every k-th step, and on every skipped one. Scalars always.
        exponents_every: exponent histograms and weight norms into the log every k-th step.
        probe_every: measure the FP16 underflow every k-th step by one more backward (0: never).
        activations: record statistics of module outputs and of their gradients too.
        tensorboard: True writes TensorBoard scalars into the run's folder, a `SummaryWriter` is used as it is, False writes none.
        optimizer: with `scaler=None`: the optimizer whose steps delimit the records.

    Returns:
        The same scaler, or with `scaler=None` the `Watch`.

    Raises:
        AmpscopeError: an argument is wrong, the scaler is watched already, or a live process writes that run. An unusable `log_dir`
            only warns: training goes on unrecorded.
    """
    models = names.as_models(model)
    _check(scaler, models, optimizer, every, exponents_every, probe_every, step)
    rank, world = _rank()
    found: RunClaim | None = None
    try:
        found = claim(log_dir, run, rank=rank, world_size=world, launch_key=_launch_key(world), step=step)
    except OSError as error:
        warnings.warn(
            f"ampscope cannot write to {os.fspath(log_dir)!r} ({error.strerror or error}): training goes on, nothing is recorded.",
            RuntimeWarning,
            stacklevel=2,
        )
    observers = default_observers(probe_every=probe_every, activations=activations)
    writer: LogWriter | NullWriter
    holder: list[Recorder] = []
    if found is None:
        writer = NullWriter()
    else:
        writer = LogWriter(
            found,
            _header(scaler, models, found, rank, world, every, exponents_every),
            tensorboard=tensorboard,
            on_resolved=lambda record: holder[0].resolved(record),
        )
    recorder = Recorder(
        scaler,
        models,
        every=every,
        exponents_every=exponents_every,
        first_step=found.first_step if found else step or 0,
        optimizer=optimizer,
        observers=observers,
        submit=writer.submit,
        submit_events=writer.submit_events,
        set_layers=writer.set_layers,
    )
    holder.append(recorder)
    if found is not None and found.resumed:
        text = f"session {found.session} begins at step {found.first_step}"
        recorder.add_event(Event(found.first_step, "session", rank, message=text, data={"session": found.session}))
    made = Watch(scaler, recorder, writer, found.path if found else None)
    _install(made)
    reference = weakref.ref(made)
    atexit.register(_close_at_exit, reference)
    return made if scaler is None else scaler


def default_observers(*, probe_every: int, activations: bool) -> list[Observer]:
    """Return the parts that listen to every watched scaler, in the order they are called."""
    return [Culprit(), Usage(), ArmedTracer()]


def unwatch(scaler: Any) -> None:
    """Stop watching: close the log, remove every hook, give the scaler its class back.

    Args:
        scaler: a watched scaler, or the `Watch` that `watch(None, ...)` returned. Unwatching twice is harmless.

    Raises:
        AmpscopeError: it was never watched.
    """
    if isinstance(scaler, Watch):
        scaler.close()
        return
    made = getattr(type(scaler), "_ampscope_watch", None)
    if made is None:
        if isinstance(scaler, torch.amp.GradScaler) or hasattr(scaler, "unscale_"):
            return
        raise AmpscopeError(f"unwatch(): {type(scaler).__name__} is not a watched scaler or a Watch")
    made.close()


def handle(scaler: Any) -> Watch:
    """Return the `Watch` of a watched scaler.

    Raises:
        AmpscopeError: the scaler is not watched.
    """
    if isinstance(scaler, Watch):
        return scaler
    made = getattr(type(scaler), "_ampscope_watch", None)
    if made is None:
        raise AmpscopeError("handle(): this scaler is not watched; call ampscope.watch(scaler, model) first")
    assert isinstance(made, Watch)
    return made


def _close_at_exit(reference: weakref.ref[Watch]) -> None:
    made = reference()
    if made is not None:
        made.close()


def _check(
    scaler: Any, models: dict[str, Any], optimizer: Any, every: int, exponents_every: int, probe_every: int, step: int | None
) -> None:
    for name, value, least in (("every", every, 1), ("exponents_every", exponents_every, 1), ("probe_every", probe_every, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise AmpscopeError(f"watch(): {name} must be an integer of at least {least}, not {value!r}")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise AmpscopeError(f"watch(): step must be a non-negative integer or None, not {step!r}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise AmpscopeError(f"watch(): optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if scaler is None:
        if optimizer is None:
            raise AmpscopeError("watch(): with scaler=None pass optimizer=, whose steps delimit the records")
        known = {id(p) for _, p in names.collect(models)}
        if not any(id(p) in known for _, _, p in names.optimizer_parameters(optimizer)):
            raise AmpscopeError("watch(): optimizer= holds none of the model's parameters; pass the optimizer that trains this model")
        return
    if isinstance(scaler, torch.nn.Module):
        raise AmpscopeError("watch(): the first argument is a module; the call is watch(scaler, model)")
    missing = [m for m in ("scale", "unscale_", "step", "update", "is_enabled") if not callable(getattr(scaler, m, None))]
    if missing:
        raise AmpscopeError(f"watch(): {type(scaler).__name__} is not a GradScaler (it has no {missing[0]}())")
    if getattr(type(scaler), "_ampscope_watch", None) is not None:
        raise AmpscopeError("watch(): this scaler is watched already; call ampscope.unwatch(scaler) first")


def _rank() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


def _launch_key(world: int) -> str | None:
    """Return what all ranks of one launch, and no other launch, have in common; None for a single process."""
    if world <= 1:
        return None
    parts = [os.environ.get(k, "") for k in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "TORCHELASTIC_RESTART_COUNT")]
    return hashlib.sha256("\0".join([*parts, str(world)]).encode()).hexdigest()[:16]


def _header(
    scaler: Any, models: dict[str, torch.nn.Module], found: RunClaim, rank: int, world: int, every: int, exponents_every: int
) -> Header:
    layers: list[Layer] = [names.make_layer(n, p) for n, p in names.collect(models)]
    device = next((str(p.device) for m in models.values() for p in m.parameters()), "cpu")
    return Header(
        layers=layers,
        session=found.session,
        rank=rank,
        world_size=world,
        first_step=found.first_step,
        scaler=_describe(scaler),
        versions={"ampscope": _version(), "torch": torch.__version__, "python": platform.python_version()},
        device=device,
        device_name=torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else platform.machine(),
        gradients=_kind(models, world),
        settings={"every": every, "exponents_every": exponents_every},
    )


def _version() -> str:
    from ampscope import __version__

    return __version__


def _describe(scaler: Any) -> dict[str, Any]:
    if scaler is None:
        return {"enabled": False, "type": None}
    enabled = bool(scaler.is_enabled())
    out: dict[str, Any] = {"enabled": enabled, "type": type(scaler).__name__}
    if enabled:
        out |= {
            "init_scale": float(scaler._init_scale),
            "growth_factor": scaler._growth_factor,
            "backoff_factor": scaler._backoff_factor,
            "growth_interval": scaler._growth_interval,
            "growth_tracker": int(scaler._init_growth_tracker),
        }
        if scaler._scale is not None:  # watched in mid-training: one synchronisation, in watch() itself
            out |= {"init_scale": float(scaler._scale), "growth_tracker": int(scaler._growth_tracker)}
    return out


def _kind(models: dict[str, torch.nn.Module], world: int) -> str:
    modules = [type(m).__name__ for root in models.values() for m in root.modules()]
    if any("FullyShardedDataParallel" in n or n.startswith("FSDP") for n in modules):
        return "sharded"
    return "replicated" if world > 1 else ""


def _install(made: Watch) -> None:
    """Swap the scaler's class and listen to bare `optimizer.step()` calls."""
    recorder = made.recorder

    def before(optimizer: torch.optim.Optimizer) -> None:
        if recorder.enabled and not recorder.in_scaler_step and recorder.watches(optimizer):
            recorder.guarded("outside_step", optimizer, False)

    def after(optimizer: torch.optim.Optimizer) -> None:
        if recorder.enabled and not recorder.in_scaler_step and recorder.watches(optimizer):
            recorder.guarded("outside_step", optimizer, True)

    made._handles.add(hooks.optimizer_steps(before, after))
    if made.scaler is not None:
        made._handles.add(hooks.swap_class(made.scaler, _methods(made)))


def _methods(made: Watch) -> dict[str, Any]:
    """Return the methods of a watched scaler's class: the original calls, with the recorder told before and after."""
    original = type(made.scaler)
    recorder = made.recorder
    mine = made.scaler

    def call(name: str, method: Callable[..., Any], self: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            recorder.guarded("failed", name, error)
            raise

    @hooks.wraps_method(original.scale)
    def scale(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.enabled or self is not mine:
            return original.scale(self, outputs, *args, **kwargs)
        recorder.guarded("before_scale")
        scaled = call("scale", original.scale, self, (outputs, *args), kwargs)
        recorder.guarded("after_scale", outputs, scaled)
        return scaled

    @hooks.wraps_method(original.unscale_)
    def unscale_(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.enabled or self is not mine or not self._enabled:
            return original.unscale_(self, optimizer, *args, **kwargs)
        recorder.guarded("before_unscale", optimizer)
        out = call("unscale_", original.unscale_, self, (optimizer, *args), kwargs)
        recorder.guarded("after_unscale", optimizer)
        return out

    @hooks.wraps_method(original.step)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.enabled or self is not mine:
            return original.step(self, optimizer, *args, **kwargs)
        recorder.in_scaler_call = recorder.in_scaler_step = True
        try:
            recorder.guarded("before_step", optimizer)
            out = call("step", original.step, self, (optimizer, *args), kwargs)
            recorder.guarded("after_step", optimizer)
        finally:
            recorder.in_scaler_call = recorder.in_scaler_step = False
        return out

    @hooks.wraps_method(original.update)
    def update(self: Any, new_scale: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not recorder.enabled or self is not mine:
            return original.update(self, new_scale, *args, **kwargs)
        recorder.guarded("before_update", new_scale)
        out = call("update", original.update, self, (new_scale, *args), kwargs)
        recorder.guarded("after_update")
        return out

    @hooks.wraps_method(original.get_scale)
    def get_scale(self: Any) -> Any:
        if recorder.enabled and self is mine:
            recorder.guarded("asked_scale")
        return original.get_scale(self)

    def __enter__(self: Any) -> Any:
        return self

    def __exit__(self: Any, *exc: object) -> None:
        made.close()

    return {
        "_ampscope_watch": made, "scale": scale, "unscale_": unscale_, "step": step, "update": update,
        "get_scale": get_scale,
        "__enter__": __enter__, "__exit__": __exit__,
    }  # fmt: skip


