"""The command line: light, lazy, one line an error, documented."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import ampscope
from ampscope import __version__
from ampscope.cli import console, main, runs
from ampscope.cli.main import COMMANDS, cli
from tests.helpers_log import make_layers, records, write_run

DOCS = Path(__file__).parent.parent / "docs" / "cli.md"
HEAVY = ("torch", "dash", "plotly", "tensorboard", "sklearn", "matplotlib", "numba")  # pyarrow itself loads pandas


@pytest.fixture
def logs(tmp_path):
    """Return a folder with one healthy run."""
    layers = make_layers(4)
    write_run(tmp_path, layers, records(30, layers, skip=[3]), name="one")
    return tmp_path


def loaded_after(code):
    """Return the modules loaded once `code` has run in a fresh process."""
    show = "\nimport sys; print('LOADED', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code + show], capture_output=True, text=True, timeout=60)
    line = next((x for x in done.stdout.splitlines() if x.startswith("LOADED")), None)
    assert line is not None, done.stderr
    return set(line.split())


def test_importing_ampscope_loads_nothing_heavy():
    """No torch, numpy or pyarrow: what makes an import slow is what it imports."""
    assert not loaded_after("import ampscope; ampscope.__all__; dir(ampscope)") & {
        *HEAVY,
        "numpy",
        "pyarrow",
        "click",
        "rich",
    }


def test_help_loads_no_command():
    """The list of commands is printed without importing them, or NumPy."""
    assert not loaded_after("from ampscope.cli.main import main; main(['--help'])") & {*HEAVY, "numpy", "pyarrow"}


@pytest.mark.parametrize(
    "words",
    [
        "check LOGS",
        "compare LOGS/one LOGS/one",
        "export LOGS -o LOGS/x.csv",
        "dashboard --help",
        "report --help",
        "demo --help",
    ],
)
def test_commands_do_not_load_torch(words, logs):
    """Importing torch costs seconds and hundreds of megabytes."""
    argv = words.replace("LOGS", str(logs)).split()
    loaded = loaded_after(f"from ampscope.cli.main import main; assert main({argv!r}) == 0")
    assert loaded & set(HEAVY) == set()
    assert f"ampscope.cli.{argv[0]}" in loaded


def test_the_dashboards_parts_do_not_load_torch():
    """What `dashboard` and `report` import when they run."""
    assert "torch" not in loaded_after(
        "import ampscope_dashboards.app, ampscope_dashboards.server, ampscope_dashboards.report"
    )


def test_every_command_exists_and_has_a_line_in_the_help(capsys):
    """The table in main.py names modules that are there; each has a docstring."""
    assert main.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, line in COMMANDS.items():
        assert f"  {name}" in text
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert command.name == name
        assert command.help
        assert line.endswith(".")


def sections():
    """Return docs/cli.md by command."""
    parts = re.split(r"^## `ampscope (\w+)[^\n]*\n", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented_and_no_other(name):
    """docs/cli.md has a row for each option, with its default, and for nothing else."""
    command = cli.get_command(click.Context(cli), name)
    rows = re.findall(r"^\| ((?:`--?[\w-]+`(?:, )?)+) \|([^|]*)\|", sections()[name], flags=re.MULTILINE)
    documented = {flag: default.strip() for flags, default in rows for flag in re.findall(r"`(--?[\w-]+)`", flags)}
    options = [p for p in command.params if isinstance(p, click.Option)]
    assert set(documented) == {flag for p in options for flag in p.opts}
    for option in options:
        if option.show_default and not option.is_flag:
            assert documented[option.opts[-1]].strip("`") == str(option.default)
        assert option.help


def test_the_version_is_printed(capsys):
    """`ampscope --version`."""
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ampscope {__version__}\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("check nowhere", "ampscope: no folder 'nowhere'"),
        ("check EMPTY", "no run in"),
        ("check LOGS --run two", "no run 'two' in"),
        ("check FILE", "is a file, not a folder of runs"),
        ("compare LOGS/one LOGS/two", "no run"),
        ("compare LOGS/one EMPTY", "is not a run's folder"),
        ("export LOGS -o LOGS/no/x.csv", "no folder"),
        ("export LOGS -o LOGS/x.txt", "FILE must end in .parquet or .csv"),
        ("export LOGS", "Missing option"),
        ("compare LOGS/one", "Missing argument"),
        ("frobnicate", "No such command 'frobnicate'"),
    ],
)
def test_unusable_input_is_status_2_and_a_line_on_stderr(words, text, logs, capsys, monkeypatch):
    """No traceback; nothing on stdout."""
    (logs / "empty").mkdir()
    (logs / "file").write_text("x")
    monkeypatch.chdir(logs)
    argv = [
        w.replace("LOGS", str(logs)).replace("EMPTY", str(logs / "empty")).replace("FILE", str(logs / "file"))
        for w in words.split()
    ]
    assert main.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 4  # click's usage errors have the usage line and a hint above


def test_a_run_of_a_newer_version_is_said_so(logs, capsys, monkeypatch):
    """LOGDIR with only such a run names the reason, not "no run"."""
    from ampscope.log import schema

    layers = make_layers(2)
    path = write_run(logs / "new", layers, records(2, layers), version=schema.FORMAT_VERSION + 1)
    assert main.main(["check", str(path.parent)]) == 2
    assert "upgrade ampscope" in capsys.readouterr().err


def test_bugs_keep_their_traceback(monkeypatch, logs):
    """Only errors of the user are one line."""

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("ampscope.cli.check.choose", broken)
    with pytest.raises(ZeroDivisionError):
        main.main(["check", str(logs)])


def test_a_missing_permission_is_one_line(monkeypatch, logs, capsys):
    """An OSError says what and which path."""

    def refused(*_):
        raise PermissionError(13, "Permission denied", "/somewhere/log")

    monkeypatch.setattr("ampscope.cli.check.choose", refused)
    assert main.main(["check", str(logs)]) == 2
    assert capsys.readouterr().err == "ampscope: Permission denied: '/somewhere/log'\n"


def test_ctrl_c_is_status_130(monkeypatch, logs):
    """As a shell reports it."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ampscope.cli.check.choose", interrupted)
    assert main.main(["check", str(logs)]) == 130


