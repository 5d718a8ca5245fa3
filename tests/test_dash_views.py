"""Dashboard: run → plain data. Decimation, summaries of long runs, and what each tab shows.

One file: a view a section, over the same made run.
"""

import dataclasses
import math

import numpy as np
import pytest
from ampscope_dashboards.background import Background
from ampscope_dashboards.decimate import bucket_edges, pick, window
from ampscope_dashboards.pyramid import HistogramSummary, LinePyramid
from ampscope_dashboards.reader import RunStore
from ampscope_dashboards.source import WAS_NONFINITE, Source
from ampscope_dashboards.views import compare, events, health, layer, layers, marks, overview, whatif
from ampscope_dashboards.views.common import Range, curve, duration, number, percent, power

from ampscope.analysis.diagnose import summary
from ampscope.errors import AmpscopeError
from ampscope.record.step import Event, StepRecord
from tests.helpers_log import FakeClock, bulk_run, make_layers, records, write_run


@pytest.fixture
def store(tmp_path):
    """Return a store over one run: overflow at 5, all NaN in layer 2 at 30, no gradient in layer 1 at 40."""
    kinds = make_layers(6)
    write_run(tmp_path, kinds, records(120, kinds, skip=[5], nan={30: 2}, no_grad={40: 1}), name="run")
    return RunStore(tmp_path)


# Decimation


def test_decimation_keeps_every_spike_gap_and_end():
    """Least, greatest, first, last and non-finite rows of a long line are among those drawn."""
    values = np.random.default_rng(0).normal(size=50_000)
    values[12_345], values[30_001], values[40_000], values[777] = 1e6, -1e6, np.nan, np.inf
    rows = pick(values, 2000)
    assert len(rows) <= 2000
    assert (np.diff(rows) > 0).all()
    assert {0, 12_345, 30_001, 40_000, 777, 49_999} <= set(rows.tolist())


def test_decimation_keeps_extremes_of_each_bucket():
    """Against the obvious loop: each bucket's least and greatest value is drawn."""
    values = np.random.default_rng(1).normal(size=9_000)
    rows = set(pick(values, 400).tolist())
    edges = bucket_edges(len(values), 100)
    for a, b in zip(edges[:-1], edges[1:], strict=True):
        assert a + values[a:b].argmin() in rows
        assert a + values[a:b].argmax() in rows
        assert b - 1 in rows


def test_short_lines_are_not_decimated():
    """A line with few points is drawn whole, an empty one is empty."""
    assert pick(np.arange(10.0), 2000).tolist() == list(range(10))
    assert pick(np.zeros(0)).tolist() == []


@pytest.mark.parametrize(
    ("low", "high", "rows"), [(None, None, (0, 10)), (30, 50, (2, 7)), (1000, 2000, (9, 10)), (-9, -1, (0, 1))]
)
def test_a_window_holds_one_row_more_on_either_side(low, high, rows):
    """Lines reach the edge of the picture."""
    part = window(np.arange(0, 100, 10), low, high)
    assert (part.start, part.stop) == rows


def test_a_pyramid_that_grew_is_one_that_was_built_at_once():
    """Rows taken in piece by piece give the same picture, with every extreme of any window."""
    values = np.random.default_rng(2).normal(size=300_000)
    values[200_000], values[250_000], values[123_456] = 50.0, np.inf, -40.0
    grown, whole = LinePyramid(), LinePyramid()
    for end in (1_000, 70_001, 200_003, 300_000):
        grown.extend(values, end)
    whole.extend(values, len(values))
    for start, stop in ((0, 300_000), (150_000, 299_999), (123_400, 123_500)):
        rows = grown.pick(values, start, stop)
        assert rows.tolist() == whole.pick(values, start, stop).tolist()
        assert len(rows) <= 2000
        inside = values[start:stop]
        finite = np.where(np.isfinite(inside), inside, 0)
        assert start + finite.argmax() in rows
        assert start + finite.argmin() in rows
    assert 250_000 in grown.pick(values, 0, 300_000)


def test_a_histogram_summary_adds_up():
    """Blocks joined in pairs hold every count, wherever their bins lie."""
    rng = np.random.default_rng(3)
    counts = rng.integers(0, 5, (900, 2, 256))
    counts[:, :, :100] = 0
    counts[500:, :, 60:100] = 1
    summary = HistogramSummary(2)
    summary.MOST = 40
    for a, b in ((0, 7), (7, 400), (400, 900)):
        summary.extend(np.arange(a, b) * 10, counts[a:b])
    first, many, got = summary.of(1, 0, 9000)
    assert got.sum(0).tolist() == counts[:, 1].sum(0).tolist()
    assert many.sum() == 900
    assert len(first) <= 40
    assert first[0] == 0


