"""TensorBoard: the tags, NaN and inf, sessions, the user's own writer, and a real server."""

import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as reference

import ampscope
from ampscope.log.crc32c import crc32c
from ampscope.log.encode import encode
from ampscope.log.journal import Journal
from ampscope.log.schema import Header
from ampscope.log.tensorboard import KEEP_BYTES, LAYER_TAGS, TAGS, EventFile, TensorBoardSink, group, make_sink
from ampscope.record.step import LayerStats, StepRecord
from tests.helpers_log import START, make_layers, records, write_run

LAYERS = make_layers(3, 64)


def load(path):
    """Return TensorBoard's own reading of a folder, every event kept."""
    return EventAccumulator(str(path), size_guidance={SCALARS: 0}).Reload()


def values(events, tag):
    """Return (steps, values) of a tag."""
    found = events.Scalars(tag)
    return [e.step for e in found], [e.value for e in found]


def test_every_tag_of_the_design_is_there_and_equals_the_log(tmp_path):
    """Run-wide tags at every step, layer tags every 10th, with slashes for dots."""
    path = write_run(tmp_path, LAYERS, records(25, LAYERS, skip=[3]), tensorboard=True)
    run, events = ampscope.open_run(path), load(path)
    tags = set(events.Tags()["scalars"])
    names = [x.name.replace(".", "/") for x in LAYERS]
    assert tags == {f"amp/{t}" for t in TAGS} | {f"{m}/{n}" for m in LAYER_TAGS for n in names}
    for tag in TAGS:
        steps, found = values(events, f"amp/{tag}")
        assert steps == list(range(25))
        want = np.cumsum(run.scalar("skipped")) if tag == "skipped_total" else run.scalar(tag)
        np.testing.assert_array_equal(np.float32(found), want.astype(np.float32))
    for metric in LAYER_TAGS:
        for i, name in enumerate(names):
            steps, found = values(events, f"{metric}/{name}")
            assert steps == [0, 10, 20]
            np.testing.assert_allclose(found, run.metric(metric)[[0, 10, 20], i], rtol=1e-6)


def test_it_is_one_event_a_step_and_imports_neither_torch_nor_tensorflow(tmp_path):
    """A fresh process loads the sink."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    path = write_run(tmp_path, LAYERS, records(12, LAYERS), tensorboard=True)
    file = next(p for p in path.iterdir() if "tfevents" in p.name)
    events = [e for e in EventFileLoader(str(file)).Load() if e.HasField("summary")]
    assert [e.step for e in events] == list(range(12))
    code = "import sys, ampscope.log.writer; print([m for m in ('torch', 'tensorflow') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_inf_and_nan_arrive_intact(tmp_path):
    """An infinite loss, a NaN layer, a step without headroom."""
    rows = records(11, LAYERS, nan={10: 1})
    rows[2].scalars["loss"] = math.inf
    rows[3].scalars["loss"] = -math.inf
    rows[4].scalars["loss"] = math.nan
    events = load(write_run(tmp_path, LAYERS, rows, tensorboard=True))
    loss = values(events, "amp/loss")[1]
    assert loss[2:4] == [math.inf, -math.inf]
    assert math.isnan(loss[4])
    assert math.isnan(values(events, "grad_max/block/0/bias")[1][1])
    assert values(events, "amp/nonfinite_layers")[1][10] == 1


def test_a_number_that_was_not_taken_is_a_gap(tmp_path):
    """Not a NaN, which TensorBoard draws as a fault."""
    events = load(write_run(tmp_path, LAYERS, records(31, LAYERS, every=3), tensorboard=True))
    assert values(events, "amp/loss_scale")[0] == list(range(31))
    assert values(events, "amp/grad_norm")[0] == list(range(0, 31, 3))
    assert values(events, "grad_norm/block/0/bias")[0] == [0, 12, 21, 30]
    bare = [StepRecord(0, START, {"loss_scale": 1.0})]
    events = load(write_run(tmp_path, LAYERS, bare, name="bare", tensorboard=True))
    assert set(events.Tags()["scalars"]) == {"amp/loss_scale", "amp/skipped_total"}


def test_steps_of_a_resumed_run_do_not_show_twice(tmp_path):
    """The second session starts at step 6 of 10: TensorBoard drops the first session's steps from there on."""
    path = write_run(tmp_path, LAYERS, records(10, LAYERS, skip=[2, 8], loss=1.0), tensorboard=True)
    write_run(tmp_path, LAYERS, records(8, LAYERS, first=6, skip=[9], loss=5.0), step=6, tensorboard=True)
    events = load(path)
    steps, loss = values(events, "amp/loss")
    assert steps == list(range(14))
    np.testing.assert_allclose(loss, ampscope.open_run(path).scalar("loss"), rtol=1e-6)
    assert values(events, "amp/skipped_total")[1] == [0, 0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]
    plexer = EventMultiplexer(tensor_size_guidance={"scalars": 0}).AddRun(str(path), "r").Reload()
    assert [e.step for e in plexer.Tensors("r", "amp/loss")] == list(range(14))


