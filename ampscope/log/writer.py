"""The background writer: records come in from the training thread, rows and TensorBoard events go out.

It never raises into training.
"""

from __future__ import annotations

import atexit
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ampscope.log.inbox import Inbox
from ampscope.log.journal import Journal, say
from ampscope.log.rundir import RunClaim
from ampscope.log.schema import Header
from ampscope.log.streams import HEARTBEAT
from ampscope.record.step import Event, Layer, Pending, Resolved, StepRecord

FLUSH = 0.5
"""Seconds a row waits at most before it is written; design.md promises one."""


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
        on_resolved: called on the writer's thread with each record that was not resolved when submitted, before it is
            written.
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
        self._claim, self._on_resolved = claim, on_resolved
        self._pid = os.getpid()
        self._closed = False
        self._inbox = Inbox(len(header.layers))
        header = replace(header, created=clock(), pid=self._pid, host=platform.node())
        self._journal = Journal(claim.path, header, tensorboard, clock)
        self._thread = threading.Thread(target=self._run, name="ampscope-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # Called by the training thread

    @property
    def _open(self) -> bool:
        """Whether calls count: not after `close`, and not in a forked child, whose parent writes the log."""
        return not self._closed and self._pid == os.getpid()

    def submit(self, pending: Pending) -> None:
        """Queue a record; returns at once unless the writer is far behind."""
        if self._open:
            # What lies on a device wakes the writer: observers wait to see it.
            self._inbox.put("record", pending, urgent=not isinstance(pending, Resolved))
        elif not self._closed:
            self._closed = True
            say("ampscope: watch() was called before this process was forked off; its steps are not recorded.")

    def submit_events(self, events: Sequence[Event]) -> None:
        """Queue events that belong to no record (an exception before `update()`, say)."""
        if self._open and events:
            self._inbox.put("events", list(events))

    def set_layers(self, layers: Sequence[Layer]) -> None:
        """From the next record on the layers are these; a new part of the log begins (before any row: a new header)."""
        if self._open:
            self._inbox.put("layers", list(layers))

    def flush(self, timeout: float = 30.0) -> None:
        """Return when everything queued is on disk (or the disk refused it), or after `timeout` seconds."""
        if self._open:
            done = threading.Event()
            self._inbox.put("flush", done)
            done.wait(timeout)

    def close(self, timeout: float = 60.0) -> None:
        """Write everything, mark the log finished, give the run back."""
        if not self._open:
            return
        self._closed = True
        self._inbox.put("close", None)
        self._thread.join(timeout)
        atexit.unregister(self.close)
        self._claim.release()

    # On the writer's thread

    def _run(self) -> None:
        next_flush, next_beat = float("inf"), time.monotonic() + HEARTBEAT
        while True:
            waiting: list[threading.Event] = []
            for what, value in self._inbox.get(min(next_flush, next_beat) - time.monotonic()):
                if what == "flush":
                    waiting.append(value)
                elif what == "close":
                    self._close(waiting)
                    return
                else:
                    self._take(what, value)
            now = time.monotonic()
            if waiting or now >= next_flush:
                self._note_drops()
                self._journal.flush()
                next_flush = float("inf")
            for done in waiting:
                done.set()
            if self._journal.pending and next_flush == float("inf"):
                next_flush = now + FLUSH
            if now >= next_beat:
                self._journal.beat()
                next_beat = now + HEARTBEAT

    def _take(self, what: str, value: Any) -> None:
        if what == "record":
            self._record(value)
        elif what == "events":
            self._journal.events(value)
        elif what == "layers":
            self._inbox.resize(len(value))
            self._journal.layers(value)

    def _close(self, waiting: Sequence[threading.Event]) -> None:
        self._note_drops()
        self._journal.close()
        for done in waiting:
            done.set()

    def _record(self, pending: Pending) -> None:
        found: list[StepRecord] = []

        def resolve() -> None:
            record = pending.resolve()
            if not isinstance(pending, Resolved) and self._on_resolved is not None:
                self._on_resolved(record)
            found.append(record)

        if self._journal.attempt(resolve):
            self._journal.record(found[0])
        else:
            self._journal.lost.add([-1], "its numbers could not be had")

    def _note_drops(self) -> None:
        count = self._inbox.take_drops()
        if count:
            self._journal.lost.add([-1] * count, "the writer could not keep up")
