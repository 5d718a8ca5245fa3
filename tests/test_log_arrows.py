"""The Arrow sink: batches, tail, size, checksums, full disks."""

import errno
import io
import os
import zlib

import numpy as np
import pyarrow as pa
import pytest

import ampscope
from ampscope.log import frames
from ampscope.log.arrows import TAIL_BATCHES, ArrowSink
from ampscope.log.encode import begin, complete, encode, encode_events, trim
from ampscope.log.files import AppendFile
from ampscope.log.schema import Header
from ampscope.log.streams import Stream
from ampscope.record import derive, underflow
from ampscope.record.step import BINS, MEASURED, Event, Layer, LayerStats, NarrowStats, StepRecord
from tests.helpers_log import make_layers, records, write_run


def batches(path):
    """Return the rows of each batch of a file, read by pyarrow alone."""
    with pa.ipc.open_stream(path.read_bytes()) as reader:
        return [b.num_rows for b in reader]


def wide(exponents, exact):
    """Return statistics that have these histograms."""
    stats = LayerStats.empty(len(exponents))
    stats.exponents, stats.exact = exponents, exact
    return stats


def plain_rows(n, layers=(), first=0):
    """Return n rows without layer statistics."""
    numel = np.zeros(len(layers), np.int64)
    return [encode(StepRecord(i, float(i), {"loss": i}), i, layers, numel) for i in range(first, first + n)]


def test_rows_flushed_one_by_one_end_in_big_batches(tmp_path):
    """A run flushed every second opens like a dense one: thousands of rows a second apart are a handful of batches."""
    sink = ArrowSink(tmp_path, Header([]))
    counts = []
    for row in plain_rows(2500):
        sink.write(row)
        sink.flush()
        if row.row % 500 == 499:
            main, tail = tmp_path / "ampscope-0-rank0.arrows", tmp_path / "ampscope-0-rank0.tail.arrows"
            counts.append(len(batches(main)) + len(batches(tail)))
            assert ampscope.open_run(tmp_path).steps.tolist() == list(range(row.row + 1))
    assert max(counts) <= 3 + 1 + TAIL_BATCHES + 1
    sink.close()
    assert batches(tmp_path / "ampscope-0-rank0.arrows") == [0, 1000, 1000, 500]
    assert not (tmp_path / "ampscope-0-rank0.tail.arrows").exists()


def test_a_row_in_both_files_counts_once(tmp_path):
    """Between the big batch and the new tail the old tail holds rows that the main file has as well."""
    sink = ArrowSink(tmp_path, Header([]))
    sink.rows.big = 10
    for row in plain_rows(9):
        sink.write(row)
        sink.flush()
    tail = tmp_path / "ampscope-0-rank0.tail.arrows"
    old = tail.read_bytes()
    sink.write(plain_rows(1, first=9)[0])
    sink.flush()
    tail.write_bytes(old)
    assert ampscope.open_run(tmp_path).steps.tolist() == list(range(10))


def test_polars_and_duckdb_could_read_it_with_pyarrow_alone(tmp_path):
    """No ampscope needed: column names, types and values are plain Arrow."""
    layers = make_layers(4, 64)
    path = write_run(tmp_path, layers, records(30, layers))
    with pa.ipc.open_stream((path / "ampscope-0-rank0.arrows").read_bytes()) as reader:
        table = reader.read_all()
    assert table["step"].to_pylist() == list(range(30))
    assert table["zeros"].type == pa.list_(pa.int32(), 4)
    run = ampscope.open_run(path)
    norms = np.sqrt(np.array(table["sum_squares"].to_pylist())) / np.array(table["loss_scale"])[:, None]
    np.testing.assert_allclose(run.metric("grad_norm"), norms, rtol=1e-6)


def test_counts_of_huge_layers_are_64_bit(tmp_path):
    """A layer of 2^31 elements or more needs int64, and gets it."""
    layers = [Layer("huge", (1 << 32,), 1 << 32, "float32")]
    stats = LayerStats.empty(1)
    stats.state[0], stats.zeros[0], stats.exponents[0, 100] = MEASURED, 3_000_000_000, 1_000_000_000
    record = StepRecord(0, 0.0, {"loss_scale": 1.0}, layers=stats, keep_exponents=True)
    run = ampscope.open_run(write_run(tmp_path, layers, [record]))
    assert run.columns(("zeros",))["zeros"][0, 0] == 3_000_000_000
    assert run.exponents(0)[1][0, 100] == 1_000_000_000