def test_sessions_started_in_one_second_are_read_in_their_order(tmp_path):
    """TensorBoard goes by file names; the clock may stand still or go back."""
    for session, now in enumerate((START, START, START - 100)):
        EventFile(tmp_path, Header(LAYERS, session=session), now).flush()
    names = sorted(os.listdir(tmp_path))
    assert [n.split(".")[-2] for n in names] == ["0", "1", "2"]


def test_only_rank_0_writes_unless_the_writer_is_the_users(tmp_path):
    """Other ranks' curves would lie on top of each other."""
    assert make_sink(True, tmp_path, Header(LAYERS, rank=1), START) is None
    assert make_sink(False, tmp_path, Header(LAYERS), START) is None
    assert make_sink(object(), tmp_path, Header(LAYERS, rank=1), START) is not None
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("with_file_writer", [True, False])
def test_a_users_summary_writer_is_used_and_not_closed(tmp_path, with_file_writer):
    """torch's SummaryWriter takes whole events; one that only knows add_scalar takes one a tag."""
    from torch.utils.tensorboard import SummaryWriter

    class Plain:
        def __init__(self, inner):
            self.add_scalar, self.flush = inner.add_scalar, inner.flush

    with SummaryWriter(tmp_path / "mine") as writer:
        writer.add_scalar("own", 1.0, 0)
        board = writer if with_file_writer else Plain(writer)
        path = write_run(tmp_path, LAYERS, records(12, LAYERS), tensorboard=board)
        writer.add_scalar("own", 2.0, 1)
        writer.flush()
        events = load(tmp_path / "mine")
    assert values(events, "own") == ([0, 1], [1.0, 2.0])
    assert values(events, "amp/loss_scale") == (list(range(12)), [65536.0] * 12)
    assert values(events, "grad_norm/block/0/weight")[0] == [0, 10]
    assert not [p for p in path.iterdir() if "tfevents" in p.name]


def test_torchs_writer_closed_early_loses_nothing(tmp_path):
    """The user closes it before `unwatch`: it opens itself again, as for the user's own later calls."""
    from torch.utils.tensorboard import SummaryWriter

    (tmp_path / "r").mkdir()
    writer = SummaryWriter(tmp_path / "mine")
    book = Journal(tmp_path / "r", Header(LAYERS), writer, lambda: START)
    rows = records(6, LAYERS)
    book.record(rows[0])
    writer.close()
    for row in rows[1:]:
        book.record(row)
    book.close()
    writer.close()
    assert values(load(tmp_path / "mine"), "amp/loss")[0] == list(range(6))


def test_a_users_writer_that_fails_costs_one_warning_and_no_row(tmp_path):
    """The log goes on without it."""

    class Closed:
        def add_scalar(self, *args):
            raise OSError("Writer is closed")

        flush = add_scalar

    (tmp_path / "r").mkdir()
    book = Journal(tmp_path / "r", Header(LAYERS), Closed(), lambda: START)
    with pytest.warns(RuntimeWarning, match=r"SummaryWriter passed to watch\(\) failed at step 0.*closed") as caught:
        for row in records(6, LAYERS):
            book.record(row)
            book.flush()
    book.close()
    assert len(caught) == 1
    assert len(ampscope.open_run(tmp_path / "r").steps) == 6


def test_above_100_layers_tags_are_by_module():
    """Never more than 100 groups, each layer in exactly one."""
    few = [f"block.{i}.weight" for i in range(100)]
    assert list(group(few)) == [n.replace(".", "/") for n in few]
    many = [f"h.{i}.{part}.{kind}" for i in range(24) for part in ("attn", "mlp") for kind in ("weight", "bias")] + [
        f"embed.{k}" for k in range(10)
    ]
    modules = group(many)
    assert len(modules) == 49
    assert modules["h/3/attn"].tolist() == [12, 13]
    assert modules["embed"].tolist() == list(range(96, 106))
    deep = [f"layers.{i}.experts.{j}.w" for i in range(12) for j in range(64)]
    assert list(group(deep)) == [f"layers/{i}/experts" for i in range(12)]
    flat = [f"p{i}" for i in range(500)]
    assert len(group(flat)) == 100
    for names in (few, many, deep, flat):
        assert sorted(np.concatenate(list(group(names).values())).tolist()) == list(range(len(names)))