# Source


def test_summaries_agree_with_the_log(tmp_path, monkeypatch):
    """What a long run's heatmap shows is the worst of the rows in each column, read or summed up."""
    bulk_run(tmp_path, 5_000, 4, skip_every=997, batch=500)
    monkeypatch.setattr("ampscope_dashboards.source.RAW_CELLS", 100)
    store = RunStore(tmp_path)
    source = store.source("bulk")
    table = source.table("grad_norm", 0, None, None, 50)
    full = source.run.metric("grad_norm")
    assert table.done == 1.0
    assert table.edges[0] == 0
    assert table.edges[-1] == 5_000
    for i, (a, b) in enumerate(zip(table.edges[:-1], table.edges[1:], strict=True)):
        np.testing.assert_array_equal(table.high[i], np.nanmax(full[a:b], axis=0))
        np.testing.assert_array_equal(table.low[i], np.nanmin(full[a:b], axis=0))
        bad = (source.run.metric("nonfinite_count")[a:b] > 0).any(0)
        np.testing.assert_array_equal((table.flags[i] & WAS_NONFINITE) > 0, bad)


def test_a_growing_run_is_taken_in_row_by_row(tmp_path, monkeypatch):
    """After each refresh, scalars and summaries are those of a run opened afresh."""
    monkeypatch.setattr("ampscope_dashboards.source.RAW_CELLS", 10)
    kinds = make_layers(3)
    rows = records(400, kinds, skip=[250])
    write_run(tmp_path / "whole", kinds, rows, name="run")
    write_run(tmp_path / "part", kinds, rows[:150], name="run", finish=False)
    store = RunStore(tmp_path / "part")
    source = store.source("run")
    source.table("grad_norm", 0, None, None, 20)
    source.line("loss", 0, None, None)
    assert not source.refresh()
    before = source.stamp
    for path in (tmp_path / "whole" / "run").iterdir():
        (tmp_path / "part" / "run" / path.name).write_bytes(path.read_bytes())
    assert source.refresh()
    assert source.stamp != before
    fresh = RunStore(tmp_path / "whole").source("run")
    for name in ("loss", "loss_scale", "skipped"):
        np.testing.assert_array_equal(source.values(name, 0), fresh.values(name, 0))
    np.testing.assert_array_equal(source.line("loss", 0, None, None)[1], fresh.line("loss", 0, None, None)[1])
    a, b = source.table("grad_norm", 0, None, None, 20), fresh.table("grad_norm", 0, None, None, 20)
    np.testing.assert_array_equal(a.high, b.high)
    assert a.edges.tolist() == b.edges.tolist()


def test_a_session_that_goes_back_replaces_what_was_drawn(tmp_path):
    """Where a later session records steps again, its values are shown."""
    kinds = make_layers(2)
    write_run(tmp_path, kinds, records(100, kinds), name="run")
    source = RunStore(tmp_path).source("run")
    assert source.values("loss", 0)[60] == pytest.approx(math.exp(-60 / 500))
    write_run(tmp_path, kinds, records(30, kinds, first=50, loss=7.0), name="run", step=50)
    assert source.refresh()
    assert source.values("loss", 0)[60] == pytest.approx(7 * math.exp(-60 / 500))
    assert overview.sessions(source) == [(50.0, "session 1")]


def test_a_long_run_is_summed_up_in_the_background(tmp_path, monkeypatch):
    """The first answer says how much has been read; when all is read the stamp has moved."""
    bulk_run(tmp_path, 3_000, 4, batch=500)
    monkeypatch.setattr("ampscope_dashboards.source.RAW_CELLS", 10)
    monkeypatch.setattr("ampscope_dashboards.source.SMALL", 10)
    asked = []
    source = Source("bulk", RunStore(tmp_path).source("bulk").run, lambda *job: asked.append(job))
    first = source.table("grad_norm", 0, None, None, 50)
    assert first.done == 0.0
    assert first.high.shape == (0, 4)
    assert {job[1] for job in asked} == {"norm", "flags"}
    for _, family, rank in asked:
        while source.scan_chunk(family, rank):
            pass
    assert source.table("grad_norm", 0, None, None, 50).done == 1.0


