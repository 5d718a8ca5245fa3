"""The numbers of docs/underflow.md, on a part of the benchmark: probe and free estimate against an FP32 backward."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from underflow_accuracy import measure, table


@pytest.fixture(scope="module")
def rows():
    """One seed of six models, two scales, four loss weights."""
    names = ("mlp", "relu_mlp_dead", "transformer", "embedding_heavy", "deep_narrow", "sparse_features")
    return [r for n in names for r in measure(n, 0, (1.0, 1e-2, 1e-4, 1e-5), (1.0, 2.0**16))]


def test_the_probe_is_right(rows):
    """Mean error at most 0.1 percentage points."""
    out, _, _ = table(rows)
    assert out["probe"][0] <= 0.1
    # The bias of attention keys has a zero gradient in exact arithmetic: its FP32 "truth" is rounding noise.
    errors = [abs(r["probe"] - r["truth"]) for r in rows if not r["layer"].endswith("in_proj_bias")]
    assert max(errors) <= 0.01


def test_the_free_estimate_is_honest(rows):
    """Mean error at most 2 points, truth inside the bounds in 98 %, bounds at most half as wide as [0, share of zeros]."""
    out, inside, width = table(rows)
    assert out["free"][0] <= 2
    assert inside >= 0.98
    assert width <= 0.5


def test_it_beats_the_definitions_used_elsewhere(rows):
    """Free estimate and probe are nearer the truth than share of zeros, subnormals, or thresholds."""
    out, _, _ = table(rows)
    others = [out[k][0] for k in ("zeros", "below_2^-24", "subnormal/non-zero", "TransformerEngine")]
    assert out["probe"][0] < out["free"][0] < min(others)


def test_estimates_lie_inside_their_bounds(rows):
    """low <= estimate <= high, in [0, share of zeros]."""
    low, free, high, zeros = (np.array([r[k] for r in rows]) for k in ("low", "free", "high", "zeros"))
    assert (low <= free + 1e-6).all()
    assert (free <= high + 1e-6).all()
    assert (high <= zeros + 1e-6).all()
    assert (low >= 0).all()