def test_a_reader_that_leaves_is_no_error(logs):
    """`ampscope compare A B | head -0`: no traceback, no complaint at exit."""
    code = f"{sys.executable} -c \"import sys; from ampscope.cli.main import script; sys.argv[1:] = ['compare', '{logs}/one', '{logs}/one']; script()\""
    done = subprocess.run(
        ["bash", "-c", f"{code} | (exec 0<&-); exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert done.returncode in (0, main.BROKEN_PIPE)  # 0 where the pipe took all of it before it was closed


def test_logdir_may_be_a_run_or_hold_runs_deeper(logs):
    """Runs are found by name, and by path where two folders hold the same name."""
    layers = make_layers(2)
    write_run(logs / "deep" / "er", layers, records(3, layers), name="one")
    assert [r.path for r in runs.runs_in(str(logs / "one"))] == [logs / "one"]
    assert {r.path for r in runs.runs_in(str(logs))} == {logs / "one", logs / "deep" / "er" / "one"}
    assert runs.choose(str(logs), "er/one").path == logs / "deep" / "er" / "one"
    with pytest.raises(ampscope.AmpscopeError, match="no run 'ne' in"):
        runs.choose(str(logs), "ne")


def test_names_from_a_log_cannot_act_on_the_terminal():
    """Escape sequences, markup and line breaks in a name are only text."""
    assert console.clean("a\x1b[31mb\nc\u202ed") == "a\ufffd[31mb\ufffdc\ufffdd"
    assert console.shown("[red]x[/red]").plain == "[red]x[/red]"


def test_a_hostile_run_is_shown_as_text(tmp_path, capsys):
    """A layer named with escapes and markup goes through `compare` unharmed."""
    from ampscope.record.step import Layer

    layers = [Layer("[bold]\x1b]0;owned\x07", (4, 16), 64, "float32", "")]
    for name in "ab":
        write_run(tmp_path, layers, records(8, layers), name=name)
    assert main.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "[bold]" in out
