"""Sessions, ranks and growing logs: joined as the design says, each still whole, read incrementally."""

import os
import shutil

import numpy as np
import pytest

import ampscope
from ampscope.log.arrows import ArrowSink
from ampscope.log.encode import encode
from ampscope.log.schema import Header
from ampscope.record.step import Event, Layer, StepRecord
from tests.helpers_log import make_layers, records, stats_of, write_run

LAYERS = make_layers(2, 64)


def with_events(rows, text):
    """Give every record an event."""
    for row in rows:
        row.events = [Event(row.step, "note", message=f"{text} {row.step}")]
    return rows


def test_a_later_session_goes_on_with_the_steps(tmp_path):
    """Steps, numbers and histograms of both, one after the other."""
    first, second = records(15, LAYERS, loss=1.0), records(10, LAYERS, first=15, loss=2.0, seed=1)
    path = write_run(tmp_path, LAYERS, first)
    write_run(tmp_path, LAYERS, second)
    run = ampscope.open_run(path)
    assert run.steps.tolist() == list(range(25))
    np.testing.assert_array_equal(run.scalar("loss"), [r.scalars["loss"] for r in (*first, *second)])
    assert run.exponents(0)[0].tolist() == [0, 10, 20]
    assert [(s.index, s.first_step, s.last_step, s.finished) for s in run.sessions] == [
        (0, 0, 14, True),
        (1, 15, 24, True),
    ]


def test_where_sessions_overlap_the_later_one_wins_and_each_stays_whole(tmp_path):
    """Session 1 begins at step 6 of 10 and session 2 at step 8 again."""
    parts = [
        with_events(records(n, LAYERS, first=first, seed=i, loss=i + 1.0, exponents_every=1), f"s{i}")
        for i, (first, n) in enumerate(((0, 10), (6, 5), (8, 2)))
    ]
    for part in parts:
        path = write_run(tmp_path, LAYERS, part, step=part[0].step)
    run = ampscope.open_run(path)
    owner = [0] * 6 + [1] * 2 + [2] * 2 + [1]
    assert run.steps.tolist() == list(range(11))
    by_step = {(i, r.step): r for i, part in enumerate(parts) for r in part}
    want = [by_step[o, s] for s, o in enumerate(owner)]
    np.testing.assert_array_equal(run.scalar("loss"), [r.scalars["loss"] for r in want])
    np.testing.assert_array_equal(run.columns(("max_abs",))["max_abs"], [np.float32(r.layers.max_abs) for r in want])
    steps, counts = run.exponents(1)
    assert steps.tolist() == list(range(11))
    np.testing.assert_array_equal(counts, [r.layers.exponents[1] for r in want])
    np.testing.assert_array_equal(run.histograms(slice(None))[:, 1], counts)
    assert [e.message for e in run.events] == [f"s{o} {s}" for s, o in enumerate(owner)]
    for i, part in enumerate(parts):
        whole = run.session(i)
        assert whole.name == "run"
        assert whole.steps.tolist() == [r.step for r in part]
        np.testing.assert_array_equal(whole.scalar("loss"), [r.scalars["loss"] for r in part])
        assert len(whole.events) == len(part)
        assert len(whole.sessions) == 1
    with pytest.raises(ampscope.AmpscopeError, match="no session 3; it has 0, 1, 2"):
        run.session(3)


def test_session_events_are_kept_of_every_session(tmp_path):
    """A restart at the same step twice: both are told."""
    for session in range(3):
        rows = records(4, LAYERS, first=2)
        rows[0].events = [Event(2, "session", message=f"session {session}")]
        path = write_run(tmp_path, LAYERS, rows, step=2)
    run = ampscope.open_run(path)
    assert [e.message for e in run.events] == ["session 0", "session 1", "session 2"]


def test_a_killed_session_is_joined_from_its_tail(tmp_path):
    """The first session was never closed."""
    path = write_run(tmp_path, LAYERS, records(5, LAYERS), finish=False)
    write_run(tmp_path, LAYERS, records(5, LAYERS, first=5))
    run = ampscope.open_run(path)
    assert run.steps.tolist() == list(range(10))
    assert run.finished
    assert [s.finished for s in run.sessions] == [False, True]