def test_the_worker_makes_the_summaries(tmp_path, monkeypatch):
    """A store's own thread finishes what was asked for, and viewers learn of it by the stamp."""
    bulk_run(tmp_path, 3_000, 4, batch=500)
    monkeypatch.setattr("ampscope_dashboards.source.RAW_CELLS", 10)
    monkeypatch.setattr("ampscope_dashboards.source.SMALL", 10)
    monkeypatch.setattr("ampscope_dashboards.reader.MAKE_WAY", 0.001)
    store = RunStore(tmp_path)
    source = store.source("bulk")
    before = source.stamp
    source.table("grad_norm", 0, None, None, 50)
    assert store.finish_reading(timeout=20)
    assert source.stamp != before
    assert source.table("grad_norm", 0, None, None, 50).done == 1.0


def test_a_worker_that_broke_is_replaced(tmp_path, monkeypatch):
    """A bug in one summary ends its thread, not every later summary."""
    bulk_run(tmp_path, 3_000, 4, batch=500)
    monkeypatch.setattr("ampscope_dashboards.source.RAW_CELLS", 10)
    monkeypatch.setattr("ampscope_dashboards.source.SMALL", 10)
    monkeypatch.setattr("ampscope_dashboards.reader.MAKE_WAY", 0.001)
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    store = RunStore(tmp_path)
    source = store.source("bulk")

    def broken(family, rank):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(source, "scan_chunk", broken)
        source.table("grad_norm", 0, None, None, 50)
        assert store.finish_reading(timeout=20)
    source.table("grad_norm", 0, None, None, 50)
    assert store.finish_reading(timeout=20)
    assert source.table("grad_norm", 0, None, None, 50).done == 1.0


# Store


def test_runs_are_found_newest_first_and_named_by_their_path(tmp_path):
    """Sub-folders are looked into; a key is a path below the log folder."""
    kinds = make_layers(1)
    write_run(tmp_path / "a", kinds, records(2, kinds), name="one")
    write_run(tmp_path, kinds, records(2, kinds), name="two")
    clock = FakeClock()
    store = RunStore(tmp_path, clock=clock)
    assert {e.key for e in store.entries()} == {"a/one", "two"}
    write_run(tmp_path, kinds, records(2, kinds), name="three")
    assert len(store.entries()) == 2, "looked at again too soon"
    clock.tick(3)
    assert {e.key for e in store.entries()} == {"a/one", "two", "three"}


@pytest.mark.parametrize("key", ["../secret", "/etc", "run/../../x", "", "RUN"])
def test_a_key_that_was_not_found_opens_nothing(store, key):
    """No path is made from what a browser sends."""
    store.entries()
    with pytest.raises(Exception, match="no run"):
        store.source(key)


def test_a_run_s_own_folder_can_be_shown(tmp_path):
    """LOGDIR may be one run."""
    kinds = make_layers(1)
    path = write_run(tmp_path, kinds, records(2, kinds), name="mine")
    store = RunStore(path)
    assert [e.key for e in store.entries()] == ["mine"]
    assert len(store.source("mine").steps) == 2


def test_a_run_is_live_then_ended_or_dead(tmp_path):
    """State follows the heartbeat and the end mark."""
    kinds = make_layers(1)
    path = write_run(tmp_path, kinds, records(3, kinds), name="run", finish=False)
    clock = FakeClock(max(p.stat().st_mtime for p in path.iterdir()) + 1)
    store = RunStore(tmp_path, clock=clock)
    source = store.source("run")
    assert store.life(source).state == "live"
    clock.tick(120)
    assert store.life(source).state == "died"
    assert store.life(source).age > 100
    done = write_run(tmp_path, kinds, records(3, kinds), name="done")
    clock.tick(10)
    assert store.life(store.source(done.name)).state == "ended"


# Views


def test_overview_marks_what_a_line_cannot_show(store):
    """Skips, inf and NaN are marked at their steps; growth and backoff move the scale."""
    source = store.source("run")
    view = overview.overview(source, 0, Range())
    at = {
        kind: [x for x, k in zip(view.marks.x.tolist(), view.marks.kind, strict=True) if k == kind]
        for kind in marks.KINDS
    }
    assert at["skip"] == [5, 30]
    assert 5 in at["inf"]
    assert view.marks.counts["skip"] == 2
    assert view.scale.y[0] == 2.0**16
    assert view.scale.y[10] == 2.0**15
    assert np.isfinite(view.underflow_high.y).all()
    assert (view.underflow_low.y <= view.underflow_high.y).all()
    assert view.last_step == 119


