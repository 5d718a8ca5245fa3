"""`ampscope dashboard`: live charts in the browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from ampscope.errors import LogError

LAST = 3.0
"""Seconds that threads get to end."""


@click.command("dashboard")
@click.argument("logdir")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to serve on; anything but loopback shows the logs to others.",
)
@click.option("--port", default=8060, show_default=True, help="Port, or the next free one.")
@click.option(
    "--url-prefix", default="/", show_default=True, help="Path under which a reverse proxy shows the dashboard."
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="A further name to be called by, e.g. behind a reverse proxy. May be repeated.",
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
def command(logdir: str, host: str, port: int, url_prefix: str, allow_host: tuple[str, ...], no_browser: bool) -> int:
    """Show the runs in LOGDIR as live charts in the browser. Ctrl-C ends it.

    LOGDIR is a run's folder or a folder of runs; it may be empty still.
    """
    if Path(logdir).is_file():
        raise LogError(f"{logdir!r} is a file; pass the folder that watch(log_dir=...) wrote to")
    if not (url_prefix.startswith("/") and url_prefix.endswith("/")):
        raise click.UsageError("--url-prefix must begin and end with /, e.g. /ampscope/")
    from ampscope_dashboards.reader import RunStore
    from ampscope_dashboards.warm import warm

    store = RunStore(logdir)
    reading = warm(store)  # before Dash is imported, which takes as long
    from ampscope_dashboards.app import create_app
    from ampscope_dashboards.server import Server, is_loopback, ssh_line

    server = Server(create_app(logdir, url_prefix=url_prefix, store=store), host, port, allow=allow_host)
    try:
        if server.port != port and port:
            click.echo(f"Port {port} is taken.", err=True)
        if not is_loopback(host):
            click.echo(f"Anybody who reaches {host}:{server.port} can read the runs in {logdir}.", err=True)
        click.echo(server.url)
        forward = ssh_line(server.port)
        if forward:
            click.echo(f"From your own machine: {forward}")
        elif not no_browser and is_loopback(host):
            webbrowser.open(server.url)
        click.echo("Ctrl-C ends it.", err=True)
        server.run()
    except KeyboardInterrupt:
        pass  # the way it is meant to end
    click.echo("Stopped.", err=True)
    reading.join(LAST)  # a thread that reads while the interpreter ends may hold a lock that its end needs
    store.diagnosis.finish(LAST)
    return 0
