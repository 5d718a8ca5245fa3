"""The journal: what happens to records when disks fill up, folders vanish, layers change. No thread, no sleep."""

import errno
import shutil
import warnings

import numpy as np
import pytest

import ampscope
from ampscope.log import arrows, journal
from ampscope.log.files import AppendFile
from ampscope.log.journal import Journal
from ampscope.log.schema import Header
from ampscope.record.step import Event, Layer
from tests.helpers_log import FakeClock, make_layers, records

LAYERS = make_layers(2, 64)


@pytest.fixture
def disk(monkeypatch):
    """A disk that can be full: set `disk.full`."""

    class Disk:
        full = False

    real = AppendFile.append, AppendFile.renew

    def guard(call):
        def method(self, data):
            if Disk.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(self, data)

        return method

    monkeypatch.setattr(AppendFile, "append", guard(real[0]))
    monkeypatch.setattr(AppendFile, "renew", guard(real[1]))
    return Disk


def make(tmp_path, **header):
    """Return a journal in `tmp_path / "r"`."""
    (tmp_path / "r").mkdir(exist_ok=True)
    return Journal(tmp_path / "r", Header(LAYERS, **header), False, FakeClock())


def test_a_full_disk_warns_once_and_loses_nothing_that_fits_in_memory(tmp_path, disk):
    """Written again as soon as there is room: every record is there, and no note of a loss."""
    book = make(tmp_path)
    rows = records(30, LAYERS)
    for record in rows[:10]:
        book.record(record)
    book.flush()
    disk.full = True
    with pytest.warns(RuntimeWarning, match="No space left.*keeps the newest.*Training goes on") as caught:
        for record in rows[10:20]:
            book.record(record)
            book.flush()
    assert len(caught) == 1
    assert book.pending
    disk.full = False
    for record in rows[20:]:
        book.record(record)
    book.close()
    run = ampscope.open_run(tmp_path / "r")
    assert run.steps.tolist() == list(range(30))
    assert run.finished
    assert not run.events


def test_what_did_not_fit_is_named_in_the_log(tmp_path, disk):
    """The newest records are kept; a note says how many are gone, which steps, and why."""
    book = make(tmp_path)
    book._sink.rows.capacity = 16
    book._sink.rows.big = 8
    rows = records(60, LAYERS)
    for record in rows[:4]:
        book.record(record)
    book.flush()
    disk.full = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for record in rows[4:50]:
            book.record(record)
            book.flush()
    disk.full = False
    for record in rows[50:]:
        book.record(record)
    book.flush()
    run = ampscope.open_run(tmp_path / "r")
    kept = run.steps.tolist()
    assert kept[-10:] == list(range(50, 60))
    assert kept == list(range(60 - len(kept), 60))
    note = next(e for e in run.events if e.data.get("topic") == "lost")
    gone = sorted(set(range(60)) - set(kept))
    assert note.data["records"] == len(gone)
    assert (note.data["first"], note.data["last"]) == (gone[0], gone[-1])
    assert "nothing could be written" in note.message
    assert len(gone) >= 20


def test_a_disk_full_from_the_start_is_written_when_it_can_be(tmp_path, disk):
    """Not even the header could be written at first."""
    disk.full = True
    with pytest.warns(RuntimeWarning, match="No space"):
        book = make(tmp_path)
    book.record(records(1, LAYERS)[0])
    disk.full = False
    book.flush()
    assert ampscope.open_run(tmp_path / "r").steps.tolist() == [0]


def test_a_folder_removed_midway_is_made_again_and_the_loss_is_told(tmp_path, monkeypatch):
    """Rows in no big batch are written again; those that were in one are gone, and the log says so."""
    book = make(tmp_path)
    book._sink.rows.big = 10
    rows = records(30, LAYERS)
    for record in rows[:25]:
        book.record(record)
    book.flush()
    shutil.rmtree(tmp_path / "r")
    with pytest.warns(RuntimeWarning, match="removed while it was written"):
        for record in rows[25:]:
            book.record(record)
        book.flush()
    run = ampscope.open_run(tmp_path / "r")
    assert run.steps.tolist() == list(range(20, 30))
    note = run.events[-1]
    assert note.kind == "note"
    assert (note.data["records"], note.data["first"], note.data["last"]) == (20, 0, 19)
    book.close()
    assert ampscope.open_run(tmp_path / "r").finished


def test_a_removed_folder_is_noticed_by_the_heartbeat(tmp_path):
    """Also where no record comes for a long time."""
    book = make(tmp_path)
    book.record(records(1, LAYERS)[0])
    book.flush()
    shutil.rmtree(tmp_path / "r")
    with pytest.warns(RuntimeWarning, match="cannot write"):
        book.beat()
    assert ampscope.open_run(tmp_path / "r").steps.tolist() == [0]


def test_the_heartbeat_touches_the_files(tmp_path, monkeypatch):
    """`last_seen` moves though nothing is written."""
    import os

    book = make(tmp_path)
    run = ampscope.open_run(tmp_path / "r")
    for name in os.listdir(tmp_path / "r"):
        os.utime(tmp_path / "r" / name, (1000, 1000))
    assert run.last_seen == 1000
    book.beat()
    assert run.last_seen > 1000
    assert run.refresh() is False


