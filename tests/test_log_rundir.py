"""Run folders: names, sessions, launches of several ranks, and who may write."""

import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ampscope
from ampscope.log import rundir
from ampscope.log.rundir import claim
from tests.helpers_log import make_layers, records, write_run

LAYERS = make_layers(2, 64)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def spawn(code, *args):
    """Start a Python process that prints."""
    source = "import sys, time, pathlib\nfrom ampscope.log.rundir import claim\n" + code
    return subprocess.Popen(
        [sys.executable, "-c", source, *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("name", ["a", "résumé 1", ".hidden", "-x", "100%", "[a]*?", "<b>&", "x" * 255, "a\\b", "a\nb"])
def test_any_single_folder_name_is_a_run_name(tmp_path, name):
    """Written, found and opened under exactly that name."""
    path = write_run(tmp_path, LAYERS, records(1, LAYERS), name=name)
    assert path == tmp_path / name
    assert ampscope.open_run(tmp_path / name).name == name
    assert [r.name for r in ampscope.find_runs(tmp_path)] == [name]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/abs", "a\0b", "x" * 256, 3, b"x"])
def test_other_names_are_refused_in_one_line(tmp_path, name):
    """And nothing is made."""
    with pytest.raises(ampscope.AmpscopeError, match="^watch.*run"):
        claim(tmp_path / "logs", name)
    assert not (tmp_path / "logs").exists()


def test_eight_processes_in_one_second_get_eight_runs(tmp_path):
    """`run=None`: two runs never collide."""
    code = "print(claim(sys.argv[1], None).name, flush=True)\nsys.stdin.read()"
    processes = [spawn(code, tmp_path) for _ in range(8)]
    names = {p.stdout.readline().strip() for p in processes}
    for process in processes:
        process.communicate()
    assert len(names) == 8
    assert len([p for p in tmp_path.iterdir() if p.is_dir()]) == 8


@pytest.mark.parametrize("run", [None, "named"])
def test_ranks_of_one_launch_share_one_folder_and_session(tmp_path, run):
    """Whoever comes first; also when they come at the same moment."""
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda r: claim(tmp_path, run, rank=r, world_size=8, launch_key="k"), [3, 0, 7, 1, 2, 6, 5, 4])
        )
    assert len({f.path for f in found}) == 1
    assert {f.session for f in found} == {0}
    assert sorted(f.rank for f in found) == list(range(8))
    for f in found:
        f.release()


def test_ranks_in_processes_of_their_own_share_a_folder(tmp_path):
    """Two real processes of one parent."""
    code = "f = claim(sys.argv[1], None, rank=int(sys.argv[2]), world_size=2, launch_key='k')\nprint(f.name, f.session, flush=True)"
    ranks = [spawn(code, tmp_path, r) for r in (1, 0)]
    said = {p.communicate()[0] for p in ranks}
    assert len(said) == 1
    assert said.pop().strip().endswith(" 0")


def test_the_next_launch_with_the_same_key_gets_a_run_of_its_own(tmp_path):
    """`torchrun` started twice has the same address and port: the key alone tells nothing."""
    first = [claim(tmp_path, None, rank=r, world_size=2, launch_key="k") for r in (0, 1)]
    for f in first:
        f.release()
    second = [claim(tmp_path, None, rank=r, world_size=2, launch_key="k") for r in (1, 0)]
    assert second[0].path == second[1].path != first[0].path
    for f in second:
        f.release()


def test_a_rank_does_not_join_the_launch_that_crashed_before_it(tmp_path, monkeypatch):
    """Rank 0 of a launch came alone and died; rank 1 of the next launch comes first."""
    dead = claim(tmp_path, None, rank=0, world_size=2, launch_key="k")
    dead.release()
    book = json.loads((dead.path / ".ampscope-claim").read_text())
    book["time"] -= rundir.YOUNG + 1
    (dead.path / ".ampscope-claim").write_text(json.dumps(book))
    late = claim(tmp_path, None, rank=1, world_size=2, launch_key="k")
    early = claim(tmp_path, None, rank=0, world_size=2, launch_key="k")
    assert late.path == early.path != dead.path
    late.release()
    early.release()


def test_another_parent_process_is_another_launch(tmp_path):
    """On one host the ranks of a launch have one parent."""
    dead = claim(tmp_path, "r", rank=0, world_size=2, launch_key="k")
    dead.release()
    book = json.loads((dead.path / ".ampscope-claim").read_text())
    assert book["ranks"] == {"0": [platform.node(), os.getppid()]}
    book["ranks"]["0"][1] += 1
    (dead.path / ".ampscope-claim").write_text(json.dumps(book))
    other = claim(tmp_path, "r", rank=1, world_size=2, launch_key="k")
    assert other.session == 1
    other.release()


def test_several_scalers_of_one_launch_get_a_folder_each(tmp_path):
    """Every rank watches two scalers; the ranks are out of step."""
    a0, b0 = (claim(tmp_path, None, rank=0, world_size=2, launch_key="k") for _ in range(2))
    a1, b1 = (claim(tmp_path, None, rank=1, world_size=2, launch_key="k") for _ in range(2))
    assert a0.path == a1.path != b0.path == b1.path
    for f in (a0, b0, a1, b1):
        f.release()


