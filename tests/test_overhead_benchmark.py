"""The overhead benchmark runs, on models small enough for a test."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "overhead.py"
SPEC = importlib.util.spec_from_file_location("overhead", PATH)
overhead = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(overhead)


def test_the_model_is_what_the_numbers_are_said_to_be_of():
    """64 tensors, 12 million parameters."""
    parameters = list(overhead.big().parameters())
    assert len(parameters) == 64
    assert sum(p.numel() for p in parameters) == pytest.approx(12e6, rel=0.01)


def test_passes_and_own_time_are_positive():
    """Every timed pass is reached."""
    assert all(seconds > 0 for seconds in overhead.passes(overhead.tiny(2), 10, 1))
    assert overhead.own_time(overhead.tiny(2), 10, 2) > 0


@pytest.mark.parametrize("name", ["watched", *overhead.RIVALS])
def test_each_way_trains_and_ends(name):
    """What is not installed raises ImportError, which the benchmark reports as left out."""
    way = overhead.watched if name == "watched" else overhead.RIVALS[name]
    if name == "wandb.watch (offline)":
        pytest.skip("starts a service of its own")
    try:
        assert np.isfinite(overhead.added(overhead.tiny(2), 10, way, 2))
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")


def test_bytes_of_the_log():
    """The log of 64 tensors stays under the promised 48 bytes a tensor and step."""
    log, events = overhead.log_bytes(300)
    assert 0 < log < 48
    assert events > 0
