"""The writer: its thread, its queue, forks, exits, kills."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import ampscope
from ampscope.log import inbox
from ampscope.log.inbox import Inbox
from ampscope.log.rundir import claim
from ampscope.log.schema import Header
from ampscope.log.writer import LogWriter
from ampscope.record.step import Event, Resolved
from tests.helpers_log import make_layers, records

LAYERS = make_layers(2, 64)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BEGIN = """
import os, sys, time, pathlib
from tests.helpers_log import *
from ampscope.log.writer import LogWriter
from ampscope.record.step import Resolved, Event
layers = make_layers(2, 64)
found = claim(pathlib.Path(sys.argv[1]), "r")
writer = LogWriter(found, Header(layers, session=found.session, first_step=found.first_step), tensorboard=False)
"""


def start(tmp_path, code):
    """Start a process that has a `writer`."""
    source = BEGIN + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", source, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def make(tmp_path, **options):
    """Return a writer of the run "r"."""
    found = claim(tmp_path, "r")
    header = Header(LAYERS, session=found.session, first_step=found.first_step)
    return LogWriter(found, header, **{"tensorboard": False, **options})


class Later:
    """A record whose numbers come when `event` is set."""

    def __init__(self, record):
        self.record, self.event = record, threading.Event()

    def ready(self):
        return self.event.is_set()

    def resolve(self):
        assert self.event.wait(10)
        return self.record


def test_flush_returns_when_everything_is_on_disk(tmp_path):
    """Submit, flush, read; close marks the run finished and gives it back."""
    writer = make(tmp_path)
    for record in records(5, LAYERS):
        writer.submit(Resolved(record))
    writer.flush()
    run = ampscope.open_run(tmp_path / "r")
    assert run.steps.tolist() == [0, 1, 2, 3, 4]
    assert not run.finished
    writer.close()
    writer.close()
    assert run.refresh()
    assert run.finished
    assert run.metadata["pid"] == os.getpid()
    assert not list((tmp_path / "r").glob("*.lock"))


def test_records_resolve_in_order_on_the_writers_thread(tmp_path):
    """`on_resolved` sees those that were not complete, before they are written; it may add events."""
    seen = []

    def resolved(record):
        seen.append((record.step, threading.current_thread().name))
        record.events.append(Event(record.step, "note", message="seen"))

    writer = make(tmp_path, on_resolved=resolved)
    first, second, third = records(3, LAYERS)
    late, later = Later(first), Later(third)
    for pending in (late, Resolved(second), later):
        writer.submit(pending)
    later.event.set()
    late.event.set()
    writer.close()
    run = ampscope.open_run(tmp_path / "r")
    assert run.steps.tolist() == [0, 1, 2]
    assert [s for s, _ in seen] == [0, 2]
    assert {name for _, name in seen} == {"ampscope-writer"}
    assert [e.step for e in run.events] == [0, 2]


def test_a_record_whose_numbers_cannot_be_had_costs_only_itself(tmp_path):
    """A device that fails: one warning, the rest is written."""

    class Broken:
        def ready(self):
            return False

        def resolve(self):
            raise RuntimeError("device lost")

    writer = make(tmp_path)
    good = records(2, LAYERS)
    with pytest.warns(RuntimeWarning, match="device lost"):
        writer.submit(Resolved(good[0]))
        writer.submit(Broken())
        writer.submit(Resolved(good[1]))
        writer.close()
    assert ampscope.open_run(tmp_path / "r").steps.tolist() == [0, 1]


def test_layers_and_events_keep_their_place_among_records(tmp_path):
    """What is queued between two records takes effect between them."""
    writer = make(tmp_path)
    more = make_layers(3, 64)
    writer.submit(Resolved(records(1, LAYERS)[0]))
    writer.set_layers(more)
    writer.submit_events([Event(1, "note", message="between")])
    writer.submit(Resolved(records(1, more, first=1)[0]))
    writer.close()
    run = ampscope.open_run(tmp_path / "r")
    assert run.sampled.tolist() == [[True, True, False], [True, True, True]]
    assert run.events[0].message == "between"


def test_threads_may_submit_at_once(tmp_path):
    """Four threads, 100 records each: none is lost."""
    writer = make(tmp_path)
    parts = [records(100, LAYERS, first=100 * k, every=1000) for k in range(4)]
    threads = [threading.Thread(target=lambda rows=rows: [writer.submit(Resolved(r)) for r in rows]) for rows in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert ampscope.open_run(tmp_path / "r").steps.tolist() == list(range(400))


def test_the_queue_is_bounded_and_keeps_the_newest():
    """A writer that hangs delays training once for a moment, then the oldest record goes for each new one."""
    box = Inbox(10_000_000)
    assert box.limit == inbox.LEAST == 4
    begin = time.monotonic()
    for i in range(200):
        box.put("record", i)
    assert time.monotonic() - begin < 4 * inbox.PATIENCE
    box.put("flush", None)
    got = [item for _ in range(5) for item in box.get(0)]
    assert [v for w, v in got if w == "record"] == list(range(196, 200))
    assert got[-1] == ("flush", None)
    assert box.take_drops() == 196
    assert box.take_drops() == 0
    assert box.get(0) == []


def test_records_are_handed_over_many_at_a_time_and_urgent_items_at_once(monkeypatch):
    """A complete record waits a moment for others; one on a device, an event, a flush wakes the writer; many do too."""
    box = Inbox(2)

    def timed(*items):
        for item in items:
            box.put(*item)
        begin = time.monotonic()
        return [v for _, v in box.get(30.0)], time.monotonic() - begin

    got, seconds = timed(("record", 0, False), ("record", 1, False))
    assert got == [0, 1]
    assert seconds > 0.8 * inbox.LINGER
    monkeypatch.setattr(inbox, "LINGER", 20.0)
    got, seconds = timed(("record", 2, False), ("record", 3, True), ("record", 4, False))
    assert got == [2, 3, 4]
    assert seconds < 0.5 * inbox.LINGER
    got, seconds = timed(*[("record", i, False) for i in range(inbox.MANY + 1)])
    assert got == list(range(inbox.MANY))
    assert seconds < 0.5 * inbox.LINGER
    assert [v for _, v in box.get(0.0)] == [inbox.MANY]


def test_a_sleeping_writer_is_woken_once_for_a_row_of_records(monkeypatch):
    """The first record starts the wait for others; those after it do not wake the writer again."""
    monkeypatch.setattr(inbox, "LINGER", 1.0)  # a busy machine may stop this thread for a while
    box, got, woken = Inbox(2), [], []
    notify = box._changed.notify_all
    box._changed.notify_all = lambda: (woken.append(1), notify())
    reader = threading.Thread(target=lambda: got.extend(box.get(30.0)))
    reader.start()
    while not box._asleep:
        time.sleep(0.001)
    for i in range(5):
        box.put("record", i, False)
        time.sleep(0.002)
    reader.join()
    assert [v for _, v in got] == list(range(5))
    assert len(woken) <= 3


def test_a_fast_loop_waits_for_the_writer_instead_of_losing_records(tmp_path):
    """More records at once than the queue holds: all are written."""
    writer = make(tmp_path)
    writer._inbox.limit = 32
    for record in records(600, LAYERS, every=1000):
        writer.submit(Resolved(record))
    writer.close()
    assert len(ampscope.open_run(tmp_path / "r").steps) == 600


def test_interpreter_exit_loses_nothing(tmp_path):
    """No close, no flush: the script just ends. Also when it ends with an exception."""
    process = start(tmp_path, "[writer.submit(Resolved(r)) for r in records(20, layers)]; raise SystemExit(3)")
    process.communicate()
    assert process.returncode == 3
    run = ampscope.open_run(tmp_path / "r")
    assert run.steps.tolist() == list(range(20))
    assert run.finished


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_writes_nothing_and_does_not_hold_the_run(tmp_path):
    """A child inherits writer and lock: it may submit and exit, and outlive a killed parent."""
    code = """
        [writer.submit(Resolved(r)) for r in records(5, layers)]
        writer.flush()
        child = os.fork()
        if child == 0:
            import warnings
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                [writer.submit(Resolved(r)) for r in records(5, layers, first=5)]
            assert len(caught) == 1 and "before this process was forked" in str(caught[0].message)
            writer.flush(); writer.close()
            print("child", os.getpid(), flush=True)
            time.sleep(60)
        [writer.submit(Resolved(r)) for r in records(3, layers, first=5)]
        writer.flush()
        os.kill(os.getpid(), 9)
    """
    process = start(tmp_path, code)
    child = int(process.stdout.readline().split()[1])
    try:
        process.wait(30)
        assert process.returncode == -signal.SIGKILL
        run = ampscope.open_run(tmp_path / "r")
        assert run.steps.tolist() == list(range(8))
        assert not run.finished
        again = claim(tmp_path, "r")
        assert (again.session, again.first_step) == (1, 8)
        again.release()
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_a_killed_writer_loses_at_most_a_second(tmp_path):
    """SIGKILL in full flight: what was submitted a second before is there, and nothing is torn."""
    code = """
        for record in records(100000, make_layers(2, 16), every=50):
            record.time = time.time()
            writer.submit(Resolved(record))
            print(record.step, record.time, flush=True)
            time.sleep(0.002)
    """
    process = start(tmp_path, code.replace("records(100000", "iter_records(100000"))
    told = []
    for line in process.stdout:
        told.append(line.split())
        if float(told[-1][1]) - float(told[0][1]) > 1.6:
            process.kill()
            break
    killed = time.time()
    rest, _ = process.communicate()
    told += [line.split() for line in rest.splitlines() if len(line.split()) == 2]
    run = ampscope.open_run(tmp_path / "r")
    old = [int(s) for s, t in told if float(t) < killed - 1.0]
    assert len(old) > 20
    assert set(old) <= set(run.steps.tolist())
    assert not run.damage
    assert not run.finished
    again = claim(tmp_path, "r")
    assert again.first_step == int(run.steps[-1]) + 1
    again.release()


def test_a_submit_costs_the_training_thread_little(tmp_path):
    """The median submit of a 64-layer record takes well under a millisecond."""
    layers = make_layers(64, 64)
    found = claim(tmp_path, "r")
    writer = LogWriter(found, Header(layers), tensorboard=True)
    record = records(1, layers)[0]
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        writer.submit(Resolved(record))
        times.append(time.perf_counter() - begin)
    writer.close()
    assert np.median(times) < 5e-4


def test_a_reader_beside_a_live_writer_sees_a_growing_prefix(tmp_path):
    """Rows move from tail to main file while they are read: never one twice, never a gap."""
    writer = make(tmp_path)
    writer._journal._sink.rows.big = 20
    rows = records(400, LAYERS, every=1000)
    run = ampscope.open_run(tmp_path / "r")
    seen = [0]

    def write():
        for record in rows:
            writer.submit(Resolved(record))
            if record.step % 3 == 0:
                writer.flush()

    thread = threading.Thread(target=write)
    thread.start()
    while thread.is_alive():
        run.refresh()
        assert run.steps.tolist() == list(range(len(run.steps)))
        seen.append(len(run.steps))
        assert seen[-1] >= seen[-2]
    thread.join()
    writer.close()
    run.refresh()
    assert run.steps.tolist() == list(range(400))
    assert not run.damage
    assert len(set(seen)) > 10