def test_a_changed_layer_set_begins_a_part(tmp_path):
    """`run.layers` is the union; NaN where a layer was not there."""
    book = make(tmp_path)
    for record in records(3, LAYERS):
        book.record(record)
    more = [*LAYERS, Layer("late.weight", (4, 16), 64, "float32", "Adam.1")]
    book.layers(more)
    for record in records(3, more, first=3):
        book.record(record)
    book.close()
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == [
        "ampscope-0-rank0-part1.arrows",
        "ampscope-0-rank0.arrows",
    ]
    run = ampscope.open_run(tmp_path / "r")
    assert run.steps.tolist() == list(range(6))
    assert [x.name for x in run.layers] == [x.name for x in more]
    norm = run.metric("grad_norm")
    assert np.isnan(norm[:3, 2]).all()
    assert np.isfinite(norm[3:]).all()
    assert run.sampled[:, 2].tolist() == [False] * 3 + [True] * 3
    assert run.exponents("late.weight")[0].tolist() == []
    assert run.finished
    assert len(run.sessions) == 1


def test_the_header_is_rewritten_while_there_is_no_row(tmp_path):
    """An optimizer's label is learned after `watch()`: one stream, with the label."""
    book = make(tmp_path)
    run = ampscope.open_run(tmp_path / "r")
    assert run.layers[0].optimizer == "Adam.0"
    renamed = [Layer(x.name, x.shape, x.numel, x.dtype, "SGD.0") for x in LAYERS]
    book.layers(renamed)
    book.record(records(1, renamed)[0])
    book.flush()
    assert run.refresh()
    assert {x.optimizer for x in run.layers} == {"SGD.0"}
    assert run.steps.tolist() == [0]
    book.close()
    assert [p.name for p in (tmp_path / "r").iterdir()] == ["ampscope-0-rank0.arrows"]


def test_a_record_taken_before_the_set_grew_is_padded(tmp_path):
    """The recorder may announce a layer while the record is on its way."""
    book = make(tmp_path)
    old = records(1, LAYERS)[0]
    book.layers([*LAYERS, Layer("late", (64,), 64, "float32")])
    book.record(old)
    book.close()
    run = ampscope.open_run(tmp_path / "r")
    assert run.sampled.tolist() == [[True, True, False]]


def test_parts_that_could_not_be_closed_are_closed_later(tmp_path, disk):
    """Layers change while the disk is full."""
    book = make(tmp_path)
    rows = records(4, LAYERS)
    book.record(rows[0])
    disk.full = True
    with pytest.warns(RuntimeWarning, match="No space"):
        book.layers(LAYERS[:1])
    book.record(records(1, LAYERS[:1], first=1)[0])
    disk.full = False
    book.close()
    run = ampscope.open_run(tmp_path / "r")
    assert run.steps.tolist() == [0, 1]
    assert run.finished
    assert not run.events


def test_a_record_that_cannot_be_encoded_costs_only_itself(tmp_path):
    """A fault of ours: one warning, a note, the others are there."""
    book = make(tmp_path)
    good, bad, after = records(3, LAYERS)
    bad.scalars["loss"] = object()
    with pytest.warns(RuntimeWarning, match="could not write a record.*Training goes on"):
        for record in (good, bad, after):
            book.record(record)
    book.close()
    run = ampscope.open_run(tmp_path / "r")
    assert run.steps.tolist() == [0, 2]
    assert run.events[0].data["first"] == 1


def test_a_disk_full_to_the_end_is_told_at_the_end(tmp_path, disk):
    """Closing cannot write: a second warning names what is lost, and nothing raises."""
    book = make(tmp_path)
    disk.full = True
    with pytest.warns(RuntimeWarning) as caught:
        for record in records(3, LAYERS):
            book.record(record)
        book.close()
    assert "3 records (steps 0 to 2) lost" in str(caught[-1].message)


def test_warnings_that_are_errors_do_not_end_the_writer(tmp_path, disk):
    """`python -W error`: the writer's thread has nobody to raise to."""
    disk.full = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        book = make(tmp_path)
        book.record(records(1, LAYERS)[0])
        book.flush()
    disk.full = False
    book.close()
    assert ampscope.open_run(tmp_path / "r").steps.tolist() == [0]


def test_events_of_no_record_come_with_the_next_flush(tmp_path):
    """An exception before `update()`: the run has the event although it has no step."""
    book = make(tmp_path)
    book.events([Event(0, "note", phase="forward", message="raised", data={"topic": "raise"})])
    book.flush()
    run = ampscope.open_run(tmp_path / "r")
    assert len(run.steps) == 0
    assert run.events[0].phase == "forward"


def test_a_real_file_size_limit_is_survived(tmp_path):
    """RLIMIT_FSIZE of 64 kB in a real process: training ends well, what fits is read."""
    import subprocess
    import sys

    code = f"""
import resource, warnings, sys
sys.path.insert(0, {str(tmp_path)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
from tests.test_log_journal import *
import pathlib
book = make(pathlib.Path({str(tmp_path)!r}))
book._sink.rows.big = 20
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for record in records(150, make_layers(2, 4096)):
        book.record(record)
        book.flush()
    book.close()
print(len(caught), "File too large" in str(caught[0].message))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "True"]
    run = ampscope.open_run(tmp_path / "r")
    assert 20 <= len(run.steps) < 150
    assert not run.damage


def test_modules_under_test_are_the_ones_the_writer_uses():
    """The fixture replaces the methods that the sink really calls."""
    assert arrows.AppendFile is AppendFile
    assert journal.ArrowSink is arrows.ArrowSink
