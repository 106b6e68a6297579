"""Lines of code by house: a feature that comes in takes lines out, or argues for a new number in its commit message."""

from __future__ import annotations

import pytest

from ..support.paths import REPOSITORY


# Lines of Python, C++ and headers. The goal is a wheel of 45,000 lines, an engine of 13,500, and tests of 40,000.
BUDGET = {
    "hf_speculate": 16_500,
    "plugins/hf_speculate_gguf": 9_585,
    "plugins/hf_speculate_plugins": 14_320,
    "plugins/hf_speculate_tools": 5_910,
    "training/hf_speculate_training": 8_540,
    "tests": 52_400,
}
SOURCES = (".py", ".cpp", ".h")


def num_lines(folder) -> int:
    sources = (path for path in folder.rglob("*") if path.suffix in SOURCES)
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources)


@pytest.mark.parametrize("house", BUDGET)
def test_a_house_stays_within_its_budget(house):
    found = num_lines(REPOSITORY / house)
    assert found <= BUDGET[house], f"{house} has grown by {found - BUDGET[house]} lines"


def test_budgets_are_tight():
    loose = {house: BUDGET[house] - num_lines(REPOSITORY / house) for house in BUDGET}
    assert not {house: spare for house, spare in loose.items() if spare > 300}, "lower the numbers"