def test_a_live_run_is_refused_and_a_finished_one_goes_on(tmp_path):
    """The message names the run and its writer; after the end it is the next session."""
    live = claim(tmp_path, "r")
    with pytest.raises(ampscope.AmpscopeError, match=r"'r'.*live process, this one; .* or choose another"):
        claim(tmp_path, "r")
    live.release()
    again = claim(tmp_path, "r")
    assert again.session == 1
    assert again.resumed
    again.release()


def test_a_live_rank_of_another_launch_refuses_too(tmp_path):
    """Any rank that lives keeps others out; ranks of its own launch may begin anew."""
    mine = claim(tmp_path, "r", rank=1, world_size=2, launch_key="k")
    with pytest.raises(ampscope.AmpscopeError, match="live process"):
        claim(tmp_path, "r")
    with pytest.raises(ampscope.AmpscopeError, match="live process"):
        claim(tmp_path, "r", rank=0, world_size=2, launch_key="other")
    first = claim(tmp_path, "r", rank=0, world_size=2, launch_key="k")
    assert first.session == 0
    first.release()
    second = claim(tmp_path, "r", rank=0, world_size=2, launch_key="k")
    assert second.session == 1
    with pytest.raises(ampscope.AmpscopeError, match="live process"):
        claim(tmp_path, "r", rank=0, world_size=2, launch_key="k")
    mine.release()
    assert claim(tmp_path, "r", rank=1, world_size=2, launch_key="k").session == 1


def test_a_killed_process_leaves_the_run_free(tmp_path):
    """SIGKILL: no wait for a heartbeat to run out."""
    process = spawn("f = claim(sys.argv[1], 'r')\nprint('up', flush=True)\nsys.stdin.read()", tmp_path)
    assert process.stdout.readline().strip() == "up"
    with pytest.raises(ampscope.AmpscopeError, match=f"process {process.pid} "):
        claim(tmp_path, "r")
    process.kill()
    process.communicate()
    free = claim(tmp_path, "r")
    assert free.session in (0, 1)
    free.release()
    assert not list((tmp_path / "r").glob("*.lock"))


def test_a_writer_on_another_host_is_alive_as_long_as_its_heart_beats(tmp_path):
    """A lock on a network file system may not reach here: the files' times decide."""
    path = write_run(tmp_path, LAYERS, records(2, LAYERS), finish=False)
    (path / "ampscope-0-rank0.lock").write_text('{"host": "elsewhere", "pid": 12}')
    with pytest.raises(ampscope.AmpscopeError, match="process 12 on elsewhere"):
        claim(tmp_path, "run")
    old = time.time() - rundir.DEAD_AFTER - 1
    for file in path.glob("*.arrows"):
        os.utime(file, (old, old))
    again = claim(tmp_path, "run")
    assert again.first_step == 2
    again.release()


def test_without_locks_the_heartbeat_decides(tmp_path, monkeypatch):
    """Windows, or a file system without advisory locks."""
    path = write_run(tmp_path, LAYERS, records(2, LAYERS), finish=False)
    (path / "ampscope-0-rank0.lock").write_text(json.dumps({"host": platform.node(), "pid": 12}))
    monkeypatch.setattr(rundir, "fcntl", None)
    with pytest.raises(ampscope.AmpscopeError, match="live process"):
        claim(tmp_path, "run")
    for file in path.glob("*.arrows"):
        os.utime(file, (1000, 1000))
    claim(tmp_path, "run").release()


def test_steps_go_on_after_the_last_recorded_one_or_where_told(tmp_path):
    """Also after a kill, from the tail; over ranks the greatest counts."""
    write_run(tmp_path, LAYERS, records(7, LAYERS), finish=False)
    found = claim(tmp_path, "run")
    assert (found.session, found.first_step) == (1, 7)
    found.release()
    told = claim(tmp_path, "run", step=3)
    assert told.first_step == 3
    told.release()


def test_unusable_folders_raise_oserror(tmp_path):
    """A file where the folder should be, at any level."""
    (tmp_path / "file").write_text("")
    for log_dir, run in ((tmp_path / "file", None), (tmp_path / "file" / "logs", None), (tmp_path, "file")):
        with pytest.raises(NotADirectoryError):
            claim(log_dir, run)
    with pytest.raises(OSError, match="/proc"):
        claim("/proc/nowhere", None)


def test_a_damaged_claim_file_is_no_obstacle(tmp_path):
    """It is rebuilt from the streams that are there."""
    path = write_run(tmp_path, LAYERS, records(2, LAYERS))
    for content in (b"", b"{", b"[1]", b'{"session": "x", "ranks": []}', os.urandom(50)):
        (Path(path) / ".ampscope-claim").write_bytes(content)
        found = claim(tmp_path, "run")
        assert found.session == 1
        found.release()


def test_a_newer_log_is_not_gone_on_with(tmp_path, monkeypatch):
    """Refused with the reader's message."""
    write_run(tmp_path, LAYERS, records(2, LAYERS))
    monkeypatch.setattr("ampscope.log.schema.FORMAT_VERSION", 0)
    with pytest.raises(ampscope.LogError, match="upgrade"):
        claim(tmp_path, "run")
