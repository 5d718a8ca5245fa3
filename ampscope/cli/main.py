"""The `ampscope` command: gathers the sub-commands, each in its own module, loaded when it is called."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

import click

from ampscope import __version__
from ampscope.errors import AmpscopeError

COMMANDS = {
    "dashboard": "Show runs as live charts in the browser.",
    "check": "Say in words whether a run is healthy, and what to change if not.",
    "report": "Write one offline HTML file of a run.",
    "compare": "Compare two runs, for example FP32 and AMP.",
    "export": "Write a run's numbers to Parquet or CSV.",
    "demo": "Train a small network with AMP here, watched.",
}
"""Sub-command → its line in `--help`; kept here so that the help of the group imports none of them."""

INTERRUPTED, BROKEN_PIPE = 130, 141
"""Exit statuses, as a shell reports SIGINT and SIGPIPE."""


class Commands(click.Group):
    """A group whose command NAME is `command` in `ampscope.cli.NAME`."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """Return the names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 (as above)
        """Import and return one command; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        found = importlib.import_module(f"ampscope.cli.{cmd_name}").command
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 (as above)
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="ampscope %(version)s")
def cli() -> None:
    """See what mixed-precision training does to gradients."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit status.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        0 if all is well; 2 for unusable input (one line on stderr says which); 130 after Ctrl-C, 141 where the reader
        of a pipe left; otherwise what the command returns.
    """
    try:
        status = cli.main(args=argv, prog_name="ampscope", standalone_mode=False)
        sys.stdout.flush()
    except click.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except AmpscopeError as error:
        return _fail(str(error))
    except BrokenPipeError:
        return _leave_pipe()
    except OSError as error:
        return _fail(f"{error.strerror or error}" + (f": {os.fspath(error.filename)!r}" if error.filename else ""))
    except SystemExit as leave:  # click's own answer to a broken pipe, inside the command
        return _leave_pipe() if isinstance(leave.__context__, OSError) else int(leave.code or 0)
    return status if isinstance(status, int) else 0  # what a command returns is its exit status


def script() -> None:
    """Entry point of the installed command."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that lacks "×" must not end the command
    sys.exit(main())


def _fail(message: str) -> int:
    click.echo("ampscope: " + " ".join(message.split()), err=True)
    return 2


def _leave_pipe() -> int:
    """Point stdout at nothing, so that the interpreter's last flush does not complain."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
    return BROKEN_PIPE
