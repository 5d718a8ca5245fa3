"""`watch`, `unwatch`, `handle`: the parts of the probe wired together, and taken apart again."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ampscope.errors import AmpscopeError, LogError
from ampscope.log.rundir import RunClaim, claim
from ampscope.log.schema import SCALARS
from ampscope.log.writer import LogWriter, NullWriter
from ampscope.probe import arguments, hooks, launch, losses, names
from ampscope.probe.activations import Activations
from ampscope.probe.advice import Advice
from ampscope.probe.armed import ArmedTracer
from ampscope.probe.culprit import Culprit
from ampscope.probe.describe import make_header
from ampscope.probe.guard import say
from ampscope.probe.observer import Observer
from ampscope.probe.recorder import Recorder
from ampscope.probe.state import State
from ampscope.probe.stats import BACKENDS
from ampscope.probe.swapped import methods
from ampscope.probe.underflow import UnderflowProbe
from ampscope.probe.usage import Usage
from ampscope.record.step import Event, Layer, StepRecord

CLOSER = "ampscope-close"
"""Name of threads that close a watch whose scaler was garbage."""


class Watch:
    """A watched scaler (or, with `scaler=None`, optimizer). Closes on `close()`, `unwatch`, the end of `with`, or exit.

    Attributes:
        run_dir: the run's folder, or None where the log folder could not be used.
        step: number of the record now open.
    """

    def __init__(self, scaler: Any, recorder: Recorder, writer: LogWriter | NullWriter, run_dir: Path | None) -> None:
        self.scaler, self.recorder, self.run_dir = scaler, recorder, run_dir
        self._writer = writer
        self._listening = hooks.Handles()
        self._swapped = hooks.Handles()
        self._unloggable: set[str] = set()
        self._closed = False
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))

    @property
    def step(self) -> int:
        """Number of the record now open."""
        return self.recorder.step

    def log(self, **scalars: float | torch.Tensor) -> None:
        """Record scalars of your own with the open step: numbers, or tensors of one element on any device (never synchronises).

        A value that is no number is left out, with one warning a name. What is logged after the last step belongs to that step. A name
        that every run has, `lr` say, becomes `user/lr`; without a scaler, `loss` is taken for the run's loss too.
        """
        values: dict[str, float | torch.Tensor] = {}
        for name, value in scalars.items():
            number = _number(value)
            if number is not None:
                values[f"user/{name}" if name in SCALARS else name] = number
            elif name not in self._unloggable:
                self._unloggable.add(name)
                say(f"ampscope: log({name}=...) needs a number, not {type(value).__name__}; it is left out")
        self.recorder.guarded("log", values)

    def flush(self) -> None:
        """Return when every closed record is on disk."""
        self._writer.flush()

    def close(self) -> None:
        """Close the open record, write everything, remove every hook, give the scaler its class back."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self.recorder.guarded("close")
        self._listening.remove()
        self._swapped.remove()
        self._writer.close()
        self.recorder.shut()  # after the writer: observers see the last records, which it may have had to wait for

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Nobody holds the scaler any more. The collector may run on any thread, the writer's own included: wait for it elsewhere.
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            threading.Thread(target=self.close, name=CLOSER).start()


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

    Compiled models are watched; calls of the scaler or of `optimizer.step` that are themselves inside a compiled function are not
    seen.

    Args:
        scaler: a `torch.amp.GradScaler` (any device, deprecated spellings, subclasses, disabled ones), or None with `optimizer`.
        model: a module, or a list or dict of modules, whose parameters are the layers of the record.
        log_dir: folder of runs.
        run: the run's name, one folder name; None names it by date, time and a random suffix. An existing run goes on as a
            new session.
        step: number of the first step; default 0, or the one after the last recorded step.
        every: layer statistics every k-th step, and on every skipped one. Scalars always. (Where the scaler is on a device the
            host learns of a skip too late, so every step is measured there, and what nobody wants is dropped.)
        exponents_every: exponent histograms and weight norms into the log every k-th step.
        probe_every: measure the FP16 underflow every k-th step by one more backward (0: never).
        activations: record statistics of module outputs and of their gradients too.
        tensorboard: True writes TensorBoard scalars into the run's folder, a `SummaryWriter` is used as it is, False writes
            none.
        optimizer: with `scaler=None`: the optimizer whose steps delimit the records.

    Returns:
        The same scaler, or with `scaler=None` the `Watch`.

    Raises:
        AmpscopeError: an argument is wrong, the scaler is watched already, or a live process writes that run. An unusable
            `log_dir` only warns: training goes on unrecorded.
    """
    models = names.as_models(model)
    arguments.check(
        scaler, models, log_dir=log_dir, step=step, every=every, exponents_every=exponents_every, probe_every=probe_every,
        activations=activations, tensorboard=tensorboard, optimizer=optimizer,
    )  # fmt: skip
    rank, world = launch.rank_and_world()
    found = _claim(log_dir, run, rank, world, step)
    settings = {
        "every": every,
        "exponents_every": exponents_every,
        "probe_every": probe_every,
        "activations": activations,
    }
    resolved = _Resolved()
    writer: LogWriter | NullWriter = NullWriter()
    observers: list[Observer] = []
    if found is not None:
        header = make_header(scaler, models, found, rank, world, settings)
        writer = LogWriter(found, header, tensorboard=tensorboard, on_resolved=resolved)
        observers = default_observers(probe_every=probe_every, activations=activations)
        if activations:
            beside = replace(found, lock=None)

            def open_stream(layers: Sequence[Layer]) -> LogWriter:
                return LogWriter(beside, replace(header, layers=layers, kind="activations"), tensorboard=False)

            observers.append(Activations(exponents_every, open_stream))
        if rank == 0:
            observers.append(Advice(found.path))
        BACKENDS.warm()
    recorder = Recorder(
        scaler,
        models,
        every=every if found else sys.maxsize,  # with nowhere to write, the steps are counted and no more
        exponents_every=exponents_every if found else sys.maxsize,
        first_step=found.first_step if found else step or 0,
        rank=rank,
        optimizer=optimizer,
        observers=observers,
        submit=writer.submit,
        submit_events=writer.submit_events,
        set_layers=writer.set_layers,
    )
    resolved.recorder = weakref.ref(recorder)
    if found is not None and found.resumed:
        text = f"session {found.session} begins at step {found.first_step}"
        recorder.add_event(Event(found.first_step, "session", rank, message=text, data={"session": found.session}))
    made = Watch(scaler, recorder, writer, found.path if found else None)
    try:
        _install(made)
    except TypeError as error:  # a class that cannot be derived from
        made.close()
        raise AmpscopeError(f"watch(): cannot watch a {type(scaler).__name__}: {error}") from error
    return made if scaler is None else scaler


def default_observers(*, probe_every: int, activations: bool) -> list[Observer]:
    """Return the parts that listen to every watched scaler, in the order they are called."""
    probe: list[Observer] = [UnderflowProbe(probe_every)] if probe_every else []
    return [Culprit(), Usage(), State(), ArmedTracer(), *probe]


def unwatch(scaler: Any) -> None:
    """Stop watching: close the log, remove every hook, give the scaler its class back.

    Args:
        scaler: a watched scaler, or its `Watch`. Unwatching one that is not watched does nothing.

    Raises:
        AmpscopeError: it is neither a scaler nor a `Watch`.
    """
    made = scaler if isinstance(scaler, Watch) else getattr(type(scaler), arguments.WATCHED, None)
    if isinstance(made, Watch):
        made.close()
    elif not isinstance(scaler, torch.amp.GradScaler):
        raise AmpscopeError(f"unwatch(): {type(scaler).__name__} is not a watched scaler or a Watch")


def handle(scaler: Any) -> Watch:
    """Return the `Watch` of a watched scaler.

    Raises:
        AmpscopeError: the scaler is not watched.
    """
    made = scaler if isinstance(scaler, Watch) else getattr(type(scaler), arguments.WATCHED, None)
    if not isinstance(made, Watch):
        raise AmpscopeError("handle(): this scaler is not watched; call ampscope.watch(scaler, model) first")
    return made


class _Resolved:
    """Hands records on from the writer's thread, which must not keep a recorder, its model and its scaler alive."""

    def __init__(self) -> None:
        self.recorder: weakref.ref[Recorder] | None = None

    def __call__(self, record: StepRecord) -> None:
        recorder = self.recorder() if self.recorder is not None else None
        if recorder is not None:
            recorder.resolved(record)