def test_layers_of_all_sessions_are_in_one_list(tmp_path):
    """A layer renamed between sessions: NaN where it was not; the label of an optimizer is taken from where it is known."""
    old = [Layer("a", (8,), 8, "float32"), Layer("b", (8,), 8, "float32", "SGD.0")]
    new = [Layer("c", (8,), 8, "float32", "SGD.0"), Layer("a", (8,), 8, "float32", "SGD.0")]
    write_run(tmp_path, old, records(2, old))
    run = ampscope.open_run(write_run(tmp_path, new, records(2, new, first=2)))
    assert [(x.name, x.optimizer) for x in run.layers] == [("a", "SGD.0"), ("b", "SGD.0"), ("c", "SGD.0")]
    known = ~np.isnan(run.metric("grad_norm"))
    assert known.tolist() == [[True, True, False]] * 2 + [[True, False, True]] * 2
    assert run.sampled.tolist() == known.tolist()
    assert run.histograms(slice(None))[0, 2].sum() == 0


def test_ranks_stand_beside_each_other(tmp_path):
    """Each rank's numbers; NaN at steps that a rank has not recorded; rank 0 is the default."""
    options = {"world_size": 2, "launch_key": "k", "gradients": "replicated"}
    path = write_run(tmp_path, LAYERS, records(12, LAYERS, loss=1.0), rank=0, **options)
    write_run(tmp_path, LAYERS, with_events(records(10, LAYERS, loss=2.0, seed=1), "one"), rank=1, **options)
    run = ampscope.open_run(path)
    assert run.ranks == [0, 1]
    assert run.steps.tolist() == list(range(12))
    assert run.scalar("loss")[0] == 1.0
    np.testing.assert_array_equal(run.scalar("loss"), run.scalar("loss", rank=0))
    other = run.scalar("loss", rank=1)
    assert other[0] == 2.0
    assert np.isnan(other[10:]).all()
    assert np.isnan(run.metric("grad_norm", rank=1)[10:]).all()
    assert not np.array_equal(run.metric("grad_norm", rank=1)[:10], run.metric("grad_norm")[:10])
    assert run.exponents(0, rank=1)[0].tolist() == [0]
    assert run.metadata["gradients"] == "replicated"
    assert run.metadata["rank"] == 0
    assert len(run.events) == 10
    assert len(run.sessions) == 1
    with pytest.raises(ampscope.AmpscopeError, match="no rank 2; it has 0, 1"):
        run.scalar("loss", rank=2)


def test_a_sharded_rank_counts_its_own_elements(tmp_path):
    """FSDP: shares are of the local part, whose size differs between ranks."""
    options = {"world_size": 2, "launch_key": "k", "gradients": "sharded"}
    big, small = [Layer("w", (96,), 96, "float32")], [Layer("w", (32,), 32, "float32")]
    for rank, layers in enumerate((big, small)):
        rows = records(1, layers)
        rows[0].layers.zeros[:] = 16
        path = write_run(tmp_path, layers, rows, rank=rank, **options)
    run = ampscope.open_run(path)
    assert run.metric("zero_ratio", rank=0)[0, 0] == np.float32(16 / 96)
    assert run.metric("zero_ratio", rank=1)[0, 0] == np.float32(16 / 32)


