"""Finding and opening runs: order, sub-folders, and one clear line for each mistake."""

import os

import pytest

import ampscope
from tests.helpers_log import make_layers, records, write_run

LAYERS = make_layers(1, 16)


@pytest.fixture
def logs(tmp_path):
    """Three runs, one in a sub-folder, of different age."""
    for age, name in ((30, "old"), (10, "sub/new"), (20, "middle")):
        path = write_run((tmp_path / name).parent, LAYERS, records(1, LAYERS), name=name.split("/")[-1])
        for file in path.iterdir():
            os.utime(file, (10_000 - age, 10_000 - age))
    return tmp_path


def test_newest_first_sub_folders_included(logs):
    """By the last sign of life."""
    assert [r.name for r in ampscope.find_runs(logs)] == ["new", "middle", "old"]
    assert [r.name for r in ampscope.find_runs(str(logs / "sub"))] == ["new"]


def test_a_runs_own_folder_is_a_folder_of_one_run(logs):
    """The command line takes either."""
    (run,) = ampscope.find_runs(logs / "old")
    assert run.path == logs / "old"


def test_an_empty_folder_has_no_runs(tmp_path):
    """No error: nothing was recorded yet."""
    assert ampscope.find_runs(tmp_path) == []


def test_other_files_are_no_runs(logs):
    """TensorBoard's files, notes, half-made files of a killed writer."""
    (logs / "plain").mkdir()
    for name in ("events.out.tfevents.1.host", "notes.txt", ".ampscope-0-rank0.arrows.12.new", "ampscope-x.arrows"):
        (logs / "plain" / name).write_text("x")
    assert len(ampscope.find_runs(logs)) == 3


def test_an_unreadable_run_hides_no_other(logs):
    """It is left out, and `errors` says why."""
    (logs / "broken").mkdir()
    (logs / "broken" / "ampscope-0-rank0.arrows").write_text("no log at all")
    errors: list[str] = []
    assert len(ampscope.find_runs(logs, errors=errors)) == 3
    assert "broken" in errors[0]
    assert "not an ampscope log" in errors[0]


def test_the_current_folder_has_its_own_name(logs, monkeypatch):
    """`open_run(".")`."""
    monkeypatch.chdir(logs / "old")
    assert ampscope.open_run(".").name == "old"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("nowhere", "no run .*nowhere.*runs there: middle, old, sub/new"),
        ("sub", "sub' is not a run's folder; runs there: new"),
        ("old/ampscope-0-rank0.arrows", "is a file; open_run.* takes a run's folder"),
        ("deep/er/nowhere", "no run .*nowhere"),
    ],
)
def test_a_wrong_path_is_answered_with_the_names_there_are(logs, path, text):
    """One line: what, where, what to do."""
    with pytest.raises(ampscope.LogError, match=text) as error:
        ampscope.open_run(logs / path)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    """Not an empty list: the path is probably mistyped."""
    with pytest.raises(ampscope.LogError, match="no folder .*nowhere.*watch"):
        ampscope.find_runs(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ampscope.LogError, match="is a file"):
        ampscope.find_runs(tmp_path / "file")


def test_links_do_not_lead_out_of_the_folder(tmp_path):
    """The server serves only the log folder."""
    write_run(tmp_path / "secret", LAYERS, records(1, LAYERS))
    (tmp_path / "logs").mkdir()
    os.symlink(tmp_path / "secret", tmp_path / "logs" / "link")
    assert ampscope.find_runs(tmp_path / "logs") == []
