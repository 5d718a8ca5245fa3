"""LOGDIR → runs."""

from __future__ import annotations

from ampscope.errors import LogError
from ampscope.run.find import find_runs, open_run, run_folders
from ampscope.run.run import Run


def runs_in(logdir: str) -> list[Run]:
    """Return the runs of LOGDIR (a run's folder or a folder of runs), newest first; at least one.

    Raises:
        LogError: no such folder, no run in it, or none that can be read (the message is then that of the first one).
    """
    runs = find_runs(logdir)
    if runs:
        return runs
    for folder in run_folders(logdir):
        open_run(folder)  # raises: it says why this one cannot be read
    raise LogError(f"no run in {logdir!r}: pass the folder that watch(log_dir=...) wrote to")


def choose(logdir: str, name: str | None = None) -> Run:
    """Return the run called `name` (its folder's name or its path below LOGDIR), or the newest one.

    Raises:
        LogError: as `runs_in`; or no run is called so.
    """
    runs = runs_in(logdir)
    if name is None:
        return runs[0]
    for run in runs:
        if name == run.name or run.path.as_posix().endswith("/" + name.strip("/")):
            return run
    known = ", ".join(run.name for run in runs[:8]) + (", …" if len(runs) > 8 else "")
    raise LogError(f"no run {name!r} in {logdir!r}; there are {known}")
