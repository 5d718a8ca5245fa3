"""The background writer: records come in from the training thread, rows and TensorBoard events go out. It never raises into training."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ampscope.log.arrows import ArrowSink
from ampscope.log.encode import Row, encode, encode_events
from ampscope.log.rundir import HEARTBEAT, RunClaim
from ampscope.log.schema import Header
from ampscope.log.tensorboard import TensorBoardSink, make_sink
from ampscope.record.step import Event, Layer, Pending, Resolved, StepRecord

FLUSH = 0.5
"""Seconds a row waits at most before it is written; design.md promises one."""
KEEP = 10_000
"""Newest rows kept in memory while nothing can be written."""


class NullWriter:
    """Writes nothing: the log folder could not be used."""

    def submit(self, pending: Pending) -> None:
        """Do nothing."""

    def submit_events(self, events: Sequence[Event]) -> None:
        """Do nothing."""

    def set_layers(self, layers: Sequence[Layer]) -> None:
        """Do nothing."""

    def flush(self, timeout: float = 30.0) -> None:
        """Do nothing."""

    def close(self, timeout: float = 60.0) -> None:
        """Do nothing."""


class LogWriter:
    """Writes one session of one rank on a thread of its own.

    Args:
        claim: the run's folder.
        header: what is known before the first row; `layers` may change later through `set_layers`.
        tensorboard: True, False, or a `SummaryWriter` of the user's.
        on_resolved: called on the writer's thread with each record that was not resolved when submitted, before it is written.
        clock: Unix seconds; a test may pass its own.
    """

    def __init__(
        self,
        claim: RunClaim,
        header: Header,
        *,
        tensorboard: Any = True,
        on_resolved: Callable[[StepRecord], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._claim = claim
        self._header = replace(header, created=clock(), pid=os.getpid(), host=os.uname().nodename if hasattr(os, "uname") else "")
        self._on_resolved, self._clock = on_resolved, clock
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._closed = False
        self._warned = False
        self._lost: list[str] = []
        self._sink: ArrowSink | None = None
        self._events: TensorBoardSink | None = None
        self._backlog: list[Row] = []
        self._dropped = 0
        self._tensorboard = tensorboard if header.rank == 0 else False
        self._numel = np.array([layer.numel for layer in header.layers], np.int64)
        self._rows = 0
        self._guard(self._open)
        self._thread = threading.Thread(target=self._run, name="ampscope-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # Called by the training thread

    def submit(self, pending: Pending) -> None:
        """Queue a record; returns at once. After `close`, or in a forked child, it does nothing."""
        if not self._closed and self._pid == os.getpid():
            self._queue.put(("record", pending))

    def submit_events(self, events: Sequence[Event]) -> None:
        """Queue events that belong to no step's record."""
        if not self._closed and self._pid == os.getpid():
            self._queue.put(("events", list(events)))

    def set_layers(self, layers: Sequence[Layer]) -> None:
        """From the next record on the layers are these; a new part of the log begins (or, before any row, a new header)."""
        if not self._closed and self._pid == os.getpid():
            self._queue.put(("layers", list(layers)))

    def flush(self, timeout: float = 30.0) -> None:
        """Return when everything queued is on disk, or after `timeout` seconds."""
        if not self._closed and self._pid == os.getpid():
            done = threading.Event()
            self._queue.put(("flush", done))
            done.wait(timeout)

    def close(self, timeout: float = 60.0) -> None:
        """Write everything, mark the log finished, give the run back."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._queue.put(("close", None))
        self._thread.join(timeout)
        atexit.unregister(self.close)
        self._claim.release()

    # On the writer's thread

    def _run(self) -> None:
        next_flush = next_beat = time.monotonic() + FLUSH
        while True:
            try:
                what, value = self._queue.get(timeout=max(next_flush - time.monotonic(), 0.0) if self._waiting() else HEARTBEAT)
            except queue.Empty:
                what, value = "", None
            if what == "record":
                if not self._waiting():
                    next_flush = time.monotonic() + FLUSH
                self._guard(self._record, value)
            elif what == "events":
                self._guard(lambda events: self._write(encode_events(events, self._rows, self._clock())), value)
            elif what == "layers":
                self._guard(self._layers, value)
            now = time.monotonic()
            if what in ("flush", "close") or now >= next_flush:
                self._guard(self._flush)
                next_flush = now + FLUSH
            if now >= next_beat:
                self._guard(self._beat)
                next_beat = now + HEARTBEAT
            if what == "flush":
                value.set()
            elif what == "close":
                self._guard(self._finish)
                return

    def _waiting(self) -> bool:
        return bool(self._backlog) or (self._sink is not None and self._sink.pending > 0)

    def _guard(self, do: Callable[..., None], *args: Any) -> None:
        """Run a step of the writer. What the disk refuses is tried again; anything else costs that step and one warning."""
        try:
            do(*args)
        except OSError as error:
            self._warn(f"cannot write to {str(self._claim.path)!r} ({error.strerror or error}); it keeps the newest records and tries again")
            self._trim()
        except Exception as error:  # the writer's own boundary: a fault here must not end the thread, nor the job
            self._warn(f"lost a record ({type(error).__name__}: {error})")
            self._dropped += 1

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"ampscope {text}. Training goes on.", RuntimeWarning, stacklevel=2)

    def _open(self) -> None:
        if self._sink is None:
            self._sink = ArrowSink(self._claim.path, self._header)
        if self._events is None and self._tensorboard is not False:
            self._events = make_sink(self._tensorboard, self._claim.path, self._header, self._clock)

    def _layers(self, layers: list[Layer]) -> None:
        self._numel = np.array([layer.numel for layer in layers], np.int64)
        before, fresh = self._header, self._rows == 0
        part = before.part if fresh else before.part + 1
        self._header = replace(before, layers=layers, part=part)
        if self._sink is not None:
            old, self._sink = self._sink, None
            if fresh:
                old.abandon()
            else:
                old.close()
        if self._events is not None:
            self._events.set_layers(layers)
        self._open()

    def _record(self, pending: Pending) -> None:
        resolved = isinstance(pending, Resolved)
        record = pending.resolve()
        if not resolved and self._on_resolved is not None:
            self._on_resolved(record)
        self._write(encode(record, self._rows, self._header.layers, self._numel))

    def _write(self, row: Row) -> None:
        self._rows += 1
        if self._sink is None:
            self._backlog.append(row)
            self._open()
        if self._sink is not None:
            for old in self._backlog:
                self._sink.write(old)
            if not self._backlog or self._backlog[-1] is not row:
                self._sink.write(row)
            self._backlog.clear()
        if self._events is not None:
            self._events.write(row)

    def _flush(self) -> None:
        self._open()
        if self._sink is not None:
            for old in self._backlog:
                self._sink.write(old)
            self._backlog.clear()
            if self._dropped and self._sink.pending:
                self._tell_loss()
            self._sink.flush()
        if self._events is not None:
            self._events.flush()

    def _tell_loss(self) -> None:
        assert self._sink is not None
        text = f"{self._dropped} records were lost because nothing could be written"
        event = Event(-1, "note", self._header.rank, message=text, data={"topic": "lost", "records": self._dropped})
        self._sink.write(encode_events([event], self._rows, self._clock()))
        self._rows += 1
        self._dropped = 0

    def _trim(self) -> None:
        excess = len(self._backlog) - KEEP
        if excess > 0:
            del self._backlog[:excess]
            self._dropped += excess
        if self._sink is not None:
            self._dropped += self._sink.rows.dropped
            self._sink.rows.dropped = 0

    def _beat(self) -> None:
        if self._sink is not None:
            self._sink.touch()

    def _finish(self) -> None:
        try:
            if self._sink is not None:
                self._sink.close()
        finally:
            if self._events is not None:
                self._events.close()