def test_marks_are_those_of_the_rank_in_view(tmp_path):
    """What another rank skipped is not drawn on this one's line."""
    kinds = make_layers(2)
    for rank in (0, 1):
        rows = records(40, kinds, skip=[5 + rank], seed=rank)
        for row in rows:
            row.events = [dataclasses.replace(e, rank=rank) for e in row.events]
        write_run(tmp_path, kinds, rows, name="run", rank=rank, world_size=2, launch_key="x")
    source = RunStore(tmp_path).source("run")
    for rank in (0, 1):
        view = marks.marks(source, rank, Range())
        assert [x for x, k in zip(view.x.tolist(), view.kind, strict=True) if k == "skip"] == [5 + rank]


def test_a_zoomed_overview_holds_its_range_only(store):
    """Only the steps in view, and one on either side, are sent."""
    view = overview.overview(store.source("run"), 0, Range(50.0, 60.0))
    assert view.loss.x[0] == 49
    assert view.loss.x[-1] == 61
    assert view.marks.counts == {"growth": 0, "skip": 0, "inf": 0, "nan": 0}


def test_values_that_are_not_finite_are_kept_apart():
    """inf and NaN leave the line and become marks; NaN counts only where it was a value."""
    y = np.array([1.0, np.nan, np.inf, -np.inf, 2.0])
    drawn = curve(np.arange(5), y, nan_is_bad=True)
    assert drawn.bad_x.tolist() == [1, 2, 3]
    assert drawn.bad_kind == ["nan", "+inf", "-inf"]
    assert np.isnan(drawn.y[1:4]).all()
    assert curve(np.arange(5), y).bad_kind == ["+inf", "-inf"]


def test_events_without_one_written_are_filled_in_from_the_rows(tmp_path):
    """A step that was skipped is listed even if no event says so."""
    kinds = make_layers(1)
    rows = [StepRecord(i, 1e9 + i, {"loss": 1.0, "loss_scale": 4.0, "skipped": float(i == 3)}) for i in range(6)]
    rows[4].events.append(Event(4, "growth", message="grew"))
    write_run(tmp_path, kinds, rows, name="run")
    source = RunStore(tmp_path).source("run")
    found = events.event_list(source, ["skip"])
    assert [(i.id, i.event.step) for i in found.items] == [("3.0", 3)]
    assert "2^2" in found.items[0].event.message


def test_events_are_stepped_through_and_searched(store):
    """Next and previous follow the filter; ids stay."""
    source = store.source("run")
    view = events.event_list(source, ["skip", "backoff"], "", chosen="5.0", page=-1)
    assert view.place == 1
    assert view.next == "5.1"
    only = events.event_list(source, ["skip"], "block.1")
    assert [i.event.step for i in only.items] == [30]
    assert events.event_list(source, ["skip"], "re:(").problem


def test_pages_of_events_hold_fifty(tmp_path):
    """A list of many is cut into pages, and a chosen one leads to its page."""
    kinds = make_layers(1)
    rows = [StepRecord(i, 1e9 + i, {"loss_scale": 1.0, "skipped": 1.0}) for i in range(230)]
    write_run(tmp_path, kinds, rows, name="run")
    source = RunStore(tmp_path).source("run")
    view = events.event_list(source, ["skip"], page=4)
    assert (view.pages, len(view.items)) == (5, 30)
    assert events.event_list(source, ["skip"], page=-1, chosen="120.0").page == 2
    assert events.event_list(source, ["skip"], newest_first=True).items[0].event.step == 229


def test_the_heatmap_tells_kinds_of_cells_apart(store):
    """Value, NaN, no gradient are different cells of their layers and steps."""
    view = layers.layer_map(store.source("run"), 0, "grad_norm", Range())
    cell = {row.label: view.cells[i] for i, row in enumerate(view.rows)}
    assert cell["block.1.weight"][30] == layers.NONFINITE
    assert cell["block.0.bias"][40] == layers.ABSENT
    assert cell["block.0.bias"][41] == layers.VALUE
    assert cell["block.2.bias"][5] == layers.NONFINITE
    assert view.edges.tolist() == list(range(121))


