"""Every example runs as it stands and leaves a run that reads back; so does `ampscope demo`."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import ampscope
from ampscope.cli.main import main
from ampscope.run.find import find_runs

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(name, monkeypatch, folder, *argv):
    """Run a script as `python examples/NAME ARGV` in `folder`; return its globals."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, *argv])
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_minimal_is_short_and_watched(tmp_path, monkeypatch, capsys):
    """Under 30 lines, one of them ours; the run holds every step and the loss falls."""
    text = (EXAMPLES / "minimal.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 30
    made = run_example("minimal.py", monkeypatch, tmp_path)
    folder = ampscope.handle(made["scaler"]).run_dir
    ampscope.unwatch(made["scaler"])
    run = ampscope.open_run(folder)
    assert run.path.parent == Path("logs")
    assert run.steps.tolist() == list(range(200))
    assert run.scalar("loss")[-1] < 0.2 * run.scalar("loss")[0]
    assert str(folder) in capsys.readouterr().out


@pytest.mark.slow
def test_resnet18_trains_twice_on_the_same_data_saves_and_restores(tmp_path, monkeypatch, capsys):
    """FP32 and AMP, both watched; the first losses agree; the restored run goes on with its loss scale in the same folder."""
    run_example("resnet18.py", monkeypatch, tmp_path, "--steps", "1")
    out = capsys.readouterr().out
    amp, fp32 = sorted(find_runs("logs"), key=lambda r: r.name)
    assert "resnet18-amp" in amp.name
    assert "resnet18-fp32" in fp32.name
    assert len(fp32.layers) == len(amp.layers) == 62
    np.testing.assert_allclose(amp.scalar("loss")[0], fp32.scalar("loss")[0], rtol=0.02)
    assert fp32.scalar("loss_scale").tolist() == [1.0]
    assert [s.first_step for s in amp.sessions] == [0, 1]
    assert amp.scalar("loss_scale").tolist() == [256.0, 256.0]
    assert amp.scalar("growth_tracker").tolist() == [0, 1]
    assert ampscope.replay(amp, search=False).matches_record
    assert (amp.path / "checkpoint.pt").exists()
    for text in (
        "No CUDA device",
        "FP32",
        "ms a step",
        "AMP is",
        "peak memory",
        str(amp.path),
        str(fp32.path),
        "went on at step 1",
    ):
        assert text in out
    assert main(["compare", str(fp32.path), str(amp.path)]) == 0
    assert "AMP is" in capsys.readouterr().out


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Run a shorter demo; return its output and run."""
    import contextlib
    import io

    folder, out = tmp_path_factory.mktemp("demo"), io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["demo", "--steps", "500", "--log-dir", str(folder), "--no-dashboard"]) == 0
    (run,) = find_runs(folder)
    return " ".join(out.getvalue().split()), run


def test_the_demo_learns_the_digits(demo):
    """To a real accuracy, that is in the log and on the screen."""
    out, run = demo
    accuracy = run.scalar("test_accuracy")
    assert len(run.steps) == 500
    assert accuracy[-1] > 0.93
    assert f"Test accuracy {accuracy[-1]:.1%} after 500 steps" in out
    assert run.finished


def test_the_demo_explains_its_overflow(demo):
    """Step 300 overflows, is skipped, and the layers said are those of the record."""
    out, run = demo
    skipped = run.scalar("skipped") > 0
    assert skipped[300]
    scale = run.scalar("loss_scale")
    assert scale[301] == scale[300] / 2
    assert "Step 300 was the batch with pixels of 0..255: its gradients overflowed FP16" in out
    bad = [x.name for x, n in zip(run.layers, run.metric("nonfinite_count")[300], strict=True) if n > 0]
    assert ", ".join(bad[:3]) in out
    assert np.isfinite(run.scalar("loss")).all()


def test_the_demo_says_where_the_run_is_and_what_comes_next(demo):
    """The folder, and commands that work on it."""
    out, run = demo
    assert f"Run folder: {run.path}" in out
    for command in (
        f"ampscope check {run.path}",
        f"tensorboard --logdir {run.path.parent}",
        f"ampscope dashboard {run.path.parent}",
    ):
        assert command in out
    assert main(["check", str(run.path)]) == 0


def test_replay_reproduces_the_demo(demo):
    """The recorded scale curve comes out of the recorded settings."""
    got = ampscope.replay(demo[1], search=False)
    assert got.matches_record
    assert got.interventions == ()


def test_the_demo_opens_the_dashboard_at_the_end(tmp_path, monkeypatch, capsys):
    """It serves the log folder at the address it prints, until Ctrl-C."""
    from ampscope_dashboards.server import Server

    served = []

    def interrupted(server):
        served.append(server.url)
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "run", interrupted)
    assert main(["demo", "--steps", "10", "--log-dir", str(tmp_path), "--port", "0", "--no-browser"]) == 0
    assert served
    assert served[0] in capsys.readouterr().out


def test_the_demo_without_scikit_learn_says_what_to_install(tmp_path, monkeypatch, capsys):
    """One line, before anything is written."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", "--log-dir", str(tmp_path / "logs"), "--no-dashboard"]) == 2
    assert capsys.readouterr().err == "ampscope: the demo trains on scikit-learn's digits: pip install scikit-learn\n"
    assert not (tmp_path / "logs").exists()


def test_the_demo_refuses_a_folder_it_cannot_write(tmp_path, capsys):
    """A demo that records nothing shows nothing."""
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="nothing is recorded"):
        assert main(["demo", "--log-dir", str(tmp_path / "file"), "--no-dashboard"]) == 2
    assert "pass another --log-dir" in capsys.readouterr().err
