"""Other threads that take a part of the work: torch's own OpenMP team where that can be had, else a thread of ours.

torch's threads go on spinning for a while after each operation, on just the cores a thread of ours would need: right after
backward two threads were no faster than one. As members of that team they begin at once, and the user's
`torch.set_num_threads` holds for us too. `GOMP_parallel` is the entry that compilers call for `#pragma omp parallel`; its
interface is fixed.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from ampscope.probe.stats import jobs

MOST = 8
"""Members beyond which reading memory gets no faster."""


class Team(Protocol):
    """Threads that help the calling one."""

    def size(self) -> int:
        """Return how many may work, the calling one included."""

    def run(self, job: int) -> None:
        """Do `jobs.member(job)` in as many threads, the calling one included; return when all are done."""


class OpenMP:
    """torch's own threads."""

    def __init__(self, parallel: Any, member: int) -> None:
        self._parallel, self._member = parallel, member

    def size(self) -> int:
        """Return torch's number of threads, within bounds."""
        return min(torch.get_num_threads(), MOST)

    def run(self, job: int) -> None:
        """Run with as many threads as torch uses: a team of another size would make the runtime start and end threads."""
        self._parallel(self._member, job, torch.get_num_threads(), 0)


class Thread:
    """A second thread of ours: sleeps until it is given work, dies with the process."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._most = min(cores, 2)
        self._start, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._job = 0
        self._thread: threading.Thread | None = None

    def size(self) -> int:
        """Return 1 or 2."""
        return min(torch.get_num_threads(), self._most)

    def run(self, job: int) -> None:
        """Run in both."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="ampscope-stats", daemon=True)
            self._thread.start()
        self._job = job
        self._start.release()
        try:
            jobs.member(job)
        finally:
            self._wait()

    def _wait(self) -> None:
        """Wait for the other thread, also where the user presses Ctrl-C meanwhile: it works in memory that the caller gives away."""
        interrupted: BaseException | None = None
        while True:
            try:
                self._done.acquire()
                break
            except KeyboardInterrupt as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _work(self) -> None:
        while True:
            self._start.acquire()
            try:
                jobs.member(self._job)
            finally:
                self._done.release()


def find_team() -> Team:
    """Return torch's OpenMP team if it uses the GNU runtime it brings along, else a thread of ours."""
    parallel = _gomp_parallel()
    return Thread() if parallel is None else OpenMP(parallel, jobs.member_address())


def _gomp_parallel() -> Callable[..., None] | None:
    home = Path(torch.__file__).resolve().parent
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return None
    loaded = {line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line}
    own = [path for path in loaded if home in Path(path).parents]
    if len(own) != 1:
        return None
    try:
        parallel: Any = ctypes.CDLL(own[0]).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel  # type: ignore[no-any-return]