def test_unsampled_steps_are_not_called_without_gradient(tmp_path):
    """Every fourth step sampled: the others are "not sampled"."""
    kinds = make_layers(2)
    write_run(tmp_path, kinds, records(12, kinds, every=4), name="run")
    view = layers.layer_map(RunStore(tmp_path).source("run"), 0, "grad_norm", Range())
    assert (view.cells[0][[1, 2, 3]] == layers.UNSAMPLED).all()
    assert (view.cells[0][[0, 4, 8]] == layers.VALUE).all()


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", 6),
        ("BLOCK bias", 3),
        ("re:^block\\.[01]\\.w", 2),
        ("nothing", 0),
        ("re:(", 6),
    ],
)
def test_search_takes_words_and_patterns(store, query, expected):
    """Several words must all occur; `re:` is a regular expression; a broken one says so and hides nothing."""
    view = layers.layer_map(store.source("run"), 0, "grad_norm", Range(), query=query)
    assert view.matched == expected
    assert bool(view.problem) == (query == "re:(")


def test_modules_fold_and_unfold(store):
    """A folded module shows the worst of its layers; an opened one shows them singly."""
    source = store.source("run")
    folded = layers.layer_map(source, 0, "grad_norm", Range(), group="module")
    assert [(r.key, r.count) for r in folded.rows] == [("block.0", 2), ("block.1", 2), ("block.2", 2)]
    single = layers.layer_map(source, 0, "grad_norm", Range())
    np.testing.assert_array_equal(folded.values[0], np.fmax(single.values[0], single.values[1]))
    opened = layers.layer_map(source, 0, "grad_norm", Range(), group="module", opened=["block.1"])
    assert [r.key for r in opened.rows] == ["block.0", "block.1.weight", "block.1.bias", "block.2"]
    assert opened.opened == ["block.1"]


def test_worst_first_puts_broken_layers_on_top(store):
    """Layers with NaN come first, then by value; few doublings left are worse than many."""
    view = layers.layer_map(store.source("run"), 0, "grad_norm", Range(), order="worst")
    assert {view.rows[0].key, view.rows[1].key} == {"block.1.weight", "block.2.bias"}
    rest = [r.worst for r in view.rows[2:]]
    assert rest == sorted(rest, reverse=True)
    room = layers.layer_map(store.source("run"), 0, "headroom_bits", Range(10.0, 20.0), order="worst")
    assert [r.worst for r in room.rows] == sorted(r.worst for r in room.rows)


def test_two_thousand_layers_are_folded_and_what_is_left_out_is_counted(tmp_path):
    """At most 200 rows are sent: modules fold by themselves, and single rows beyond are counted."""
    names = [f"net.{i // 10}.{i % 10}" for i in range(2000)]
    rows = layers.make_rows(names, range(2000), "auto", ())
    assert len(rows) == 200
    assert all(r.is_group and r.count == 10 for r in rows)
    deep = [f"model.layers.{i // 12}.part{i % 12 // 2}.{i % 2}" for i in range(1200)]
    assert [r.key for r in layers.make_rows(deep, range(1200), "auto", ())] == [f"model.layers.{i}" for i in range(100)]
    assert len(layers.make_rows(names, range(150), "auto", ())) == 150
    assert len(layers.make_rows(names, range(2000), "top", ())) == 1
    kinds = make_layers(300)
    write_run(tmp_path, kinds, records(2, kinds), name="wide")
    view = layers.layer_map(RunStore(tmp_path).source("wide"), 0, "grad_norm", Range(), group="none")
    assert (len(view.rows), view.left_out) == (200, 100)


def test_a_layer_s_lines_are_those_of_the_run(store):
    """Every curve of a layer is its metric, step by step."""
    source = store.source("run")
    view = layer.lines(source, 0, 3, Range())
    norm = source.run.metric("grad_norm")[:, 3].astype(float)
    np.testing.assert_array_equal(view.curves["grad_norm"].y, norm)
    assert view.raw


