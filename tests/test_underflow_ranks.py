"""The underflow probe in two processes of one launch (torchrun, gloo): DDP in its kinds, FSDP2."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import ampscope

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Launch once; the processes hold watched and unwatched parameters against each other. Return the log folder."""
    folder = tmp_path_factory.mktemp("logs")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.probe_ranks", str(folder),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_shares_are_those_of_averaged_fp32_gradients(launched):
    """An element lost is zero in the average over ranks, and not in FP32's."""
    truth = [float(x) for x in (launched / "truth.txt").read_text(encoding="utf-8").split()]
    assert max(truth) > 0.1
    run = ampscope.open_run(launched / "plain")
    for rank in (0, 1):
        np.testing.assert_allclose(run.metric("underflow_ratio_measured", rank)[0], truth, atol=1e-6)


@pytest.mark.parametrize("name", ["plain", "no_sync", "unused", "checkpointed", "view"])
def test_the_probe_runs_under_ddp(launched, name):
    """Every step is measured on both ranks (a layer without a gradient is not)."""
    run = ampscope.open_run(launched / name)
    for rank in (0, 1):
        measured = run.metric("underflow_ratio_measured", rank)
        assert len(measured) == 4
        assert np.isfinite(measured[:, :4]).all()
    assert not [e for e in run.events if e.data.get("topic") == "probe"]


def test_a_static_graph_is_left_its_first_backward(launched):
    """The first backward asks for the all-reduce: the probe waits for the next step."""
    measured = ampscope.open_run(launched / "static").metric("underflow_ratio_measured")
    assert not np.isfinite(measured[0]).any()
    assert np.isfinite(measured[1:]).all()


def test_under_fsdp2_it_says_so_and_is_off(launched):
    """One note; nothing is measured, and the rest is recorded."""
    run = ampscope.open_run(launched / "fsdp2")
    assert len(run.steps) == 4
    assert len([e for e in run.events if e.data.get("topic") == "probe" and e.rank == 0]) == 1
    assert not np.isfinite(run.metric("underflow_ratio_measured")).any()