def test_size_is_below_48_bytes_a_tensor_and_step(tmp_path):
    """32 tensors, noisy FP16 gradients, dead units, histograms every 10 steps, scalars, observed values: all included."""
    rng = np.random.default_rng(0)
    n_layers, n = 32, 300
    layers = make_layers(n_layers, 1 << 18)
    width = 2.0 ** rng.uniform(-18, -4, n_layers)

    def record(step):
        stats = LayerStats.empty(n_layers)
        stats.state[:] = MEASURED
        k = np.arange(-24, 10)
        for i, s in enumerate(width * (1 + 0.3 * np.sin(step / 50))):
            density = np.exp(-0.5 * (2.0**k / s) ** 2) * 2.0**k / s
            counts = rng.multinomial(200_000, density / density.sum())
            stats.exponents[i, k + 127] = counts
            stats.exact[i, k + 127] = rng.binomial(counts, np.minimum(1.0, 2.0 ** -np.clip(k + 24, 0, 10)))
            stats.zeros[i] = rng.integers(60_000) if i % 3 == 0 else rng.integers(20)
            stats.max_abs[i] = np.float16(s * rng.uniform(4, 6))
            stats.sum_squares[i] = s * s * 2e5 * rng.uniform(0.98, 1.02)
            stats.low_bits[i] = 0x7FE000
            stats.zero_rows[i] = rng.integers(80, 90) if i % 3 == 0 else 0
        scalars = dict.fromkeys(("loss", "step_seconds", "overhead_seconds"), 0.0)
        scalars = {k: rng.random() for k in scalars} | {"loss_scale": 65536.0, "skipped": 0.0, "growth_tracker": step}
        observed = {"skipped/Adam.0": 0.0, "unscale_calls": 1.0}
        norm = rng.random(n_layers) if step % 10 == 0 else None
        return StepRecord(step, step * 0.1, scalars, {}, observed, stats, step % 10 == 0, norm)

    path = write_run(tmp_path, layers, map(record, range(n)), batch=100)
    size = (path / "ampscope-0-rank0.arrows").stat().st_size
    assert 20 < size / n / n_layers < 48
    assert ampscope.open_run(path).exponents(5)[1].sum() == 30 * 200_000


def test_memory_stays_flat_however_long_the_run(tmp_path):
    """Rows leave the buffer with each big batch."""
    sink = ArrowSink(tmp_path, Header([]))
    for row in plain_rows(2500):
        sink.write(row)
        if row.row % 100 == 0:
            sink.flush()
        assert len(sink.rows) <= 1100
    assert sink.rows.capacity <= 10_000


def test_many_layers_make_smaller_batches(tmp_path):
    """5,000 layers: a batch of 1,000 rows would be 290 MB."""
    sink = ArrowSink(tmp_path, Header(make_layers(5000)))
    assert sink.rows.big * 5000 * 58 <= 16 << 20
    assert sink.rows.capacity * 5000 * 58 <= 64 << 20


def test_the_checksums_cover_every_byte_of_a_message(tmp_path):
    """Flip each byte of a message in turn: metadata or a column says so."""
    sink = ArrowSink(tmp_path, Header(make_layers(2, 64)))
    sink.flush()
    stream = Stream(tmp_path / "ampscope-0-rank0.arrows")
    stream.read_new()
    layers = make_layers(2, 64)
    rows = [encode(r, i, layers, np.array([64, 64])) for i, r in enumerate(records(3, layers))]
    for row in rows:
        sink.write(row)
    good = sink.message(sink.rows.chunk(0, 3))
    frame = frames.next_frame(io.BytesIO(good), 0, len(good))
    spans = frames.spans(frame, sink.buffers)
    assert spans[0][0] == 0
    assert [a for a, _ in spans[1:]] == [b for _, b in spans[:-1]]
    assert spans[-1][1] == frame.body
    assert [zlib.crc32(good[frame.head + a : frame.head + b]) for a, b in spans] == frame.crcs.tolist()
    for at in range(frame.head):
        bad = bytearray(good)
        bad[at] ^= 0x10
        try:
            found = frames.next_frame(io.BytesIO(bad), 0, len(bad))
        except ValueError:
            continue
        assert found is None, at


class FullDisk(io.RawIOBase):
    """A file on a disk that has room for so many bytes more."""

    def __init__(self, room):
        self.data, self.room = io.BytesIO(), room

    def write(self, data):
        n = min(len(data), self.room)
        if n == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= n
        return self.data.write(bytes(data[:n]))

    def seek(self, at, whence=0):
        return self.data.seek(at, whence)

    def truncate(self, size=None):
        return self.data.truncate(size)


def test_half_a_message_on_a_full_disk_is_cut_off_before_the_next(tmp_path):
    """The file never holds a torn message in its middle."""
    file = AppendFile(tmp_path / "f", b"begin")
    file.ensure()
    full = FullDisk(7)
    full.data.write(b"begin")
    file._file = full
    file.in_place = lambda: True
    file.append(b"12345")
    with pytest.raises(OSError, match="No space"):
        file.append(b"67890")
    assert full.data.getvalue() == b"begin12345"
    full.room = 100
    file.append(b"abcde")
    assert full.data.getvalue() == b"begin12345abcde"


def test_a_removed_file_is_begun_anew(tmp_path):
    """And a folder that is gone is made again."""
    file = AppendFile(tmp_path / "d" / "f", b"begin;")
    file.append(b"one;")
    os.remove(tmp_path / "d" / "f")
    os.rmdir(tmp_path / "d")
    assert not file.in_place()
    file.append(b"two;")
    assert (tmp_path / "d" / "f").read_bytes() == b"begin;two;"
    os.rename(tmp_path / "d" / "f", tmp_path / "d" / "g")
    file.append(b"three;")
    assert (tmp_path / "d" / "f").read_bytes() == b"begin;three;"