def test_exponents_are_shares_of_the_layer(store):
    """Columns add up to the share of finite non-zero elements; true gradients lie log2(S) lower."""
    source = store.source("run")
    scaled = layer.exponents(source, 0, 0, Range(), "scaled")
    true = layer.exponents(source, 0, 0, Range(), "true")
    steps, counts = source.run.exponents(0)
    np.testing.assert_allclose(scaled.share.sum(1), counts.sum(1) / source.layers[0].numel)
    assert scaled.steps.tolist() == steps.tolist()
    peak_scaled = scaled.first + scaled.share[0].argmax()
    peak_true = true.first + true.share[0].argmax()
    assert peak_scaled - peak_true == 16
    assert true.shift[0] == 16
    assert layer.exponents(source, 0, 0, Range(1.0, 4.0)) is None


def test_histograms_of_a_long_run_come_from_the_summary(tmp_path, monkeypatch):
    """Summed up or read one by one, the picture holds the same elements."""
    bulk_run(tmp_path, 4_000, 3, batch=500)
    source = RunStore(tmp_path).source("bulk")
    alone = Source("bulk", source.run)
    monkeypatch.setattr("ampscope_dashboards.source.RAW_HISTOGRAM_ROWS", 100)
    summed = alone.exponents(1, 0, None, None)
    _, counts = source.run.exponents(1)
    np.testing.assert_array_equal(summed.counts.sum(0), counts.sum(0))
    assert summed.read == summed.of == len(counts)


def test_health_says_what_a_healthy_run_did(tmp_path):
    """No finding: the sentence holds skips, scale and the worst layer."""
    kinds = make_layers(2)
    write_run(tmp_path, kinds, records(400, kinds, skip=[1, 2]), name="run")
    store = RunStore(tmp_path)
    source = store.source("run")
    from ampscope_dashboards.background import Verdict

    said = health.health(source, 0, Verdict([]))
    assert said.level == "good"
    assert said.sentence.startswith("Healthy: 2 of 400 steps skipped, all in warm-up; scale 2^")
    assert health.health(source, 0, Verdict()).level == "unknown"


def test_a_run_that_only_skipped_is_not_called_healthy(tmp_path):
    """The scale is still coming down: nothing can be said."""
    from ampscope_dashboards.background import Verdict

    kinds = make_layers(2)
    write_run(tmp_path, kinds, records(6, kinds, skip=range(6)), name="run")
    source = RunStore(tmp_path).source("run")
    said = health.health(source, 0, Verdict([]))
    assert (said.level, said.sentence[:9]) == ("info", "Undecided")
    assert "6 of 6 steps skipped" in said.sentence
    assert summary(source.run).startswith("Undecided: all of 6 steps skipped while the loss scale came down, now 2^")


def test_health_is_the_first_serious_finding(store):
    """A finding above info takes the sentence, with its remedy."""
    from ampscope_dashboards.background import Verdict

    from ampscope.analysis.finding import Finding

    found = [
        Finding("warmup-calibration", "info", "x"),
        Finding("layer-underflow", "warning", "It flushes", remedy="Do this."),
    ]
    said = health.health(store.source("run"), 0, Verdict(found))
    assert (said.level, said.sentence, said.remedy, said.rule) == (
        "warning",
        "It flushes",
        "Do this.",
        "layer-underflow",
    )


def test_answers_are_made_apart_and_remembered(store):
    """Asked without patience there is none yet; later there is; it is made once while nothing changes."""
    made = []
    clock = FakeClock()

    def slow(run):
        made.append(run.name)
        return len(run.steps)

    source = store.source("run")
    background = Background(slow, clock)
    before = source.stamp
    background.of(source)
    assert background.finish(timeout=20)
    assert background.of(source).value == 120
    assert source.stamp != before
    assert made == ["run"]


def test_an_answer_that_fails_says_why(store):
    """A known error becomes its text; viewers are not left waiting."""

    def broken(run):
        raise AmpscopeError("no histograms")

    background = Background(broken)
    found = background.of(store.source("run"), patience=20)
    assert (found.value, found.problem) == (None, "no histograms")


def test_what_if_counts_what_the_library_counts(store):
    """Shares over all elements, the window and each layer's windows are those of `ampscope.what_if`."""
    import ampscope

    source = store.source("run")
    collected = store.collected.of(source, patience=20).value
    view = whatif.sweep(source, 0, collected, "fp16", 12)
    found = ampscope.what_if(source.run, "fp16", 2.0**12)
    lost = (found.underflow_ratio + found.already_flushed_ratio) * found.elements
    assert view.at[0] == pytest.approx(np.nansum(lost) / found.elements.sum())
    at = view.exponents.tolist().index(12)
    assert view.flushed[at] == pytest.approx(view.at[0])
    assert view.window == tuple(np.log2(found.window))
    low = {name: math.log2(v) for name, v in zip(found.layers, found.scale_low, strict=True)}
    assert {r.name: r.low for r in view.rows} == low
    assert (np.diff(view.flushed) <= 1e-12).all()
    assert (np.diff(view.overflow) >= -1e-12).all()


