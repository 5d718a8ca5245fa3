"""Every rule is found from its cause, in variants of width, depth, seed, optimizer, accumulation and place."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from tests import cases
from tests.casing import play, wrong

NAMES = sorted(m.name for m in pkgutil.iter_modules(cases.__path__) if m.name != "common")
ALL = [(name, i) for name in NAMES for i in range(len(importlib.import_module(f"tests.cases.{name}").VARIANTS))]


@pytest.mark.parametrize(("name", "i"), ALL, ids=[f"{n}-{i}" for n, i in ALL])
def test_a_case_is_diagnosed(name, i, tmp_path):
    """The first finding names the rule, the phase and the module that the script was written to break."""
    case = importlib.import_module(f"tests.cases.{name}")
    variant = case.VARIANTS[i]
    outcome = play(case.main, tmp_path, **variant)
    truth = case.truth(**variant) if hasattr(case, "truth") else case.TRUTH
    assert wrong(truth, outcome) == ""
