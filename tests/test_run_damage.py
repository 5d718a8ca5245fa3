"""Damaged, cut and foreign logs: never a crash, never a wrong number, always said."""

import contextlib
import io
import json
import os
import struct
import time

import numpy as np
import pyarrow as pa
import pytest

import ampscope
from ampscope.log import schema
from ampscope.log.schema import HEADER_KEY
from tests.helpers_log import make_layers, records, write_run

LAYERS = make_layers(3, 64)


def everything(run):
    """Read all that a view could ask for, by step."""
    steps = run.steps.tolist()
    out = {}
    for name in run.scalars:
        out |= {(name, s): v for s, v in zip(steps, run.scalar(name).tolist(), strict=True)}
    for name in run.metrics:
        for i, layer in enumerate(run.layers):
            out |= {(name, layer.name, s): v for s, v in zip(steps, run.metric(name)[:, i].tolist(), strict=True)}
    for layer in run.layers:
        for what in ("exponents", "exact_powers"):
            at, counts = getattr(run, what)(layer)
            out |= {(what, layer.name, s): tuple(c) for s, c in zip(at.tolist(), counts.tolist(), strict=True)}
    out["events"] = {(e.step, e.kind, e.message, e.layers) for e in run.events}
    return out


@pytest.fixture
def log(tmp_path):
    """Three batches in the main file: 30 rows each, one skip."""
    path = write_run(tmp_path, LAYERS, records(90, LAYERS, skip=[40]), batch=30)
    return path, path / "ampscope-0-rank0.arrows"


def test_a_flipped_bit_costs_its_batch_and_never_changes_a_number(log):
    """Over many files with one to eight flipped bits: what is read equals the original, what is missing is reported."""
    path, file = log
    sound = everything(ampscope.open_run(path))
    good = file.read_bytes()
    rng = np.random.default_rng(0)
    refused = noticed = 0
    for trial in range(80):
        data = bytearray(good)
        for at in rng.integers(0, len(data), 1 + trial % 8).tolist():
            data[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(data)
        try:
            run = ampscope.open_run(path)
        except ampscope.LogError:
            refused += 1
            continue
        got = everything(run)
        events = got.pop("events")
        assert events <= sound["events"]
        for key, value in got.items():
            assert value == sound[key] or value != value, (trial, key)
        noticed += bool(run.damage)
        if len(run.steps) < 90 or run.metric("grad_max").shape[1] != 3 or not run.sampled.all():
            assert run.damage
    assert noticed > 50
    assert refused < 20


def test_a_damaged_header_is_read_from_its_copy(log):
    """One bit of a layer's name in the schema: the name does not change, and the damage is told."""
    path, file = log
    data = bytearray(file.read_bytes())
    data[data.index(b"block.0.weight")] ^= 1
    file.write_bytes(data)
    run = ampscope.open_run(path)
    assert run.layers[0].name == "block.0.weight"
    assert len(run.steps) == 90
    assert "header" in run.damage[0]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 0.9, 0.999])
def test_a_cut_file_opens_with_what_is_whole(log, share):
    """Cut anywhere: the batches before the cut are there."""
    path, file = log
    good = file.read_bytes()
    file.write_bytes(good[: int(len(good) * share)])
    run = ampscope.open_run(path)
    assert len(run.steps) in (0, 30, 60, 90)
    assert not run.finished
    everything(run)


