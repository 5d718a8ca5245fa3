"""The queue between training and the writer: bounded in memory, and never in training's way for long."""

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
_LAYER_BYTES = 4400


class Inbox:
    """A queue of (what, value). Only records are bounded in number; everything else is rare."""

    def __init__(self, n_layers: int) -> None:
        self._items: deque[tuple[str, Any]] = deque()
        self._changed = threading.Condition()
        self._records = 0
        self._dropped = 0
        self._impatient_until = 0.0
        self.resize(n_layers)

    def resize(self, n_layers: int) -> None:
        """Set how many records may wait, by the size of a record of so many layers."""
        self.limit = max(LEAST, min(4096, MEMORY // (_LAYER_BYTES * max(n_layers, 1))))

    def put(self, what: str, value: Any) -> None:
        """Add an item. Where too many records wait: wait a moment, then drop the oldest."""
        with self._changed:
            if what == "record":
                patient = self._records >= self.limit and time.monotonic() >= self._impatient_until
                if patient and not self._changed.wait_for(lambda: self._records < self.limit, PATIENCE):
                    self._impatient_until = time.monotonic() + PAUSE
                if self._records >= self.limit:
                    self._drop_oldest()
                self._records += 1
            self._items.append((what, value))
            self._changed.notify_all()

    def _drop_oldest(self) -> None:
        for i, (what, _) in enumerate(self._items):
            if what == "record":
                del self._items[i]
                self._records -= 1
                self._dropped += 1
                return

    def get(self, timeout: float) -> tuple[str, Any]:
        """Return the oldest item, or ("", None) after `timeout` seconds."""
        with self._changed:
            if not self._items:
                self._changed.wait(max(timeout, 0.0))
            if not self._items:
                return "", None
            what, value = self._items.popleft()
            if what == "record":
                self._records -= 1
                self._changed.notify_all()
            return what, value

    def take_drops(self) -> int:
        """Return how many records were dropped since the last call."""
        with self._changed:
            count, self._dropped = self._dropped, 0
            return count
