"""`ampscope report`: one offline HTML file."""

from __future__ import annotations

from pathlib import Path

import click

from ampscope.cli.runs import choose


@click.command("report")
@click.argument("logdir")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.html",
    help="Where to write it; default RUN.html here.",
)
@click.option("--run", "name", metavar="NAME", help="Report this run, not the newest one.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
def command(logdir: str, output: Path | None, name: str | None, force: bool) -> int:
    """Write one HTML file of the newest run in LOGDIR: charts, findings, events. It needs no network and no server.

    LOGDIR is a run's folder or a folder of runs.
    """
    run = choose(logdir, name)
    from ampscope_dashboards.report import write

    path = write(run, output or Path(f"{run.name}.html"), force=force)
    click.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0
