"""The runs of one folder: found, opened when asked for, refreshed as they grow. Shared by every viewer, behind a lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ampscope.errors import AmpscopeError
from ampscope.log.rundir import DEAD_AFTER
from ampscope.log.streams import stream_files
from ampscope.run.find import run_folders
from ampscope.run.run import Run

from .background import Background, collect, diagnose, prepare
from .source import Source

MAKE_WAY = 0.1
"""Seconds for which summaries wait after a viewer asked something."""
SHOW_EVERY = 64
"""Chunks after which a scan that goes on shows what it has."""
State = Literal["live", "ended", "died", "empty"]


@dataclass(frozen=True)
class Entry:
    """A run's folder. `key` is its path below the log folder, the only way a viewer can name it."""

    key: str
    path: Path
    modified: float


@dataclass(frozen=True)
class Life:
    """Whether a run goes on. `age`: seconds since its last sign of life, `rows_age`: since its newest row (NaN: none)."""

    state: State
    age: float
    rows_age: float
    last_step: int


class RunStore:
    """Runs below `log_dir`. A viewer's key is looked up among the folders found; no path is ever made from it."""

    def __init__(self, log_dir: str | Path, *, clock: Callable[[], float] = time.time, rescan: float = 2.0) -> None:
        self.log_dir = Path(log_dir)
        self._clock, self._rescan = clock, rescan
        self._lock = threading.RLock()
        self._entries: dict[str, Entry] = {}
        self._sources: dict[str, Source] = {}
        self._scanned = float("-inf")
        self._refreshed: dict[str, float] = {}
        self._wake = threading.Condition()
        self._jobs: list[tuple[Source, str, int]] = []
        self._asked_at = float("-inf")
        self._worker: threading.Thread | None = None
        self.diagnosis = Background(diagnose, clock, redraw=False)
        self.collected = Background(collect, clock)
        self.prepared = Background(prepare, clock)

    @property
    def now(self) -> float:
        """Unix seconds."""
        return self._clock()

    def entries(self) -> list[Entry]:
        """Return the runs found, newest first; the folder is looked at again at most every `rescan` seconds.

        Raises:
            LogError: there is no such folder.
        """
        with self._lock:
            if abs(self.now - self._scanned) >= self._rescan:
                folders = run_folders(self.log_dir)
                self._entries = {e.key: e for e in map(self._entry, folders)}
                self._scanned = self.now
            return sorted(self._entries.values(), key=lambda e: (e.modified, e.key), reverse=True)

    def _entry(self, folder: Path) -> Entry:
        key = folder.relative_to(self.log_dir).as_posix()
        newest = 0.0
        for _, _, _, path in stream_files(folder):
            try:
                newest = max(newest, path.stat().st_mtime)
            except OSError:
                continue
        return Entry(folder.resolve().name if key == "." else key, folder, newest)

    def source(self, key: str) -> Source:
        """Return a run, opened on first use.

        Raises:
            AmpscopeError: no such run in the folder.
            LogError: its log cannot be read (damaged beginning, newer version).
        """
        with self._lock:
            found = self._sources.get(key)
            if found is not None:
                return found
            entry = self._entries.get(key) or {e.key: e for e in self.entries()}.get(key)
            if entry is None:
                raise AmpscopeError(f"no run {key!r} in {str(self.log_dir)!r}; it may have been renamed or deleted")
            source = self._sources[key] = Source(key, Run(entry.path), self._ask)
            self._refreshed[key] = self.now
            return source

    def refresh(self, key: str, least: float = 0.5) -> Source:
        """Return a run with what was appended; the disk is looked at no more often than every `least` seconds.

        Raises:
            AmpscopeError, LogError: see `source`.
        """
        source = self.source(key)
        self.asked()
        with self._lock:
            due = abs(self.now - self._refreshed.get(key, float("-inf"))) >= least
            if due:
                self._refreshed[key] = self.now
        if due:
            source.refresh()
        return source

    def life(self, source: Source) -> Life:
        """Return whether a run is live, ended or seems dead."""
        run, now = source.run, self.now
        age = max(0.0, now - run.last_seen)
        steps = source.steps
        rows_age = float("nan")
        if len(steps):
            times = source.values("time", run.ranks[0])
            rows_age = max(0.0, now - float(times[-1]))
        state: State = "ended" if run.finished else "died" if age > DEAD_AFTER else "live"
        if state == "live" and not len(steps):
            state = "empty"
        return Life(state, age, rows_age, int(steps[-1]) if len(steps) else -1)

    # Summaries of long runs are made by one thread, a chunk at a time; what was asked for last goes first

    def _ask(self, source: Source, family: str, rank: int) -> None:
        job = (source, family, rank)
        with self._wake:
            if job in self._jobs:
                self._jobs.remove(job)
            self._jobs.append(job)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="ampscope-summaries", daemon=True)
                self._worker.start()
            self._wake.notify()

    def asked(self) -> None:
        """Note that a viewer waits: summaries make way."""
        self._asked_at = time.monotonic()

    @property
    def reading(self) -> bool:
        """Whether summaries are being made."""
        with self._wake:
            return bool(self._jobs)

    def finish_reading(self, timeout: float) -> bool:
        """Wait until every summary asked for is made; return whether it was within `timeout` seconds."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._jobs, timeout)

    def _work(self) -> None:
        try:
            self._work_on()
        finally:  # a bug ends this thread with its traceback; whoever asks next starts another
            with self._wake:
                self._jobs.clear()
                self._worker = None
                self._wake.notify_all()

    def _work_on(self) -> None:
        chunks = 0
        while True:
            with self._wake:
                while not self._jobs:
                    self._wake.wait()
                job = self._jobs[-1]
            source, family, rank = job
            began = time.monotonic()  # many viewers ask all the time: they delay a summary, and do not stop it
            while time.monotonic() - self._asked_at < MAKE_WAY and time.monotonic() - began < 5 * MAKE_WAY:
                time.sleep(MAKE_WAY / 4)
            try:
                more = source.scan_chunk(family, rank)
            except (AmpscopeError, OSError):
                more = False  # the view that asked says what is wrong with the log
            chunks += 1
            if not more or chunks % SHOW_EVERY == 0:
                source.note()
            if not more:
                with self._wake:
                    self._jobs.remove(job)
                    self._wake.notify_all()
