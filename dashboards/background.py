"""Answers about a whole run that take seconds for a long one (diagnosis, what-if, replay): made apart and remembered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ampscope.errors import AmpscopeError
from ampscope.run.run import Run

from .source import SMALL

if TYPE_CHECKING:
    from ampscope.analysis.finding import Finding

    from .source import Source

T = TypeVar("T")

AGAIN = 10.0
"""Least seconds between two answers about a run that goes on; it grows with what the last one took."""
PATIENCE = 0.3
"""Seconds a viewer waits for a first answer before being told that it is under way."""


HOLD_BACK = 1.5
"""Seconds before the first such answer about a long run is begun: the first screen goes first."""
_TURN = threading.Lock()
"""One answer at a time: each holds a run of its own in memory."""


@dataclass(frozen=True)
class Verdict(Generic[T]):
    """An answer. `value` is None while there is none yet; `problem` says why there can be none."""

    value: T | None = None
    problem: str = ""
    revision: int = -1
    at: float = 0.0
    took: float = 0.0


class Background(Generic[T]):
    """Answers by run, each made in a thread of its own by `make`, from a `Run` of its own: viewers wait for neither."""

    def __init__(
        self, make: Callable[[Run], T], clock: Callable[[], float] = time.time, *, redraw: bool = True
    ) -> None:
        self._make, self._clock = make, clock
        self._redraw = redraw
        """Whether charts are made of the answer: what is remembered of them is then out of date."""
        self._verdicts: dict[str, Verdict[T]] = {}
        self._running: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()

    def of(self, source: Source, patience: float = 0.0) -> Verdict[T]:
        """Return the newest answer; ask for a newer one where the run has gone on.

        Args:
            source: the run.
            patience: seconds to wait where there is no answer yet.
        """
        with self._lock:
            verdict = self._verdicts.get(source.key, Verdict())
            stale = verdict.revision != source.revision
            due = verdict.revision < 0 or self._clock() - verdict.at >= max(AGAIN, 10 * verdict.took)
            thread = self._running.get(source.key)
            if thread is None and stale and (due or source.run.finished):
                thread = threading.Thread(target=self._answer, args=(source,), name="ampscope-analysis", daemon=True)
                self._running[source.key] = thread
                thread.start()
        if thread is not None and verdict.revision < 0 and patience:
            thread.join(patience)
        with self._lock:
            return self._verdicts.get(source.key, verdict)

    def finish(self, timeout: float) -> bool:
        """Wait until every answer asked for is made; return whether it was within `timeout` seconds."""
        with self._lock:
            threads = list(self._running.values())
        for thread in threads:
            thread.join(timeout)
        return not any(t.is_alive() for t in threads)

    def _answer(self, source: Source) -> None:
        with self._lock:
            first = source.key not in self._verdicts
        if first and len(source.steps) * len(source.layers) > SMALL:
            time.sleep(HOLD_BACK)
        _TURN.acquire()
        began, revision = time.monotonic(), source.revision  # waiting is no part of what an answer takes
        value, problem = None, "it failed; the terminal says why"
        try:
            value, problem = self._make(Run(source.run.path)), ""
        except (AmpscopeError, OSError) as error:
            problem = str(error)
        finally:  # a bug in a rule must not leave viewers waiting for ever
            _TURN.release()
            with self._lock:
                took = time.monotonic() - began
                self._verdicts[source.key] = Verdict(value, problem, revision, self._clock(), took)
                self._running.pop(source.key, None)
            source.note(self._redraw)


def diagnose(run: Run) -> list[Finding]:
    """Return the findings of a run, most important first."""
    from ampscope.analysis.diagnose import diagnose as rules

    return list(rules(run))


def collect(run: Run) -> Any:
    """Return a run's histograms added up, for `what_if`."""
    from ampscope.analysis.whatif import collect as add_up

    return add_up(run)


@dataclass(frozen=True)
class Prepared:
    """What every replay of a run needs: the recorded scaler, each step's limit, what a scale costs, the best settings."""

    steps: Any
    seconds: Any
    record: Any
    found: Any
    cost: Any
    best: Any
    best_skipped: int


def prepare(run: Run) -> Prepared:
    """Read what replays of a run need.

    Raises:
        AmpscopeError: the run has no step.
    """
    import numpy as np

    from ampscope.analysis.overflow import limits
    from ampscope.analysis.policy import Settings, recorded
    from ampscope.analysis.waste import Cost, search_best

    if not len(run.steps):
        raise AmpscopeError(f"run {run.name!r} has no step yet: there is nothing to replay")
    record, found = recorded(run), limits(run)
    cost = Cost(run, found)
    own = next((s for _, s in reversed(record.phases) if s is not None), None) or Settings()
    best, out, _ = search_best(found.limit, record, cost, own, {})
    return Prepared(
        run.steps, np.nan_to_num(run.scalar("step_seconds")), record, found, cost, best, int(out.skipped.sum())
    )
