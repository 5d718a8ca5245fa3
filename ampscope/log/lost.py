"""What could not be kept, counted, so that the log can say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Lost:
    """Records that could not be kept: how many, of which steps, why."""

    def __init__(self) -> None:
        self.count = 0
        self.first, self.last = 0, -1
        self.why = ""

    def __bool__(self) -> bool:
        return self.count > 0

    def add(self, steps: Sequence[int] | np.ndarray[Any, Any], why: str) -> None:
        """Count records of these steps."""
        if len(steps):
            self.first = min(self.first, int(min(steps))) if self.count else int(min(steps))
            self.last = max(self.last, int(max(steps)))
            self.count += len(steps)
            self.why = why

    def join(self, other: Lost, why: str) -> None:
        """Count what another counted."""
        if other:
            count = self.count + other.count
            self.add([other.first, other.last], why)
            self.count = count

    def __str__(self) -> str:
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"{self.count} record{'s' if self.count > 1 else ''} ({steps}) lost: {self.why}"