def _claim(
    log_dir: str | os.PathLike[str], run: str | None, rank: int, world: int, step: int | None
) -> RunClaim | None:
    """Return the run's folder, or None, with one warning, where it cannot be used."""
    key = launch.launch_key(world)
    try:
        try:
            return claim(log_dir, run, rank=rank, world_size=world, launch_key=key, step=step)
        except LogError:
            raise
        except AmpscopeError:
            # Written by a live process. If that is this one, its scaler may be waiting for the garbage collector (a notebook's
            # cell that runs again).
            gc.collect()
            for thread in [t for t in threading.enumerate() if t.name == CLOSER]:
                thread.join()
            return claim(log_dir, run, rank=rank, world_size=world, launch_key=key, step=step)
    except (OSError, LogError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        text = f"ampscope cannot write to {os.fspath(log_dir)!r} ({why}): training goes on, nothing is recorded."
        say(text)
        return None


def _install(made: Watch) -> None:
    """Swap the scaler's class, listen to `optimizer.step()` calls that do not come through it, close at exit."""
    recorder = made.recorder
    if recorder.only is not None:  # the optimizer keeps its watch alive
        before, after = (
            functools.partial(_tell, made, "before_bare_step"),
            functools.partial(_tell, made, "after_bare_step"),
        )
        made._listening.add(hooks.optimizer_steps(before, after, recorder.only))
    weak = weakref.ref(made)
    before, after = (
        functools.partial(_tell_weakly, weak, "before_bare_step"),
        functools.partial(_tell_weakly, weak, "after_bare_step"),
    )
    made._listening.add(hooks.optimizer_steps(before, after))
    if made.scaler is not None:
        body = methods(made.scaler, recorder, made.close)
        made._swapped.add(hooks.swap_class(made.scaler, {arguments.WATCHED: made, **body}))
    recorder.on_fault = made._listening.remove
    atexit.register(made._at_exit)


def _tell(made: Watch, what: str, optimizer: torch.optim.Optimizer) -> None:
    made.recorder.guarded(what, optimizer)


def _tell_weakly(weak: weakref.ref[Watch], what: str, optimizer: torch.optim.Optimizer) -> None:
    made = weak()
    if made is not None and optimizer is not made.recorder.only:
        made.recorder.guarded(what, optimizer)


def _close_at_exit(weak: weakref.ref[Watch]) -> None:
    made = weak()
    if made is not None:
        made.close()


def _number(value: Any) -> float | torch.Tensor | None:
    """Return a number, or a copy of a tensor on a device; None for anything else."""
    if isinstance(value, torch.Tensor):
        return losses.read(value) if value.numel() == 1 else None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
