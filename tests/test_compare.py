"""`ampscope compare`: the numbers, and the words for people."""

import numpy as np
import pytest

import ampscope
from ampscope.analysis.compare import compare
from ampscope.cli.compare import duration, memory, rows, times, verdict
from ampscope.cli.main import main
from ampscope.record.step import Event, Layer, StepRecord
from tests.helpers_log import stats_of, write_run

LAYERS = [Layer(n, (8, 8), 64, "float32", "Adam.0") for n in ("first.weight", "mid.weight", "last.weight")]


def write(
    folder,
    name,
    *,
    steps=20,
    seconds=0.1,
    factor=(1, 1, 1),
    amp=True,
    memory=0.0,
    loss=1.0,
    skip=(),
    layers=LAYERS,
    first=0,
):
    """Write a run of constant step time whose layers' gradient norms are step + 1 times a factor; return its folder."""
    rows, scale = [], 256.0 if amp else 1.0
    audit = Event(first, "note", data={"topic": "audit", "matmuls": {"float16" if amp else "float32": 3}})
    for t in range(first, first + steps):
        scalars = {
            "loss": loss, "loss_scale": scale, "skipped": float(t in skip), "micro_steps": 1.0,
            "step_seconds": 9.0 if t == first else seconds, "overhead_seconds": 1e-3,
        }  # fmt: skip
        if memory:
            scalars["peak_memory_bytes"] = memory * (t + 1) / (first + steps)
        grads = [np.full((8, 8), f * (t + 1) * scale / 8, np.float32) for f in factor[: len(layers)]]
        record = StepRecord(t, 1e9 + t, scalars, events=[audit] if t == first else [])
        record.layers = stats_of(grads)
        rows.append(record)
    scaler = {"enabled": amp, "init_scale": 256.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 100}
    return write_run(folder, layers, rows, name=name, scaler=scaler)


@pytest.fixture
def pair(tmp_path):
    """Return the folders of an FP32 run and an AMP run."""
    a = write(tmp_path, "fp32", amp=False, seconds=0.183, memory=4 * 2.0**30, loss=0.5)
    b = write(tmp_path, "amp", seconds=0.1, memory=2.0**31, loss=0.55, skip=(3,), factor=(1.0, 0.25, 1.5))
    return a, b


def test_the_numbers_are_those_of_the_runs(pair):
    """Times without the slow first steps, maxima, means, counts; layers by how much their norm differs."""
    c = compare(*map(ampscope.open_run, pair))
    assert (c.a.precision, c.b.precision) == ("FP32", "FP16")
    assert (c.a.steps, c.b.steps) == (20, 20)
    assert (c.a.step_seconds, c.b.step_seconds) == (0.183, 0.1)
    assert c.speed == pytest.approx(1.83)
    assert (c.a.peak_memory_bytes, c.b.peak_memory_bytes) == (2.0**32, 2.0**31)
    assert c.memory == 0.5
    assert c.a.final_loss == pytest.approx(0.5)
    assert c.b.skipped == 1
    assert c.layers == ("mid.weight", "last.weight", "first.weight")
    np.testing.assert_allclose(c.grad_norm_ratio, [0.25, 1.5, 1.0], rtol=1e-5)
    assert c.compared_steps == 19  # the skipped one is left out
    kept = [t for t in range(20) if t != 3]
    assert c.grad_norm_a[2] == pytest.approx(np.median([t + 1 for t in kept]))
    assert c.grad_norm_b[0] == pytest.approx(0.25 * np.median([t + 1 for t in kept]))


def test_the_verdict_names_amp_whichever_side_it_is_on(pair, tmp_path):
    """Faster, slower, as fast; two AMP runs go by their names."""
    fp32, amp = map(ampscope.open_run, pair)
    assert verdict(compare(fp32, amp)) == "AMP is 1.83× faster."
    assert verdict(compare(amp, fp32)) == "AMP is 1.83× faster."
    slow = ampscope.open_run(write(tmp_path, "slow", seconds=0.366))
    assert verdict(compare(fp32, slow)) == "AMP is 2.00× slower."
    assert verdict(compare(slow, amp)) == "amp is 3.66× faster."
    same = ampscope.open_run(write(tmp_path, "same", seconds=0.184))
    assert verdict(compare(fp32, same)) == "AMP is as fast, within 2%."


