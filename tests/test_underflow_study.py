"""`examples/underflow_study.py`: accuracy lost without loss scaling stands beside measured underflow, in table and figure."""

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

import ampscope

SCRIPT = Path(__file__).parent.parent / "examples" / "underflow_study.py"
LAYERS = [f"{i}.weight" for i in (0, 2, 4, 6, 8)]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Run a shorter study; return (printed lines, page, log folder)."""
    import contextlib
    import io

    folder = tmp_path_factory.mktemp("study")
    out = io.StringIO()
    main = runpy.run_path(str(SCRIPT))["main"]
    with contextlib.redirect_stdout(out):
        assert main(["--steps", "80", "--out", str(folder / "study.html"), "--log-dir", str(folder / "logs")]) == 0
    return out.getvalue().splitlines(), (folder / "study.html").read_text(encoding="utf-8"), folder / "logs"


def row(lines, name):
    """Return (accuracy, shares) of a table's row, in percent."""
    (line,) = [x for x in lines if x.startswith(name + " ")]
    numbers = [float(x) for x in re.findall(r"([\d.]+)%", line)]
    return numbers[0], numbers[1:]


def test_without_scaling_accuracy_and_gradients_are_lost(study):
    """Scale 1 learns nothing and flushes most of the first layers; a GradScaler does as FP32 does and flushes nothing."""
    lines, _, _ = study
    assert all(layer in lines[0] for layer in LAYERS)
    exact, _ = row(lines, "fp32")
    lost, flushed = row(lines, "fp16-scale-1")
    kept, saved = row(lines, "fp16-gradscaler")
    assert exact > 80
    assert lost < 40
    assert kept > exact - 5
    assert min(flushed[:3]) > 50
    assert max(saved) < 1


def test_the_table_says_what_the_probe_measured(study):
    """Each share is the mean over the run's probes."""
    lines, _, logs = study
    _, flushed = row(lines, "fp16-scale-1")
    run = ampscope.open_run(logs / "fp16-scale-1")
    measured = run.metric("underflow_ratio_measured")
    names = [x.name for x in run.layers]
    want = [np.nanmean(measured[::10, names.index(n)]) * 100 for n in LAYERS]
    np.testing.assert_allclose(flushed, want, atol=0.51)
    assert run.scalar("loss_scale").tolist() == [1.0] * 80


def test_the_figure_shows_both_and_sends_nothing(study):
    """Three bars of accuracy, five of underflow for each FP16 run, the numbers of the table."""
    lines, page, _ = study
    traces = json.loads(re.search(r"Plotly\.newPlot\(\s*\"[^\"]+\",\s*(\[.*?\]),\s*\{\"", page, re.DOTALL).group(1))
    accuracy, one, scaled = traces
    assert accuracy["x"] == ["fp32", "fp16-scale-1", "fp16-gradscaler"]
    np.testing.assert_allclose(accuracy["y"], [row(lines, n)[0] for n in accuracy["x"]], atol=0.06)
    assert (one["name"], scaled["name"]) == ("fp16-scale-1", "fp16-gradscaler")
    assert one["x"] == scaled["x"] == LAYERS
    np.testing.assert_allclose(one["y"], row(lines, "fp16-scale-1")[1], atol=0.51)
    assert '"showSendToCloud": false' in page
