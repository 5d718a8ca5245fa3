"""`Run`: what was written comes back, through the public API alone."""

import os
import threading

import numpy as np
import pytest

import ampscope
from ampscope.record.step import Event, Layer, StepRecord
from ampscope.run.run import Run
from tests.helpers_log import START, bulk_run, make_layers, records, stats_of, write_run

LAYERS = make_layers(4, 64)


@pytest.fixture
def rows():
    """40 steps: a skip, a NaN layer, a layer without gradient, `.log()` values, weight norms, probes."""
    rows = records(40, LAYERS, skip=[7], nan={12: 1}, no_grad={13: 2}, growth_interval=20)
    rows[3].custom = {"accuracy": 0.5, "<b>odd</b>": 1.0}
    rows[4].custom = {"accuracy": float("nan"), "lr": 9.0}
    rows[20].probed_flushed = np.array([3, 0, -1, 64])
    return rows


@pytest.fixture
def run(tmp_path, rows):
    """The run of `rows`, read back."""
    return ampscope.open_run(write_run(tmp_path, LAYERS, rows, batch=16))


def test_names_and_places(run, tmp_path):
    """What a view shows at the top."""
    assert run.name == "run"
    assert run.path == tmp_path / "run"
    assert run.finished
    assert run.last_seen == pytest.approx(os.stat(tmp_path / "run" / "ampscope-0-rank0.arrows").st_mtime)
    assert run.layers == LAYERS
    assert run.ranks == [0]
    assert run.steps.dtype == np.int64
    assert run.steps.tolist() == list(range(40))
    assert run.metadata["scaler"]["growth_interval"] == 100
    assert run.metadata["versions"]["torch"] == "2.4.0"
    assert repr(run) == "<Run 'run': 40 steps, 4 layers>"
    assert run.damage == []


def test_scalars_are_float64_a_step(run, rows):
    """Stored ones as they were, derived ones from the layers, logged ones where they were logged."""
    for name in ("loss", "loss_scale", "growth_tracker", "skipped", "micro_steps", "step_seconds"):
        assert run.scalar(name).dtype == np.float64
        np.testing.assert_array_equal(run.scalar(name), [r.scalars[name] for r in rows])
    np.testing.assert_array_equal(run.scalar("time"), START + np.arange(40))
    assert np.isnan(run.scalar("peak_memory_bytes")).all()
    accuracy = run.scalar("accuracy")
    assert accuracy[3] == 0.5
    assert np.isnan(np.delete(accuracy, 3)).all()
    assert run.scalar("<b>odd</b>")[3] == 1.0
    np.testing.assert_array_equal(run.scalar("skipped/Adam.0"), run.scalar("skipped"))
    assert set(run.scalars) >= {"loss", "accuracy", "skipped/Adam.0", "<b>odd</b>", "grad_norm"}
    assert run.scalars.count("lr") == 1
    with pytest.raises(ampscope.AmpscopeError, match="no scalar 'accurcy'.*accuracy"):
        run.scalar("accurcy")


def test_run_wide_scalars_are_those_of_all_elements(run):
    """Norm, shares, headroom and counts of the layers together."""
    norm, sampled = run.metric("grad_norm").astype(float), ~np.isnan(run.metric("grad_norm"))
    np.testing.assert_allclose(run.scalar("grad_norm"), np.sqrt(np.nansum(norm**2, 1)), rtol=1e-6)
    least = np.nanmin(run.metric("headroom_bits"), 1)
    np.testing.assert_allclose(run.scalar("headroom_bits"), least, rtol=1e-6)
    zeros = np.nansum(run.metric("zero_ratio"), 1) * 64 / (sampled.sum(1) * 64)
    np.testing.assert_allclose(run.scalar("zero_ratio"), zeros, atol=1e-7)
    assert run.scalar("nonfinite_layers")[[6, 7, 8, 12]].tolist() == [0, 1, 0, 1]
    flushed = np.nansum(run.metric("underflow_ratio"), 1) / sampled.sum(1)
    np.testing.assert_allclose(run.scalar("underflow_ratio"), flushed, atol=1e-6)