def test_the_command_prints_80_plain_columns(pair, capsys, monkeypatch):
    """Piped: no colour, no line too long, every number there."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["compare", *map(str, pair)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    for text in (
        "AMP is 1.83× faster.",
        "183 ms",
        "100 ms",
        "4 GiB",
        "2 GiB",
        "0.5×",
        "1 (5.0%)",
        "mid.weight",
        "0.25×",
        "fp32",
        "amp",
    ):
        assert text in out
    assert main(["compare", *map(str, pair), "--layers", "1"]) == 0
    out = capsys.readouterr().out
    assert "last.weight" not in out
    assert "2 more layers differ less" in out
    assert main(["compare", *map(str, pair), "--layers", "0"]) == 0
    assert "Gradient norms" not in capsys.readouterr().out


def test_runs_of_other_layers_and_steps_are_compared_as_far_as_they_go(tmp_path):
    """Layers of one run alone are listed; without a step in common norms are not compared."""
    other = [LAYERS[0], Layer("extra.bias", (8, 8), 64, "float32", "")]
    a = ampscope.open_run(write(tmp_path, "a"))
    b = ampscope.open_run(write(tmp_path, "b", layers=other, factor=(2, 1), steps=5, first=10))
    c = compare(a, b)
    assert c.layers == ("first.weight",)
    assert c.compared_steps == 5
    assert c.grad_norm_ratio[0] == pytest.approx(2)
    assert c.only_a == ("mid.weight", "last.weight")
    assert c.only_b == ("extra.bias",)
    late = ampscope.open_run(write(tmp_path, "late", first=100))
    assert compare(a, late).compared_steps == 0
    assert np.isnan(compare(a, late).grad_norm_ratio).all()


def test_what_was_not_recorded_is_a_dash(tmp_path, capsys):
    """On a CPU there is no peak memory; a loss may be NaN; a run may have no step."""
    a = write(tmp_path, "a", loss=float("nan"))
    b = write_run(tmp_path, LAYERS, [], name="b")
    c = compare(ampscope.open_run(a), ampscope.open_run(b))
    table = {r[0]: r[1:] for r in rows(c)}
    assert table["peak memory"] == ("-", "-", "")
    assert table["final loss"] == ("-", "-", "")
    assert table["step time (median)"] == ("100 ms", "-", "")
    assert table["skipped steps"] == ("0 (0.0%)", "0", "")
    assert verdict(c) == "Step times were not recorded in both runs."
    assert main(["compare", str(a), str(b)]) == 0
    assert "cannot be compared" in capsys.readouterr().out


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
    """logs1/run and logs2/run."""
    a, b = write(tmp_path / "one", "run"), write(tmp_path / "two", "run")
    c = compare(ampscope.open_run(a), ampscope.open_run(b))
    assert (c.a.name, c.b.name) == (str(a), str(b))


def test_a_gradient_that_vanishes_in_one_run_comes_first(tmp_path):
    """A ratio of 0 is the largest difference there is."""
    a = ampscope.open_run(write(tmp_path, "a"))
    b = ampscope.open_run(write(tmp_path, "b", factor=(100, 0, 1)))
    c = compare(a, b)
    assert c.layers[0] == "mid.weight"
    assert c.grad_norm_ratio[0] == 0


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (duration(2.5), "2.5 s"),
        (duration(0.0123), "12.3 ms"),
        (duration(4.2e-5), "42 µs"),
        (duration(float("nan")), "-"),
        (memory(2.5 * 2**30), "2.5 GiB"),
        (memory(3 * 2**20), "3 MiB"),
        (memory(12.0), "12 B"),
        (times(float("nan")), ""),
        (times(0.123456), "0.123×"),
    ],
)
def test_numbers_have_units_and_three_digits(got, want):
    """Short enough for a table."""
    assert got == want
