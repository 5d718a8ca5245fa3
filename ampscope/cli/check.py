"""`ampscope check`: what is wrong with a run, in words or as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import click
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ampscope.analysis.diagnose import diagnose, summary
from ampscope.analysis.finding import SEVERITIES, Finding
from ampscope.cli.console import console, shown
from ampscope.cli.runs import choose, runs_in
from ampscope.run.run import Run

ALIVE = 15.0
"""Seconds since the last sign of life (one comes every 5 s) within which an unfinished run counts as running."""
STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}
NO_STEPS = 2
"""Exit status where nothing was recorded that could be judged."""


@click.command("check")
@click.argument("logdir")
@click.option("--run", "name", metavar="NAME", help="Look at this run, not at the newest one.")
@click.option("--all", "every", is_flag=True, help="Look at each run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--fail-on",
    type=click.Choice(["warning", "error"]),
    default="error",
    show_default=True,
    help="Exit with status 1 if there is a finding at least as serious.",
)
def command(logdir: str, name: str | None, every: bool, as_json: bool, fail_on: str) -> int:
    """Say in words whether the newest run in LOGDIR is healthy, and what to change if not.

    LOGDIR is a run's folder or a folder of runs. Exit status: 0 healthy, 1 something is wrong, 2 nothing that can be judged.
    """
    if name is not None and every:
        raise click.UsageError("--run NAME and --all exclude each other")
    runs = runs_in(logdir) if every else [choose(logdir, name)]
    judged = [(run, diagnose(run)) for run in runs]
    if as_json:
        out = [{"run": run.name, "findings": [f.to_dict() for f in found]} for run, found in judged]
        click.echo(json.dumps(out if every else out[0], indent=2, ensure_ascii=False, allow_nan=False))
    else:
        show(judged, console(), time.time())
    return max(status(run, found, fail_on, time.time()) for run, found in judged)


def status(run: Run, found: Sequence[Finding], fail_on: str, now: float) -> int:
    """Return the exit status for one run."""
    if any(f.rank >= SEVERITIES.index(fail_on) for f in found):
        return 1
    return NO_STEPS if not len(run.steps) and not alive(run, now) else 0


def alive(run: Run, now: float) -> bool:
    """Whether the trainer still gives signs of life."""
    return not run.finished and now - run.last_seen < ALIVE


def show(judged: Sequence[tuple[Run, Sequence[Finding]]], out: Console, now: float) -> None:
    """Print the diagnosis of each run."""
    for i, (run, found) in enumerate(judged):
        if i:
            out.print()
        out.print(heading(run, now))
        for line in run.damage[:3]:
            out.print(shown(f"part of the log could not be read: {line}", "yellow"))
        serious = [f for f in found if f.rank > 0]
        if not serious:
            text = summary(run)
            out.print(shown(text, "green" if text.startswith("Healthy") else "yellow"))
        for finding in serious or [f for f in found if f.rule != "warmup-calibration"]:
            out.print()
            out.print(describe(finding))
        if serious:
            notes = [f for f in found if f.rank == 0]
            for note in notes:
                out.print()
                out.print(shown(f"note: {note.title}"))


def heading(run: Run, now: float) -> Text:
    """Return the run's name and state in one line."""
    steps = f"{len(run.steps):,} steps" if len(run.steps) != 1 else "1 step"
    ago = max(now - run.last_seen, 0.0)
    if run.finished:
        state = "finished"
    elif alive(run, now):
        state = "still running"
    else:
        state = f"stopped without closing, last sign of life {duration(ago)} ago"
    text = shown(run.name, "bold")
    text.append(f": {steps}, {state}")
    return text


def duration(seconds: float) -> str:
    """Return a duration in its largest unit: "40 s", "3 min", "5 h", "2 days"."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def describe(finding: Finding) -> RenderableType:
    """Return a finding for people: what, where, when, why, and what to change."""
    head = Text(finding.severity, style=STYLES[finding.severity])
    head.append(f"  {finding.rule}", style="dim")
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for name, value in facts(finding):
        rows.add_row(name, shown(value))
    return Group(head, Padding(Group(shown(finding.title, "bold"), rows), (0, 0, 0, 2)))


def facts(finding: Finding) -> list[tuple[str, str]]:
    """Return (name, text) of what is known of a finding, without empty ones."""
    place = ", ".join(
        x for x in (", ".join(finding.layers[:3]), finding.op if finding.op != "-" else "", finding.where) if x
    )
    first, last, count = finding.steps
    when = "" if not count else str(first) if count == 1 else f"{first} to {last} ({count} steps)"
    out = [("phase", finding.phase if finding.phase != "none" else ""), ("where", place), ("steps", when)]
    for name, value in finding.to_dict()["evidence"].items():
        if name == "summary":
            out.append(("evidence", str(value)))
    out.append(("change", finding.remedy))
    return [(name, value) for name, value in out if value]
