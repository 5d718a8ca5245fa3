"""Run folders: naming, sessions, and who may write where."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ampscope.errors import AmpscopeError

try:
    import fcntl
except ImportError:  # Windows: liveness is judged by the heartbeat alone
    fcntl = None  # type: ignore[assignment]

STREAM = re.compile(r"^ampscope-(\d+)-rank(\d+)(?:-part(\d+))?(?:\.(?!tail\b)([a-z]+))?\.arrows$")
HEARTBEAT = 5.0
"""Seconds between touches of a live stream."""
DEAD_AFTER = 4 * HEARTBEAT
"""Seconds without a touch after which a stream that was not finished is taken for dead (network file systems lag)."""


@dataclass
class RunClaim:
    """A folder this process may write: session, first step, and the lock that says so."""

    path: Path
    name: str
    session: int
    rank: int
    first_step: int
    resumed: bool
    lock: IO[Any] | None = None

    def release(self) -> None:
        """Give the folder back."""
        if self.lock is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.lock.name)
            self.lock.close()
            self.lock = None


def check_name(run: str) -> str:
    """Return `run` if it is a single folder name.

    Raises:
        AmpscopeError: it is not.
    """
    if not isinstance(run, str) or not run or run in (".", "..") or any(c in run for c in "/\\\0") or len(run.encode()) > 255:
        raise AmpscopeError(f"watch(): run must be a single folder name, not {run!r}")
    return run


def claim(
    log_dir: str | os.PathLike[str], run: str | None, *, rank: int = 0, world_size: int = 1, launch_key: str | None = None, step: int | None = None
) -> RunClaim:
    """Make or join a run's folder and lock it for this rank.

    Ranks of one launch (same `launch_key`) get the same folder and session, whoever comes first.

    Raises:
        AmpscopeError: a bad name, or a live process of another launch writes that run.
        OSError: the folder cannot be made or written.
    """
    if run is not None:
        check_name(run)
    base = Path(log_dir)
    base.mkdir(parents=True, exist_ok=True)
    if not base.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(base))
    if run is None and launch_key is None:
        return _enter(_fresh(base), rank, None, step)
    if run is None:
        with _locked(base / f".ampscope-launch-{launch_key}") as file:
            name = file.read().decode(errors="replace").strip()
            if name and (base / name).is_dir() and not _own(base / name, rank):
                return _enter(base / name, rank, launch_key, step)
            path = _fresh(base)
            file.seek(0)
            file.truncate()
            file.write(path.name.encode())
            file.flush()
            return _enter(path, rank, launch_key, step)
    path = base / run
    path.mkdir(exist_ok=True)
    return _enter(path, rank, launch_key, step)


def _fresh(base: Path) -> Path:
    while True:
        path = base / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(3)}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path


def _own(path: Path, rank: int) -> bool:
    """Whether this rank has a stream or a lock in the newest session already (then the launch is another one)."""
    session = max(_sessions(path), default=-1)
    return any(True for _ in path.glob(f"ampscope-{session}-rank{rank}*"))


def _sessions(path: Path) -> set[int]:
    found = set()
    for entry in path.iterdir():
        match = re.match(r"^ampscope-(\d+)[-.]", entry.name)
        if match:
            found.add(int(match[1]))
    return found


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    with open(path, "a+b") as file:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file


def _enter(path: Path, rank: int, launch_key: str | None, step: int | None) -> RunClaim:
    with _locked(path / ".ampscope-claim") as file:
        lines = file.read().decode(errors="replace").split("\n")
        sessions = _sessions(path)
        newest = max(sessions, default=-1)
        joins = (
            launch_key is not None
            and lines[:2] == [str(newest), launch_key]
            and not any(True for _ in path.glob(f"ampscope-{newest}-rank{rank}*"))
        )
        if joins:
            session = newest
        else:
            live = _live(path)
            if live:
                raise AmpscopeError(
                    f"watch(): run {path.name!r} in {str(path.parent)!r} is being written by a live process ({live}); "
                    "choose another run name, or stop that process"
                )
            session = newest + 1
        lock = open(path / f"ampscope-{session}-rank{rank}.lock", "w", encoding="utf-8")  # noqa: SIM115
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.write(f"{socket.gethostname()} {os.getpid()}\n")
        lock.flush()
        file.seek(0)
        file.truncate()
        file.write(f"{session}\n{launch_key or ''}".encode())
        file.flush()
    first = step if step is not None else _next_step(path, session)
    return RunClaim(path, path.name, session, rank, first, session > 0, lock)


def _next_step(path: Path, session: int) -> int:
    """Return the step after the last one that an earlier session recorded."""
    if session == 0:
        return 0
    from ampscope.log.streams import last_step

    return last_step(path, before_session=session) + 1


def _live(path: Path) -> str:
    """Return who writes this run now ("host pid N"), or "" if nobody does."""
    for entry in path.glob("ampscope-*-rank*.lock"):
        try:
            with open(entry, "r+", encoding="utf-8", errors="replace") as file:
                who = file.read().strip() or "unknown"
                if fcntl is None:
                    if _beats(path):
                        return who
                    continue
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return "host {}, process {}".format(*who.split(" ", 1)) if " " in who else who
                except OSError:
                    if _beats(path):
                        return who
                    continue
                host = who.split(" ")[0]
                if host != socket.gethostname() and _beats(path):
                    return who  # flock may be local to each host on a network file system
        except FileNotFoundError:
            continue
        with contextlib.suppress(OSError):
            entry.unlink()
    return ""


def _beats(path: Path) -> bool:
    newest = 0.0
    for entry in path.glob("ampscope-*.arrows"):
        with contextlib.suppress(OSError):
            newest = max(newest, entry.stat().st_mtime)
    return time.time() - newest < DEAD_AFTER
