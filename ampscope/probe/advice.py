"""While training: a finding at warning or above is logged once, in one line, with the command that tells more.

The diagnosis reads the run's folder like any other reader, on a thread of its own, now and then after something suspicious, and once
when the watch closes. This is the one place of the probe that looks at the rooms behind it, and it imports them only then.
"""

from __future__ import annotations

import logging
import shlex
import threading
import time
from pathlib import Path

from ampscope.errors import AmpscopeError
from ampscope.probe.observer import Observer
from ampscope.record.step import StepRecord

LOG = logging.getLogger("ampscope")
PATIENCE = 20
"""Steps before the first look, so that an ordinary search for the scale is over."""
EVERY = 60.0
"""Seconds between two looks, at least; and `SHARE` of the time the last one took, so that a long run is not slowed down."""
SHARE = 0.01
SETTLE = 1.0
"""Seconds to wait for the writer to put the record that raised suspicion on disk."""
SUSPICIOUS = ("skip", "nonfinite")


class Advice(Observer):
    """Looks at the run from time to time and logs what is wrong."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._told: set[str] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._next = 0.0
        self._steps = 0
        self._pending = False
        self._done = threading.Event()

    def resolved(self, record: StepRecord) -> None:
        """Look, on another thread, if something was suspicious and the last look is long enough ago."""
        self._steps += 1
        self._pending |= any(e.kind in SUSPICIOUS or e.phase == "usage" for e in record.events)
        if not self._pending or self._steps < PATIENCE or time.monotonic() < self._next or self._done.is_set():
            return
        if self._thread is None or not self._thread.is_alive():
            self._pending, self._next = False, time.monotonic() + EVERY
            self._thread = threading.Thread(target=self._later, name="ampscope-advice", daemon=True)
            self._thread.start()

    def _later(self) -> None:
        if not self._done.wait(SETTLE):
            start = time.monotonic()
            self._look()
            now = time.monotonic()
            self._next = max(self._next, now + (now - start) / SHARE)

    def closed(self) -> None:
        """Look for the last time: everything is on disk."""
        self._done.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10.0)
        if self._steps:
            self._look()

    def _look(self) -> None:
        from ampscope.analysis.diagnose import diagnose  # the rooms behind the probe, read like any reader would
        from ampscope.run.find import open_run

        with self._lock:
            try:
                found = diagnose(open_run(self._run_dir))
            except (AmpscopeError, OSError):
                return  # the folder is gone, or not readable: the writer has said so
            for finding in found:
                if finding.rank and finding.rule not in self._told:
                    self._told.add(finding.rule)
                    where = (
                        f" in {finding.layers[0]}" if finding.layers and finding.layers[0] not in finding.title else ""
                    )
                    command = f"ampscope check {shlex.quote(str(self._run_dir))}"
                    LOG.warning(
                        "ampscope: step %d: %s%s (%s). More: %s",
                        finding.steps[0],
                        finding.title,
                        where,
                        finding.rule,
                        command,
                    )
