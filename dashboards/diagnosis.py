"""The diagnosis of a run, made in the background and remembered: a long run takes seconds, a viewer must not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ampscope.errors import AmpscopeError
from ampscope.run.run import Run

if TYPE_CHECKING:
    from ampscope.analysis.finding import Finding

    from .source import Source

AGAIN = 10.0
"""Least seconds between two diagnoses of a run that goes on; it grows with what the last one took."""


@dataclass(frozen=True)
class Verdict:
    """What the diagnosis said. `findings` is None while there is none yet; `problem` says why there can be none."""

    findings: list[Finding] | None = None
    problem: str = ""
    revision: int = -1
    at: float = 0.0
    took: float = 0.0


@dataclass
class Diagnosis:
    """Verdicts by run; `clock` gives seconds, `start` runs a function in the background."""

    clock: Callable[[], float]
    start: Callable[[Callable[[], None]], None]
    _verdicts: dict[str, Verdict] = field(default_factory=dict)
    _running: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, source: Source) -> Verdict:
        """Return the newest verdict; ask for a newer one where the run has gone on."""
        with self._lock:
            verdict = self._verdicts.get(source.key, Verdict())
            stale = verdict.revision != source.revision and not (verdict.problem and verdict.revision >= 0)
            due = (
                verdict.revision < 0
                or self.clock() - verdict.at >= max(AGAIN, 10 * verdict.took)
                or source.run.finished
            )
            if not (stale and due) or source.key in self._running:
                return verdict
            self._running.add(source.key)
        self.start(lambda: self._make(source))
        with self._lock:
            return self._verdicts.get(source.key, Verdict())

    def _make(self, source: Source) -> None:
        began, revision = self.clock(), source.revision
        findings, problem = None, ""
        try:
            findings = diagnose(Run(source.run.path))  # a reader of its own: viewers are not to wait for its lock
        except (AmpscopeError, OSError) as error:
            problem = str(error)
        except ImportError:
            problem = "this version has no diagnosis"
        finally:
            with self._lock:
                now = self.clock()
                self._verdicts[source.key] = Verdict(findings, problem, revision, now, now - began)
                self._running.discard(source.key)
        source.note()


def diagnose(run: Run) -> list[Finding]:
    """Return the findings of a run, most important first."""
    from ampscope.analysis.diagnose import diagnose as rules

    return list(rules(run))