def test_shards_add_up_to_the_whole(tmp_path):
    """FSDP: all ranks together (`rank=None`) equal one rank that holds everything."""
    rng = np.random.default_rng(0)
    whole = [Layer("w", (12, 16), 192, "float32"), Layer("v", (4, 8), 32, "float32")]
    shapes = ([(8, 16), (4, 16)], [(1, 8), (3, 8)])
    options = {"world_size": 2, "launch_key": "k", "gradients": "sharded"}
    rows, parts = [], ([], [])
    for step in range(4):
        full = [(rng.standard_normal(x.shape) * 1e-4).astype(np.float16).astype(np.float32) for x in whole]
        full[0][:, 3] = 0
        if step == 2:
            full[1][0, 0], full[0][0, 0] = np.inf, np.nan
        cut = [np.split(g, [s[0][0]]) for g, s in zip(full, shapes, strict=True)]
        options_of = {"loss_scale": 4.0, "skipped": float(step == 2), "loss": 1.0, "micro_steps": 1.0}
        for out, grads in ((rows, full), (parts[0], [c[0] for c in cut]), (parts[1], [c[1] for c in cut])):
            record = StepRecord(step, 0.0, dict(options_of), layers=stats_of(grads), keep_exponents=step % 2 == 0)
            record.weight_norm = np.array([np.sqrt(g.size) for g in grads])
            out.append(record)
    one = ampscope.open_run(write_run(tmp_path, whole, rows, name="one"))
    for rank in (0, 1):
        local = [Layer(x.name, s[rank], int(np.prod(s[rank])), "float32") for x, s in zip(whole, shapes, strict=True)]
        path = write_run(tmp_path, local, parts[rank], name="two", rank=rank, **options)
    two = ampscope.open_run(path)
    for name in set(one.metrics) - {"underflow_ratio", "underflow_ratio_low", "underflow_ratio_high"}:
        if name != "underflow_ratio_unscaled":  # the free estimate sees rows and columns, which do not add up
            np.testing.assert_allclose(two.metric(name, rank=None), one.metric(name), rtol=1e-6, err_msg=name)
    for name in ("grad_norm", "headroom_bits", "zero_ratio", "nonfinite_layers", "skipped", "loss_scale", "loss"):
        np.testing.assert_allclose(two.scalar(name, rank=None), one.scalar(name), rtol=1e-12, err_msg=name)
    assert (two.metric("underflow_ratio_low", rank=None) <= two.metric("underflow_ratio_high", rank=None)).all()
    for layer in ("w", "v"):
        for a, b in zip(two.exponents(layer, rank=None), one.exponents(layer), strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(two.exact_powers(layer, rank=None)[1], one.exact_powers(layer)[1])
    np.testing.assert_array_equal(two.histograms(slice(None), rank=None), one.histograms(slice(None)))
    assert two.histogram_rows(rank=None).tolist() == [0, 2]
    assert not np.allclose(two.metric("grad_norm"), one.metric("grad_norm"))


def test_replicated_ranks_are_never_added_up(tmp_path):
    """DDP: all together is what any rank says."""
    options = {"world_size": 2, "launch_key": "k", "gradients": "replicated"}
    for rank in (0, 1):
        path = write_run(tmp_path, LAYERS, records(3, LAYERS), rank=rank, **options)
    run = ampscope.open_run(path)
    np.testing.assert_array_equal(run.metric("grad_norm", rank=None), run.metric("grad_norm"))
    np.testing.assert_array_equal(run.scalar("grad_norm", rank=None), run.scalar("grad_norm"))
    np.testing.assert_array_equal(run.exponents(0, rank=None)[1], run.exponents(0)[1])


def test_a_run_of_which_only_rank_1_is_left_opens(tmp_path):
    """Rank 0 means the lowest there is."""
    path = write_run(tmp_path, LAYERS, records(3, LAYERS), rank=1, world_size=2, launch_key="k")
    run = ampscope.open_run(path)
    assert np.isfinite(run.scalar("loss")).all()
    assert np.isfinite(run.metric("grad_norm")).all()


class Writer:
    """A sink written row by row."""

    def __init__(self, folder, **header):
        folder.mkdir(exist_ok=True)
        self.sink = ArrowSink(folder, Header(LAYERS, **header))
        self.sink.rows.big = 10
        self.sink.flush()
        self.numel = np.array([64, 64])
        self.count = 0

    def write(self, rows):
        for row in rows:
            self.sink.write(encode(row, self.count, LAYERS, self.numel))
            self.count += 1
        self.sink.flush()


def test_refresh_follows_a_growing_run(tmp_path):
    """After every flush: what a fresh reader sees, through tails, big batches and the end."""
    writer = Writer(tmp_path / "r")
    run = ampscope.open_run(tmp_path / "r")
    assert run.refresh() is False
    rows = records(64, LAYERS, exponents_every=3, skip=[20])
    sizes = (1, 1, 3, 5, 1, 9, 10, 11, 1, 22)
    at = 0
    for size in sizes:
        writer.write(rows[at : at + size])
        at += size
        assert run.refresh() is True
        assert run.refresh() is False
        fresh = ampscope.open_run(tmp_path / "r")
        assert run.steps.tolist() == fresh.steps.tolist() == list(range(at))
        for name in ("grad_norm", "zero_ratio", "weight_norm"):
            np.testing.assert_array_equal(run.metric(name), fresh.metric(name))
        np.testing.assert_array_equal(run.exponents(0)[1], fresh.exponents(0)[1])
        assert run.events == fresh.events
    writer.sink.close()
    assert run.refresh() is True
    assert run.finished
    assert run.steps.tolist() == list(range(64))
    assert run.refresh() is False


def test_refresh_reads_only_what_was_appended(tmp_path, monkeypatch):
    """Not the megabytes before it."""
    import ampscope.log.streams as streams

    writer = Writer(tmp_path / "r")
    writer.write(records(200, LAYERS))
    run = ampscope.open_run(tmp_path / "r")
    read = []
    real = streams._read_into

    def counting(file, at, view):
        read.append(len(view))
        real(file, at, view)

    monkeypatch.setattr(streams, "_read_into", counting)
    writer.write(records(1, LAYERS, first=200))
    assert run.refresh()
    assert sum(read) < 40_000
    assert sum(read) < os.path.getsize(tmp_path / "r" / "ampscope-0-rank0.arrows") / 5


def test_a_tail_that_got_the_number_of_an_older_file_is_read_anew(tmp_path, monkeypatch):
    """An inode is free once a file is gone: the next but one tail may have the same number, and be longer."""
    import ampscope.log.streams as streams

    monkeypatch.setattr(streams, "_identity", lambda stat: (7, 7))
    writer = Writer(tmp_path / "r")
    run = ampscope.open_run(tmp_path / "r")
    rows = records(120, LAYERS)
    at = 0
    for size in (3, 9, 1, 8, 11, 20, 7, 13, 5, 43):
        writer.write(rows[at : at + size])
        at += size
        assert run.refresh()
        assert run.steps.tolist() == list(range(at))
        assert not run.damage


def test_refresh_finds_new_sessions_ranks_and_parts(tmp_path):
    """A resumed run grows in the open dashboard."""
    path = write_run(tmp_path, LAYERS, records(5, LAYERS))
    run = ampscope.open_run(path)
    write_run(tmp_path, LAYERS, records(5, LAYERS, first=3), step=3)
    assert run.refresh()
    assert run.steps.tolist() == list(range(8))
    assert len(run.sessions) == 2
    assert not run.refresh()


def test_a_log_removed_under_the_reader_keeps_what_was_read_of_scalars(tmp_path):
    """And a folder made again is read again."""
    path = write_run(tmp_path, LAYERS, records(5, LAYERS))
    run = ampscope.open_run(path)
    shutil.rmtree(path)
    run.refresh()
    assert run.last_seen == 0
    write_run(tmp_path, LAYERS, records(3, LAYERS))
    run.refresh()
    assert run.steps.tolist() == [0, 1, 2]


def test_lazy_runs_read_rows_when_asked(tmp_path, monkeypatch):
    """`find_runs` over many long runs reads headers only."""
    import ampscope.log.streams as streams

    for name in "abc":
        write_run(tmp_path, LAYERS, records(50, LAYERS), name=name)
    with monkeypatch.context() as patch:
        patch.setattr(streams.Stream, "read_new", lambda *a: pytest.fail("rows were read"))
        found = ampscope.find_runs(tmp_path)
        assert {r.name for r in found} == {"a", "b", "c"}
        assert all(r.metadata["version"] == 1 for r in found)
    assert found[0].refresh() is False
    assert len(found[0].steps) == 50
    write_run(tmp_path, LAYERS, records(5, LAYERS, first=50), name=found[1].name)
    assert found[1].refresh() is True
    assert len(found[1].steps) == 55