def test_a_replay_with_the_run_s_settings_is_the_record(store):
    """Nothing replaced: the same curve and skips; a shorter interval grows sooner."""
    source = store.source("run")
    prepared = store.prepared.of(source, patience=20).value
    own = whatif.replay(prepared, {}, Range())
    np.testing.assert_array_equal(own.replayed, source.run.scalar("loss_scale"))
    assert own.replayed_skips.tolist() == own.recorded_skips.tolist() == [5, 30]
    faster = whatif.replay(prepared, {"growth_interval": 10}, Range())
    assert faster.replayed[-1] > own.replayed[-1]
    assert whatif.replay(prepared, {}, Range(50.0, 60.0)).x.tolist() == list(range(50, 61))


def test_runs_are_compared_on_a_common_axis(tmp_path):
    """Curves by step and by time; ratio of gradient norms a layer; the first run is the measure."""
    kinds = make_layers(3)
    write_run(tmp_path, kinds, records(60, kinds, seed=1), name="a")
    write_run(tmp_path, kinds, records(60, kinds, seed=1, spread=4e-4, begin=1.8e9), name="b")
    store = RunStore(tmp_path)
    pair = [(store.source(k), 0) for k in ("a", "b")]
    view = compare.compare(pair, "step")
    assert [r.name for r in view.runs] == ["a", "b"]
    np.testing.assert_allclose(view.ratios[0].log2, 2.0, atol=0.01)
    timed = compare.compare(pair, "relative")
    assert timed.runs[1].loss.x[0] == 0.0
    assert compare.compare(pair, "wall").runs[1].loss.x[0] == 1.8e9
    assert dict(view.rows)["steps"] == ["60", "60"]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (power(65536.0), "2^16"), (power(3.0), "3"), (power(math.nan), "NaN"), (number(1e-6), "1e-06"), (number(1234567), "1,234,567"),
        (number(math.inf), "inf"), (percent(0.004), "0.4 %"), (percent(1e-7), "below 0.01 %"), (percent(0.0), "0 %"), (percent(1.0), "100 %"),
        (duration(3), "3 s"), (duration(600), "10 min"), (duration(7200), "2 h"), (duration(400_000), "5 days"),
    ],
)  # fmt: skip
def test_numbers_read_well(made, expected):
    """Significant digits, powers of two, words for time."""
    assert made == expected


@pytest.mark.parametrize("pair", [None, [1], ["a", 2], [5, 5], [9, 1], [math.nan, 3], [math.inf, 3], {"x": 1}, "12"])
def test_nonsense_from_a_browser_is_the_whole_run(pair):
    """A range that is none is ignored."""
    assert Range.of(pair) == Range()


def test_compare_shows_the_numbers_of_the_command_line(tmp_path):
    """The tab and `ampscope compare` say the same of two runs: step time, final loss, skips, ratios, their order."""
    from ampscope.analysis.compare import compare as on_the_command_line

    kinds = make_layers(4)
    write_run(tmp_path, kinds, records(60, kinds, seed=1, skip=[3]), name="a")
    write_run(tmp_path, kinds, records(50, kinds, seed=2, spread=4e-4), name="b")
    store = RunStore(tmp_path)
    a, b = store.source("a"), store.source("b")
    told = on_the_command_line(a.run, b.run)
    view = compare.compare([(a, 0), (b, 0)], "step")
    rows = dict(view.rows)
    assert view.ratios[0].layers == list(told.layers)
    np.testing.assert_allclose(2.0 ** view.ratios[0].log2, told.grad_norm_ratio)
    assert rows["precision"] == [told.a.precision, told.b.precision]
    assert rows["skipped steps"][0].startswith(f"{told.a.skipped} ")
    assert [float(v.split()[0].replace(",", "")) for v in rows["step time (median)"]] == pytest.approx(
        [1e3 * told.a.step_seconds, 1e3 * told.b.step_seconds], rel=1e-2
    )
    assert [float(v) for v in rows["final loss"]] == pytest.approx([told.a.final_loss, told.b.final_loss], rel=1e-3)