def test_trim_keeps_what_is_between_the_outermost_bins():
    """Against a loop, over random and empty histograms."""
    rng = np.random.default_rng(1)
    exponents = rng.integers(0, 3, (20, BINS)) * (rng.random((20, BINS)) < 0.02)
    exponents[3] = 0
    exact = exponents // 2
    layers, first, length, counts, exacts = trim(wide(exponents, exact).bins())
    at = 0
    for i, f, n in zip(layers, first, length, strict=True):
        full = np.zeros(BINS, np.int64)
        full[f : f + n] = counts[at : at + n]
        assert (full == exponents[i]).all()
        assert exponents[i, f] > 0
        assert exponents[i, f + n - 1] > 0
        assert (exacts[at : at + n] == exact[i, f : f + n]).all()
        at += n
    assert at == len(counts)
    assert set(range(20)) - set(layers.tolist()) == set(np.flatnonzero(exponents.sum(-1) == 0).tolist())
    assert [len(x) for x in trim(LayerStats.empty(4).bins())] == [0] * 5


def test_events_without_a_step_make_no_step(tmp_path):
    """A row of events alone: in `events`, not in `steps`."""
    sink = ArrowSink(tmp_path, Header([]))
    for row in plain_rows(2):
        sink.write(row)
    sink.write(encode_events([Event(2, "note", message="raised before update()")], 2, 0.0))
    sink.flush()
    run = ampscope.open_run(tmp_path)
    assert run.steps.tolist() == [0, 1]
    assert run.events[-1].message == "raised before update()"
    sink.close()
    assert run.refresh()
    assert run.steps.tolist() == [0, 1]
    assert len(run.events) == 1


def test_compact_columns_are_sums_over_the_histogram():
    """Each count against the sum it stands for, at scales that put the limit outside the used bins too; empty layers included."""
    rng = np.random.default_rng(0)
    stats = LayerStats.empty(7)
    for i, (low, high) in enumerate(
        [(0, 256), (80, 140), (126, 127), (0, 3), (200, 255), (100, 104)]
    ):  # the last has none
        stats.exponents[i, low:high] = rng.integers(0, 9, high - low)
        stats.exact[i] = rng.integers(0, stats.exponents[i] + 1)
    for chosen in (np.arange(7), np.array([1, 5]), np.array([6]), np.array([], np.int64)):
        part = LayerStats(**{n: getattr(stats, n)[chosen] for n in LayerStats.__dataclass_fields__})
        e, exact = part.exponents, part.exact
        for scale in (2.0**-120, 0.3, 1.0, 3.0, 2.0**16, 2.0**127, np.inf, np.nan, 0.0, -1.0):
            columns = derive.compact(part, scale)
            narrow = NarrowStats(
                part.bins(), {n: getattr(part, n) for n in LayerStats.__dataclass_fields__ if n[:2] != "ex"}
            )
            assert np.array_equal(narrow.exponents, e)
            assert np.array_equal(narrow.exact, exact)
            assert columns["subnormal"].tolist() == [int(x[: 127 - 14].sum()) for x in e]
            assert columns["low_octave"].tolist() == [int(x[127 - 14]) for x in e]
            assert columns["lowest"].tolist() == [int(x[: 127 - 23].sum()) for x in e]
            assert columns["below_grid"].tolist() == [int(x[: 127 - 24].sum()) for x in e]
            valid = 0 < scale < np.inf
            edge = min(127 - 25 + int(np.floor(np.log2(scale))), 254) if valid else 0
            flushed = [int(x[:edge].sum() + y[edge]) if edge > 0 else 0 for x, y in zip(e, exact, strict=True)]
            assert columns["below_unscaled"].tolist() == flushed
            for x, median in zip(e, columns["median_bin"], strict=True):
                values = np.repeat(np.arange(256), x)
                assert median == (values[(len(values) - 1) // 2] if len(values) else 0)


def test_rows_completed_together_are_as_if_completed_alone():
    """The estimate and the totals of many rows at once, among them rows without statistics."""
    layers = make_layers(3, 64)
    numel = np.array([64] * 3)
    rows = [begin(r, i, 3) for i, r in enumerate(records(6, layers))]
    rows.insert(2, begin(StepRecord(9, 9.0, {"loss": 1.0}), 6, 3))
    alone = [begin(r, i, 3) for i, r in enumerate(records(6, layers))]
    context = underflow.Context.of(layers)
    complete(rows, numel, context)
    for row in alone:
        complete([row], numel, context)
    del rows[2]
    for a, b in zip(rows, alone, strict=True):
        assert a.scalars == b.scalars
        assert np.array_equal(a.flushed, b.flushed)
        assert np.isfinite(a.scalars["grad_norm"])
