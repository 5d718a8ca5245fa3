"""Finding and opening runs."""

from __future__ import annotations

import os
from pathlib import Path

from ampscope.errors import LogError
from ampscope.log.streams import stream_files
from ampscope.run.run import Run


def run_folders(log_dir: str | os.PathLike[str]) -> list[Path]:
    """Return every folder at or below `log_dir` that holds a run's streams; links that lead out of it are not followed.

    Raises:
        LogError: `log_dir` does not exist or is not a folder.
    """
    base = Path(log_dir)
    if not base.exists():
        raise LogError(f"no folder {str(base)!r}: pass the folder that watch(log_dir=...) wrote to")
    if not base.is_dir():
        raise LogError(
            f"{str(base)!r} is a file, not a folder of runs: pass the folder that watch(log_dir=...) wrote to"
        )
    found = []
    for folder, children, files in os.walk(base):
        hidden = [c for c in children if c.startswith(".")]
        children[:] = [c for c in children if not c.startswith(".")]
        found += [path for c in hidden if stream_files(path := Path(folder, c))]  # a run may be named so
        if any(f.startswith("ampscope-") and f.endswith(".arrows") for f in files) and stream_files(Path(folder)):
            found.append(Path(folder))
    return found


def find_runs(log_dir: str | os.PathLike[str] = "logs", *, errors: list[str] | None = None) -> list[Run]:
    """Return the runs in a folder and its sub-folders, newest first; runs that cannot be read are left out.

    Args:
        log_dir: the folder.
        errors: if given, a line is added for each run left out.

    Raises:
        LogError: `log_dir` does not exist or is not a folder.
    """
    opened = (_open(folder, errors) for folder in run_folders(log_dir))
    runs = [run for run in opened if run is not None]
    return sorted(runs, key=lambda r: (r.last_seen, r.name), reverse=True)


def _open(folder: Path, errors: list[str] | None) -> Run | None:
    try:
        return Run(folder, lazy=True)
    except LogError as error:
        if errors is not None:
            errors.append(str(error))
        return None


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open one run's folder.

    Raises:
        LogError: there is no such folder, it holds no run (the message names the runs nearby), or its log is of a newer
            version.
    """
    folder = Path(path)
    if folder.is_dir() and stream_files(folder):
        return Run(folder)
    if folder.is_file():
        raise LogError(f"{str(folder)!r} is a file; open_run() takes a run's folder")
    around = folder if folder.is_dir() else folder.parent
    names = sorted(str(p.relative_to(around)) for p in run_folders(around)) if around.is_dir() else []
    hint = (
        f"; runs there: {', '.join(names[:8])}{', …' if len(names) > 8 else ''}"
        if names
        else "; no run was found there"
    )
    if folder.is_dir():
        raise LogError(f"{str(folder)!r} is not a run's folder{hint}")
    raise LogError(f"no run {str(folder)!r}{hint if around.is_dir() else ''}")
