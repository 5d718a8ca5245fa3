"""Run folders: names, sessions, and which process may write where.

A run's folder holds `.ampscope-claim` (JSON: the newest session, who belongs to it) and a lock file for each session
and rank that is being written. The lock is an advisory `flock`: it ends with its process, also by SIGKILL. Where that
cannot be relied on (another host on a network file system, or no such lock at all), the heartbeat decides.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import secrets
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ampscope.errors import AmpscopeError
from ampscope.log.streams import HEARTBEAT, earlier, stream_files

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: liveness is judged by the heartbeat alone
    fcntl = None

DEAD_AFTER = 4 * HEARTBEAT
"""Seconds without a touch after which a stream that was not finished is taken for dead (network file systems lag)."""
YOUNG = 60.0
"""Seconds in which ranks of a launch may join it although no other is alive; while one is, they may any time."""


@dataclass(eq=False)
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
    parts = "/\0" if os.sep == "/" else "/\\\0"
    if not isinstance(run, str) or not run or run in (".", "..") or any(c in run for c in parts):
        raise AmpscopeError(f"watch(): run must be a single folder name, not {run!r}")
    if len(os.fsencode(run)) > 255:
        raise AmpscopeError(f"watch(): run is too long for a folder name ({len(os.fsencode(run))} bytes; 255 fit)")
    return run


def claim(
    log_dir: str | os.PathLike[str],
    run: str | None,
    *,
    rank: int = 0,
    world_size: int = 1,
    launch_key: str | None = None,
    step: int | None = None,
) -> RunClaim:
    """Make or join a run's folder and lock it for this rank.

    Ranks of one launch (same `launch_key`) get the same folder and session, whoever comes first.

    Raises:
        AmpscopeError: a bad name, or a live process of another launch writes that run.
        LogError: the run holds a log that cannot be gone on with (a newer version, say).
        OSError: the folder cannot be made or written.
    """
    if run is not None:
        check_name(run)
    base = Path(log_dir)
    _folder(base, parents=True)
    key = launch_key if world_size > 1 else None
    if run is not None:
        _folder(base / run)
        return _enter(base / run, rank, key, step)
    if key is None:
        return _enter(_fresh(base), rank, None, step)
    with _locked(base / f".ampscope-launch-{key}") as file:
        # One line a run: a launch may watch several scalers, each with a folder of its own, in one order on every rank.
        for name in file.read().decode(errors="replace").splitlines():
            if _is_folder(base / name) and _joinable(_book(base / name), base / name, rank, key):
                return _enter(base / name, rank, key, step)
        path = _fresh(base)
        file.write(path.name.encode() + b"\n")
        file.flush()
        return _enter(path, rank, key, step)


def _folder(path: Path, parents: bool = False) -> None:
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    path.mkdir(parents=parents, exist_ok=True)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _fresh(base: Path) -> Path:
    while True:
        path = base / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(3)}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    with open(path, "a+b") as file:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file


def _book(path: Path) -> dict[str, Any]:
    """Return what `.ampscope-claim` says of the newest session; {} where nothing sensible."""
    try:
        found = json.loads((path / ".ampscope-claim").read_bytes() or b"{}")
    except (OSError, ValueError):
        return {}
    good = isinstance(found, dict) and isinstance(found.get("ranks"), dict) and isinstance(found.get("session"), int)
    return found if good and isinstance(found.get("time"), float) else {}


def _enter(path: Path, rank: int, key: str | None, step: int | None) -> RunClaim:
    with _locked(path / ".ampscope-claim") as file:
        book = _book(path)
        if not _joinable(book, path, rank, key):
            live = _live(path, rank if _same_launch(book, key) else None)
            if live == f"process {os.getpid()} on {platform.node()}":
                raise AmpscopeError(
                    f"watch(): run {path.name!r} in {str(path.parent)!r} is being written by a live process, this one; "
                    "call ampscope.unwatch() on the scaler that writes it, or choose another run name"
                )
            if live:
                raise AmpscopeError(
                    f"watch(): run {path.name!r} in {str(path.parent)!r} is being written by a live process ({live}); "
                    "choose another run name, or stop that process"
                )
            session = max([entry[0] for entry in stream_files(path)] + [book.get("session", -1)]) + 1
            book = {"session": session, "key": key, "time": time.time(), "ranks": {}}
            for stale in path.glob(f"ampscope-*-rank{rank}.lock"):
                stale.unlink(missing_ok=True)
        session = book["session"]
        book["ranks"][str(rank)] = [platform.node(), os.getppid()]
        lock = _lock(path / f"ampscope-{session}-rank{rank}.lock")
        file.truncate(0)
        file.write(json.dumps(book).encode())
        file.flush()
    claimed = RunClaim(path, path.name, session, rank, 0, session > 0, lock)
    try:
        claimed.first_step = _next_step(path, session) if step is None else step
    except BaseException:
        claimed.release()
        raise
    _claims.add(claimed)
    return claimed


def _next_step(path: Path, session: int) -> int:
    if not session:
        return 0
    known = earlier(path, session)["step"]
    return int(known[-1]) + 1 if len(known) else 0


def _same_launch(book: dict[str, Any], key: str | None) -> bool:
    """Whether the newest session is of this process's launch: same key, and on this host the same parent process."""
    if not book or key is None or book.get("key") != key:
        return False
    mine = [platform.node(), os.getppid()]
    return all(entry == mine for entry in book["ranks"].values() if entry[:1] == mine[:1])


def _joinable(book: dict[str, Any], path: Path, rank: int, key: str | None) -> bool:
    """Whether this rank is one that the newest session still waits for."""
    if not _same_launch(book, key) or str(rank) in book["ranks"]:
        return False
    return time.time() - book["time"] < YOUNG or bool(_live(path))


def _lock(path: Path) -> IO[Any]:
    file = open(path, "w", encoding="utf-8")  # noqa: SIM115  (open as long as the run is written)
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.write(json.dumps({"host": platform.node(), "pid": os.getpid()}))
    file.flush()
    return file


def _live(path: Path, rank: int | None = None) -> str:
    """Return who writes this run now, any rank or one ("process 12 on host"); "" if nobody does."""
    for entry in sorted(path.glob("ampscope-*-rank*.lock")):
        if rank is not None and not entry.name.endswith(f"-rank{rank}.lock"):
            continue
        with contextlib.suppress(FileNotFoundError), open(entry, "r+", encoding="utf-8", errors="replace") as file:
            try:
                who = json.load(file)
                host, pid = str(who["host"]), int(who["pid"])
            except (ValueError, KeyError, TypeError):
                host, pid = "", 0  # killed between making and filling it
            held = _held(file)
            # A lock held on another host may be invisible here; a free one on its own host says: the process is gone.
            if held or (held is None and _beats(path)) or (host not in ("", platform.node()) and _beats(path)):
                return f"process {pid} on {host}" if host else "unknown process"
    return ""


def _held(file: IO[Any]) -> bool | None:
    """Whether another open file holds the lock; None where there are no such locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _beats(path: Path) -> bool:
    newest = 0.0
    for entry in path.glob("ampscope-*.arrows"):
        with contextlib.suppress(OSError):
            newest = max(newest, entry.stat().st_mtime)
    return time.time() - newest < DEAD_AFTER


_claims: weakref.WeakSet[RunClaim] = weakref.WeakSet()
"""Claims of this process. A module global because a fork is an event of the process: a child inherits the open lock
files, and a data loader's worker that outlives a killed trainer would keep the run locked."""


def _let_go_in_child() -> None:
    for claimed in list(_claims):
        if claimed.lock is not None:
            claimed.lock.close()
            claimed.lock = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