def test_metrics_are_float32_and_nan_without_a_gradient(run):
    """`sampled` tells a layer that had no gradient from one that was not looked at."""
    for name in run.metrics:
        assert run.metric(name).dtype == np.float32
        assert run.metric(name).shape == (40, 4)
    assert np.isnan(run.metric("zero_ratio")[13]).tolist() == [False, False, True, False]
    assert run.sampled.dtype == bool
    assert run.sampled.all()
    assert np.isnan(run.metric("grad_max")[12, 1])
    assert run.metric("nonfinite_count")[12, 1] == 64
    assert run.metric("headroom_bits")[7, 3] == -np.inf
    with pytest.raises(ampscope.AmpscopeError, match="no metric 'gradnorm'.*grad_norm"):
        run.metric("gradnorm")


def test_metrics_equal_a_slow_reference(tmp_path):
    """From the gradients themselves, in float64: scales that are and are not powers of two, every kind of element."""
    rng = np.random.default_rng(3)
    grads, scales, rows = [], [2.0**10, 1000.0, 2.0**-3, 1.0], []
    for step, scale in enumerate(scales):
        g = [
            (rng.standard_normal((4, 16)) * 10.0 ** rng.uniform(-8, 2)).astype(np.float16).astype(np.float32)
            for _ in LAYERS
        ]
        g[0][:2] = 0
        g[1].flat[:3] = [np.inf, -np.inf, np.nan]
        if step == 3:
            g[2][:] = 0
            g[3][:] = np.nan
        grads.append(g)
        rows.append(StepRecord(step, 0.0, {"loss_scale": scale}, layers=stats_of(g), keep_exponents=True))
    run = ampscope.open_run(write_run(tmp_path, LAYERS, rows))
    for step, scale in enumerate(scales):
        for i, g in enumerate(grads[step]):
            x = g.astype(np.float64)
            finite = x[np.isfinite(x)]
            size = np.abs(finite)
            got = {name: float(run.metric(name)[step, i]) for name in run.metrics}
            assert got["grad_norm"] == pytest.approx(np.sqrt((finite**2).sum()) / scale, rel=1e-6)
            top = size.max() / scale if len(size) else np.nan
            assert got["grad_max"] == pytest.approx(top, rel=1e-6, nan_ok=True)
            assert got["zero_ratio"] == pytest.approx((x == 0).mean())
            assert got["subnormal_ratio"] == pytest.approx(((size > 0) & (size < 2.0**-14)).sum() / 64)
            assert got["nonfinite_count"] == 64 - len(finite)
            largest = np.abs(x[~np.isnan(x)]).max() if len(x[~np.isnan(x)]) else np.nan
            with np.errstate(divide="ignore"):
                assert got["headroom_bits"] == pytest.approx(np.log2(65504 / largest), rel=1e-6, nan_ok=True)
            bounds = got["underflow_ratio_low"], got["underflow_ratio"], got["underflow_ratio_high"]
            assert 0 <= bounds[0] <= bounds[1] <= bounds[2] <= got["zero_ratio"] + 1e-7
            if np.log2(scale) % 1 == 0 and scale >= 1:
                below = ((size > 0) & (size / scale <= 2.0**-25)).sum() / 64
                assert got["underflow_ratio_unscaled"] >= below - 1e-7


def test_exponents_are_by_biased_exponent(run, rows):
    """Of the steps whose histograms were kept; 2^k at index k + 127; name, index and Layer are one."""
    kept = [r.step for r in rows if r.keep_exponents]
    assert kept == [0, 7, 10, 12, 20, 30]
    for i, layer in enumerate(LAYERS):
        steps, counts = run.exponents(layer.name)
        assert steps.tolist() == kept
        assert counts.shape == (len(kept), 256)
        assert counts.dtype == np.int64
        np.testing.assert_array_equal(counts, [rows[s].layers.exponents[i] for s in kept])
        np.testing.assert_array_equal(run.exponents(i)[1], counts)
        np.testing.assert_array_equal(run.exponents(layer)[1], counts)
        np.testing.assert_array_equal(run.exact_powers(layer)[1], [rows[s].layers.exact[i] for s in kept])
    assert (run.exact_powers(0)[1] <= run.exponents(0)[1]).all()
    for bad in ("nolayer", 4, -1, Layer("x", (), 0, "")):
        with pytest.raises(ampscope.AmpscopeError, match="no layer"):
            run.exponents(bad)


