"""False alarms: of healthy runs of many kinds nothing above info is said."""

from __future__ import annotations

import pytest

from tests.casing import play
from tests.healthy import RUNS

SEEDS = (0, 1, 2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", RUNS)
def test_a_healthy_run_is_not_accused(name, seed, tmp_path):
    """No finding above info, with any seed."""
    outcome = play(lambda watch: RUNS[name](watch, seed), tmp_path)
    assert outcome.error is None
    assert [f for f in outcome.findings if f.rank] == []