def test_a_group_joins_its_layers(tmp_path):
    """Norms add up as squares, shares by elements, the maximum is the greatest."""
    layers = make_layers(102, 64)
    path = write_run(tmp_path, layers, records(1, layers), tensorboard=True)
    run, events = ampscope.open_run(path), load(path)
    norm = values(events, "grad_norm/block/0")[1][0]
    assert norm == pytest.approx(float(np.hypot(*run.metric("grad_norm")[0, :2])), rel=1e-6)
    assert values(events, "grad_max/block/0")[1][0] == pytest.approx(float(run.metric("grad_max")[0, :2].max()))
    assert len(events.Tags()["scalars"]) == len(TAGS) + 3 * 51


def test_changed_layers_change_the_tags(tmp_path):
    """From a new part on."""
    sink = make_sink(True, tmp_path, Header(LAYERS[:1]), START)
    for layers, step in ((LAYERS[:1], 0), (LAYERS, 10)):
        sink.set_layers(layers)
        numel = np.array([x.numel for x in layers])
        sink.write(encode(records(1, layers, first=step)[0], 0, layers, numel))
    sink.close()
    assert values(load(tmp_path), "grad_norm/block/0/bias")[0] == [10]
    assert values(load(tmp_path), "grad_norm/block/0/weight")[0] == [0, 10]


def test_hostile_layer_names_are_only_text(tmp_path):
    """Markup and path parts in a name are a tag like any other."""
    layers = [type(LAYERS[0])("<script>..x/../etc", (4,), 4, "float32")]
    stats = LayerStats.empty(1)
    stats.state[:] = 2
    record = StepRecord(0, START, {"loss_scale": 1.0}, layers=stats)
    events = load(write_run(tmp_path, layers, [record], tensorboard=True))
    assert "grad_norm/<script>//x////etc" in events.Tags()["scalars"]


def test_a_full_disk_keeps_the_newest_events(tmp_path, monkeypatch):
    """Bounded in memory, and the file is never torn."""
    from ampscope.log.files import AppendFile

    file = EventFile(tmp_path, Header(LAYERS), START)
    sink = TensorBoardSink(file, LAYERS)
    row = encode(records(1, LAYERS)[0], 0, LAYERS, np.array([64] * 3))
    file.flush()
    with monkeypatch.context() as patch:
        patch.setattr(AppendFile, "append", lambda self, data: (_ for _ in ()).throw(OSError(28, "full")))
        for step in range(200):
            row.step = step
            sink.write(row)
            with pytest.raises(OSError, match="full"):
                sink.flush()
        monkeypatch.setattr("ampscope.log.tensorboard.KEEP_BYTES", 20_000)
        row.step = 200
        sink.write(row)
    sink.close()
    steps = values(load(tmp_path), "amp/loss")[0]
    assert steps == list(range(steps[0], 201))
    assert 20 < len(steps) < 200
    assert KEEP_BYTES > 1 << 20


@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 8, 12, 1023, 1024, 1025, 1027, 1028, 5000])
def test_crc32c_equals_tensorboards(n):
    """On blocks of every kind of length."""
    data = np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8).tobytes()
    assert crc32c(data) == reference(data)


def test_a_running_server_shows_the_tags(tmp_path):
    """`tensorboard --logdir`, asked over HTTP on the loopback: names, steps, NaN and inf."""
    rows = records(12, LAYERS)
    rows[3].scalars["loss"] = math.inf
    rows[4].scalars["loss"] = math.nan
    write_run(tmp_path, LAYERS, rows, tensorboard=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(tmp_path),
        "--port",
        str(port),
        "--load_fast=false",
    ]
    with open(tmp_path / "out", "wb") as out:
        server = subprocess.Popen([*command, "--host", "127.0.0.1"], stdout=out, stderr=out)

    def ask(path):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/plugin/scalars/{path}", timeout=5) as reply:
            return json.loads(reply.read())

    try:
        tags, deadline = {}, time.monotonic() + 60
        while not tags.get("run"):
            assert time.monotonic() < deadline, (tmp_path / "out").read_text()
            assert server.poll() is None, (tmp_path / "out").read_text()
            try:
                tags = ask("tags")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        assert {f"amp/{t}" for t in TAGS} <= set(tags["run"])
        loss = ask("scalars?" + urllib.parse.urlencode({"run": "run", "tag": "amp/loss"}))
        assert [s for _, s, _ in loss] == list(range(12))
        assert loss[3][2] == "Infinity"
        assert loss[4][2] == "NaN"
    finally:
        server.kill()
        server.wait()
