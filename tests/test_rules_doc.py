"""docs/rules.md explains every rule, and the registry is the rule list of the contract."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ampscope.analysis.rules import IDS, RULES

DOC = (Path(__file__).parents[1] / "docs" / "rules.md").read_text()
SECTIONS = {m.group(1): m.group(2) for m in re.finditer(r"^## (\S+)\n(.*?)(?=^## |\Z)", DOC, re.M | re.S)}
PARTS = (
    "**Severity**",
    "**Symptom.**",
    "**Why.**",
    "**How ampscope sees it.**",
    "**Remedy.**",
    "# before",
    "# after",
    "**False alarm?**",
)


def test_every_rule_is_documented_and_no_other():
    """One section and one line of the table a rule."""
    assert set(SECTIONS) == set(IDS)
    assert set(re.findall(r"^\| \[(\S+)\]\(#\1\) \|", DOC, re.M)) == set(IDS)


@pytest.mark.parametrize("rule", IDS)
def test_a_section_is_whole(rule):
    """Symptom, why, how it is seen, remedy with a snippet before and after, when it is a false alarm."""
    assert [part for part in PARTS if part not in SECTIONS[rule]] == []


def test_a_rule_is_found_once_and_explains_rules_that_exist():
    """Ids are unique; what a rule explains is a rule, and not itself."""
    assert len(IDS) == len(set(IDS)) == 46
    for rule in RULES:
        assert rule.explains <= set(IDS) - set(rule.ids)
