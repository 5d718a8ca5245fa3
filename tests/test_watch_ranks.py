"""Two processes of one launch (torchrun, gloo) share run folders."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import ampscope
from ampscope.probe import launch
from ampscope.run.find import find_runs

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Launch once; return the log folder and the names of the first two runs."""
    folder = tmp_path_factory.mktemp("logs")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.ranks",
        str(folder),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = {line for line in done.stdout.splitlines() if line.startswith("FOLDER")}
    assert len(lines) == 1, done.stdout  # both ranks the same
    return folder, lines.pop().split()[1:]


def test_ranks_share_a_folder_and_keep_their_own_numbers(launched):
    """Two watches of a launch have a folder each; DDP gradients are replicated, losses are not."""
    folder, (first, second) = launched
    assert first != second
    assert {r.name for r in find_runs(folder)} == {first, second, "fsdp"}
    run = ampscope.open_run(folder / first)
    assert run.ranks == [0, 1]
    assert run.finished
    assert run.metadata["world_size"] == 2
    assert run.metadata["gradients"] == "replicated"
    assert [x.name for x in run.layers] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert run.steps.tolist() == list(range(6))
    zero, one = (run.scalar("skipped", rank=r) for r in (0, 1))
    assert zero.tolist() == one.tolist() == [0, 0, 0, 1, 0, 0]
    np.testing.assert_array_equal(run.metric("grad_norm", rank=0), run.metric("grad_norm", rank=1))
    assert (run.scalar("loss", rank=0) != run.scalar("loss", rank=1)).all()
    assert {e.rank for e in run.events if e.kind == "backoff"} == {0, 1}
    assert len(run.sessions) == 1


def test_sharded_gradients_are_those_of_each_rank(launched):
    """ShardedGradScaler under FSDP: layers have the local parts, names without FSDP's prefixes."""
    run = ampscope.open_run(launched[0] / "fsdp")
    assert run.ranks == [0, 1]
    assert run.metadata["gradients"] == "sharded"
    assert run.metadata["scaler"]["type"] == "ShardedGradScaler"
    assert run.steps.tolist() == list(range(4))
    assert [x.name for x in run.layers] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert np.isfinite(run.scalar("grad_norm", rank=0)).all()


def test_ranks_are_known_from_the_environment_too(monkeypatch):
    """Before torch.distributed is initialised, and without it."""
    for name in (*launch.VARIABLES, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launch.rank_and_world() == (0, 1)
    assert launch.launch_key(1) is None
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert launch.rank_and_world() == (3, 8)
    key = launch.launch_key(8)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "other")
    assert launch.launch_key(8) not in (key, None)
    monkeypatch.setenv("RANK", "three")
    assert launch.rank_and_world() == (0, 1)