def test_a_file_truncated_while_it_is_open_is_no_crash(log):
    """The batches' places are known, then the file shrinks: their layers count as not sampled."""
    path, file = log
    run = ampscope.open_run(path)
    with open(file, "r+b") as f:
        f.truncate(len(file.read_bytes()) // 2)
    assert not run.sampled.all()
    assert np.isnan(run.metric("grad_norm")).any()
    assert run.damage
    file.unlink()
    assert not run.sampled.any()
    assert run.last_seen == 0
    run.refresh()


def test_a_writer_killed_in_the_middle_of_a_batch_leaves_what_was_before(log):
    """Half a message at the end is no damage: it may still be on its way."""
    path, file = log
    good = file.read_bytes()
    cut = len(good) - 100
    file.write_bytes(good[:cut])
    run = ampscope.open_run(path)
    assert len(run.steps) == 60
    assert not run.damage
    file.write_bytes(good)
    assert run.refresh()
    assert len(run.steps) == 90
    assert run.finished


def test_zeros_at_the_end_are_reported(log):
    """What a lost power supply leaves on some file systems."""
    path, file = log
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    run = ampscope.open_run(path)
    assert len(run.steps) in (30, 60)
    assert run.damage


def test_a_newer_version_is_refused_in_one_clear_line(log, monkeypatch):
    """The message says which versions, and what to do; find_runs leaves the run out."""
    path, _ = log
    monkeypatch.setattr(schema, "FORMAT_VERSION", 0)
    with pytest.raises(ampscope.LogError, match="format 1.*up to 0.*upgrade ampscope"):
        ampscope.open_run(path)
    errors: list[str] = []
    assert ampscope.find_runs(path.parent, errors=errors) == []
    assert "upgrade" in errors[0]


def test_an_older_log_that_lacks_columns_is_read(log):
    """Scalars and layer columns that did not exist then are NaN or not sampled; the rest is there."""
    path, file = log
    old = io.BytesIO()
    run = ampscope.open_run(path)
    loss, norm = run.scalar("loss"), run.metric("grad_norm")
    _rewrite(file, drop=("zero_ratio", "zero_rows", "zero_cols", "has_histograms", "observed"), out=old)
    file.write_bytes(old.getvalue())
    run = ampscope.open_run(path)
    assert not run.damage
    np.testing.assert_array_equal(run.scalar("loss"), loss)
    np.testing.assert_array_equal(run.metric("grad_norm"), norm)
    assert np.isnan(run.scalar("zero_ratio")).all()
    assert run.exponents(0)[1].shape == (0, 256)


def _rewrite(file, drop, out):
    """Write a log again with columns left out, as version 0."""
    from ampscope.log import arrows
    from ampscope.log.schema import CHECK_KEY, _check, buffers_a_column

    with pa.ipc.open_stream(file.read_bytes()) as reader:
        batches = list(reader)
    plain = batches[0].schema
    keep = [n for n in plain.names if n not in drop]
    fields = pa.schema([plain.field(n) for n in keep])
    header = json.loads(plain.metadata[HEADER_KEY])
    raw = json.dumps(header | {"version": 0}).encode()
    old = fields.with_metadata({HEADER_KEY: raw, CHECK_KEY: _check(raw, fields)})
    out.write(bytes(old.serialize()))
    for batch in batches:
        part = pa.RecordBatch.from_arrays([batch.column(n) for n in keep], schema=old)
        out.write(arrows.message(part, buffers_a_column(old)))


@pytest.mark.parametrize("content", [b"", b"x", b"hello world, this is no log", b"\xff\xff\xff\xff", b"\0" * 4096])
def test_a_file_that_is_no_log_is_refused_or_empty(tmp_path, content):
    """Never a stack trace of pyarrow's."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "ampscope-0-rank0.arrows").write_bytes(content)
    with contextlib.suppress(ampscope.LogError):
        run = ampscope.open_run(tmp_path / "r")
        assert len(run.steps) == 0
        assert run.layers == []
        assert run.metadata == {}


def test_another_arrow_stream_is_refused(tmp_path):
    """A stream of somebody else's with the right file name."""
    (tmp_path / "r").mkdir()
    table = pa.table({"a": [1, 2]})
    with pa.ipc.new_stream(tmp_path / "r" / "ampscope-0-rank0.arrows", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ampscope.LogError, match="not an ampscope log"):
        ampscope.open_run(tmp_path / "r")


def test_one_damaged_session_does_not_hide_the_other(tmp_path):
    """The sound session opens, and the other is in `damage`."""
    path = write_run(tmp_path, LAYERS, records(5, LAYERS))
    write_run(tmp_path, LAYERS, records(5, LAYERS, first=5))
    (path / "ampscope-0-rank0.arrows").write_bytes(b"garbage" * 100)
    run = ampscope.open_run(path)
    assert run.steps.tolist() == [5, 6, 7, 8, 9]
    assert "not an ampscope log" in run.damage[0]


def test_a_damaged_length_does_not_hide_what_follows(log):
    """The length of the second batch says more than the file holds."""
    path, file = log
    data = bytearray(file.read_bytes())
    starts = [i for i in range(0, len(data), 8) if data[i : i + 4] == b"\xff\xff\xff\xff"]
    second = starts[3]  # schema, empty batch, first, second
    struct.pack_into("<i", data, second + 4, 1 << 20)
    file.write_bytes(data)
    run = ampscope.open_run(path)
    assert run.steps.tolist() == [*range(30), *range(60, 90)]
    assert run.damage


def test_a_copy_that_was_cut_says_so_once_nobody_writes_it(tmp_path):
    """Its rows stand nowhere else; while a writer lives, the end of a file is a batch on its way. An empty file is said too."""
    layers = make_layers(2)
    write_run(tmp_path, layers, records(60, layers), name="run")
    main = next((tmp_path / "run").glob("ampscope-*.arrows"))
    main.write_bytes(main.read_bytes()[: main.stat().st_size * 3 // 5])
    assert ampscope.open_run(tmp_path / "run").damage == []
    os.utime(main, (time.time() - 3600,) * 2)
    run = ampscope.open_run(tmp_path / "run")
    assert len(run.steps) == 0
    assert len(run.damage) == 1
    assert "ends inside a batch" in run.damage[0]
    main.write_bytes(b"")
    os.utime(main, (time.time() - 3600,) * 2)
    assert [line.partition(" is ")[2] for line in ampscope.open_run(tmp_path / "run").damage] == ["empty"]
