"""False alarms: of healthy runs of many kinds nothing above info is said."""

from __future__ import annotations

import pytest

from tests.casing import play
from tests.healthy import RUNS
from tests.healthy_loops import LOOPS

SEEDS = (0, 1, 2)


def check(run, seed, logs):
    """Run it watched; there must be no finding above info."""
    outcome = play(lambda watch: run(watch, seed), logs)
    assert outcome.error is None
    assert [f for f in outcome.findings if f.rank] == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", RUNS)
def test_a_healthy_run_is_not_accused(name, seed, tmp_path):
    """No finding above info, with any seed."""
    check(RUNS[name], seed, tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_looks_like_misuse_is_not_accused(name, seed, tmp_path):
    """No finding above info, with any seed."""
    check(LOOPS[name], seed, tmp_path)