def test_histograms_of_all_layers_at_once_equal_those_one_by_one(run):
    """`histogram_rows` and `histograms` are the fast way to every layer."""
    at = run.histogram_rows()
    assert run.steps[at].tolist() == run.exponents(0)[0].tolist()
    every, exact = run.histograms(at), run.histograms(at, exact=True)
    for i in range(4):
        np.testing.assert_array_equal(every[:, i], run.exponents(i)[1])
        np.testing.assert_array_equal(exact[:, i], run.exact_powers(i)[1])
    np.testing.assert_array_equal(run.histograms(slice(10, 13)), every[[2, 2, 3]] * np.array([1, 0, 1])[:, None, None])


def test_a_layer_without_gradient_has_no_histogram_at_that_step(tmp_path):
    """A zero histogram would say: all zeros."""
    rows = records(3, LAYERS, no_grad={0: 1}, exponents_every=1)
    run = ampscope.open_run(write_run(tmp_path, LAYERS, rows))
    assert run.exponents(1)[0].tolist() == [1, 2]
    assert run.exponents(0)[0].tolist() == [0, 1, 2]


def test_an_all_zero_gradient_has_an_empty_histogram(tmp_path):
    """Measured, and nothing in it."""
    row = StepRecord(0, 0.0, {"loss_scale": 1.0}, layers=stats_of([np.zeros((4, 16))] * 4), keep_exponents=True)
    run = ampscope.open_run(write_run(tmp_path, LAYERS, [row]))
    steps, counts = run.exponents(0)
    assert steps.tolist() == [0]
    assert counts.sum() == 0
    assert run.metric("headroom_bits")[0, 0] == np.inf
    assert run.metric("zero_ratio")[0, 0] == 1


def test_probes_and_weight_norms_are_nan_in_between(run):
    """-1 means that a layer was not probed."""
    measured = run.metric("underflow_ratio_measured")
    np.testing.assert_array_equal(measured[20], np.float32([3 / 64, 0, np.nan, 1]))
    assert np.isnan(np.delete(measured, 20, 0)).all()
    norms = run.metric("weight_norm")
    assert np.isfinite(norms[::10]).all()
    assert np.isnan(np.delete(norms, np.arange(0, 40, 10), 0)).all()


def test_some_rows_are_the_same_rows(run):
    """A slice or positions: across batches, in any metric."""
    for name in run.metrics:
        whole = run.metric(name)
        np.testing.assert_array_equal(run.metric(name, rows=slice(10, 35, 3)), whole[10:35:3])
        np.testing.assert_array_equal(run.metric(name, rows=[0, 15, 16, 39]), whole[[0, 15, 16, 39]])
        assert run.metric(name, rows=slice(0, 0)).shape == (0, 4)
    columns = run.columns(("zeros", "state"), rows=slice(5, 7))
    assert columns["zeros"].shape == (2, 4)
    assert (columns["state"] == 2).all()


def test_unsampled_steps_are_nan_and_not_sampled(tmp_path):
    """`every=5`, and a skip in between."""
    run = ampscope.open_run(write_run(tmp_path, LAYERS, records(20, LAYERS, every=5, skip=[7])))
    looked = np.isin(np.arange(20), [0, 5, 7, 10, 15])
    assert (run.sampled.all(1) == looked).all()
    assert (run.sampled.any(1) == looked).all()
    for name in ("grad_norm", "zero_ratio", "underflow_ratio", "nonfinite_count", "headroom_bits"):
        assert (np.isnan(run.metric(name)).all(1) == ~looked).all()
    assert (np.isnan(run.scalar("grad_norm")) == ~looked).all()
    assert not np.isnan(run.scalar("loss")).any()


def test_events_come_back_whole_and_by_step(tmp_path):
    """Every field, JSON data, odd text."""
    rows = records(3, LAYERS)
    event = Event(
        2,
        "nonfinite",
        0,
        "backward",
        ("b", "a"),
        "aten::<x>",
        "train.py:3",
        "NaN – “born” here\n",
        {"n": [1, None], "k": {"x": 1.5}},
    )
    rows[2].events = [event, Event(1, "note", message="late")]
    run = ampscope.open_run(write_run(tmp_path, LAYERS, rows))
    assert run.events == [Event(1, "note", message="late"), event]
    assert run.backward_order == []


