"""The queue between training and the writer: bounded in memory, and never in training's way for long.

Records are handed over many at a time: a writer that wakes at each step makes the training thread wait for Python's global lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

MEMORY = 128 << 20
"""Bytes of records waiting at most."""
LEAST = 4
"""Records that may wait however large they are."""
PATIENCE = 0.25
"""Seconds training waits at most for a writer that is behind."""
PAUSE = 5.0
"""Seconds after a wait in vain in which training waits no more, and the oldest record goes for each new one."""
LINGER = 0.25
"""Seconds a complete record waits for others before the writer is woken."""
MANY = 64
"""Records that wake it earlier; fewer where they are large."""
_LAYER_BYTES = 4400


class Inbox:
    """A queue of (what, value). Only records are bounded in number; everything else is rare."""

    def __init__(self, n_layers: int) -> None:
        self._items: deque[tuple[str, Any]] = deque()
        self._changed = threading.Condition()
        self._records = 0
        self._dropped = 0
        self._impatient_until = 0.0
        self._urgent = False
        self._asleep = False
        self.resize(n_layers)

    def resize(self, n_layers: int) -> None:
        """Set how many records may wait, by the size of a record of so many layers."""
        self.limit = max(LEAST, min(4096, MEMORY // (_LAYER_BYTES * max(n_layers, 1))))

    @property
    def many(self) -> int:
        """Records that are handed over at once."""
        return max(1, min(MANY, self.limit // 8))

    def put(self, what: str, value: Any, urgent: bool = True) -> None:
        """Add an item; one that is not `urgent` may wait for others. Where too many records wait: wait a moment, then drop the oldest."""
        with self._changed:
            if what == "record":
                patient = self._records >= self.limit and time.monotonic() >= self._impatient_until
                if patient and not self._changed.wait_for(lambda: self._records < self.limit, PATIENCE):
                    self._impatient_until = time.monotonic() + PAUSE
                if self._records >= self.limit:
                    self._drop_oldest()
                self._records += 1
            self._items.append((what, value))
            self._urgent |= urgent
            if self._asleep or self._urgent or self._records >= self.many:
                self._changed.notify_all()

    def _drop_oldest(self) -> None:
        for i, (what, _) in enumerate(self._items):
            if what == "record":
                del self._items[i]
                self._records -= 1
                self._dropped += 1
                return

    def get(self, timeout: float) -> list[tuple[str, Any]]:
        """Return what waits, oldest first; nothing where nothing came for `timeout` seconds."""
        until = time.monotonic() + timeout
        with self._changed:
            if not self._items:
                self._asleep = True
                self._changed.wait(max(timeout, 0.0))
                self._asleep = False
            if self._items and not self._urgent:
                linger = max(min(LINGER, until - time.monotonic()), 0.0)
                self._changed.wait_for(lambda: self._urgent or self._records >= self.many, linger)
            items: list[tuple[str, Any]] = []
            taken = 0
            while self._items and taken < self.many:  # not all: what is worked on takes memory too
                items.append(self._items.popleft())
                taken += items[-1][0] == "record"
            self._records -= taken
            self._urgent &= bool(self._items)
            self._changed.notify_all()
            return items

    def take_drops(self) -> int:
        """Return how many records were dropped since the last call."""
        with self._changed:
            count, self._dropped = self._dropped, 0
            return count