def test_backward_order_is_the_last_one_learned(tmp_path):
    """From the note that the probe leaves."""
    rows = records(2, LAYERS)
    for row, order in zip(rows, (["x"], ["b", "a"]), strict=True):
        row.events = [Event(row.step, "note", data={"topic": "backward_order", "layers": order})]
    assert ampscope.open_run(write_run(tmp_path, LAYERS, rows)).backward_order == ["b", "a"]


def test_tables_for_arrow_and_pandas(run):
    """One row a step; layer metrics on request."""
    table = run.to_arrow(["grad_norm"])
    assert table.num_rows == 40
    assert table.column_names[0] == "step"
    assert set(run.scalars) < set(table.column_names)
    np.testing.assert_array_equal(table["grad_norm/block.1.bias"], run.metric("grad_norm")[:, 3])
    frame = run.to_pandas()
    assert frame["step"].tolist() == list(range(40))
    np.testing.assert_array_equal(frame["loss_scale"], run.scalar("loss_scale"))


def test_without_pandas_the_error_says_what_to_install(run, monkeypatch):
    """pandas is the user's to have."""
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ampscope.AmpscopeError, match="pip install pandas"):
        run.to_pandas()


def test_a_run_that_died_before_its_first_step_opens_empty(tmp_path):
    """Listed, T = 0, layers known, every number an empty array."""
    write_run(tmp_path, LAYERS, [], finish=False)
    (run,) = ampscope.find_runs(tmp_path)
    assert len(run.steps) == 0
    assert run.layers == LAYERS
    assert not run.finished
    assert run.metric("grad_norm").shape == (0, 4)
    assert run.scalar("loss").shape == (0,)
    assert run.sampled.shape == (0, 4)
    assert run.exponents(0)[1].shape == (0, 256)
    assert run.events == []
    assert run.sessions[0].first_step == -1
    assert run.to_arrow().num_rows == 0


def test_a_run_without_layers_has_scalars(tmp_path):
    """L = 0: an optimizer without a known parameter, say."""
    run = ampscope.open_run(write_run(tmp_path, [], [StepRecord(0, 0.0, {"loss": 1.0})]))
    assert run.metric("grad_norm").shape == (1, 0)
    assert run.scalar("loss").tolist() == [1.0]


def test_steps_that_do_not_begin_at_zero(tmp_path):
    """`step=1000` in a new run."""
    run = ampscope.open_run(write_run(tmp_path, LAYERS, records(3, LAYERS, first=1000), step=1000))
    assert run.steps.tolist() == [1000, 1001, 1002]
    assert np.isfinite(run.metric("grad_norm")).all()
    assert run.exponents(0)[0].tolist() == [1000]


def test_many_threads_may_read_one_run(tmp_path):
    """The dashboard does, while it refreshes."""
    run = ampscope.open_run(write_run(tmp_path, LAYERS, records(60, LAYERS), batch=10))
    want, bad = run.metric("grad_norm"), []

    def read():
        for name in ("grad_norm", "zero_ratio", "grad_norm"):
            if name == "grad_norm" and not np.array_equal(run.metric(name), want):
                bad.append(name)
            run.refresh()
            run.exponents(1)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad


def test_reading_needs_no_torch(tmp_path):
    """`import torch` costs 2.5 s and 650 MB."""
    import subprocess
    import sys

    write_run(tmp_path, LAYERS, records(2, LAYERS))
    code = (
        "import sys, ampscope; r = ampscope.find_runs(sys.argv[1])[0]; r.metric('grad_norm'); r.to_arrow(); "
        "print('torch' in sys.modules, 'tensorboard' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_scalars_of_a_long_run_read_no_layer_column(tmp_path, monkeypatch):
    """Opening and scalars touch a small share of the file; a metric reads its columns, some rows only their batches."""
    path = bulk_run(tmp_path, 20_000, 50)
    size = sum(f.stat().st_size for f in path.iterdir())
    read = []
    import ampscope.log.streams as streams

    real = streams._read_into

    def counting(file, at, view):
        read.append(len(view))
        real(file, at, view)

    monkeypatch.setattr(streams, "_read_into", counting)
    run = Run(path)
    run.scalar("loss_scale")
    assert len(run.steps) == 20_000
    assert sum(read) < size / 10
    read.clear()
    run.metric("grad_max", rows=slice(5000, 5010))
    assert sum(read) < size / 20 / 5
    read.clear()
    assert run.refresh() is False
    assert read == []
