"""Watches every test of the suite and writes what became of it to STOCK_TESTS_REPORT."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest


REPORT = os.environ.get("STOCK_TESTS_REPORT")
_results: dict[str, dict] = {}


@pytest.fixture(autouse=True)
def _watched_calls(request):
    from .watch import HALF_RIGHT, IS_PLAIN, Calls, watched

    random.seed(0)  # torch is seeded by the fixture of all tests
    np.random.seed(0)
    calls = Calls(getattr(request.cls, "drafter", HALF_RIGHT), getattr(request.cls, "generate_options", {}))
    with watched(calls):
        yield
    request.node.user_properties.append(("calls", calls.as_json()))
    assert not IS_PLAIN or "hf_speculate" not in sys.modules, "the plain run must be plain"


def pytest_runtest_logreport(report):
    if REPORT is None:  # hooks of this file see every test of a run that comes by
        return
    result = _results.setdefault(report.nodeid.partition("::")[2], {"outcome": "passed", "why": ""})
    result |= dict(report.user_properties)
    if report.outcome != "passed" and result["outcome"] != "failed":
        result["outcome"] = report.outcome
        is_skip = isinstance(report.longrepr, tuple)
        result["why"] = report.longrepr[2].removeprefix("Skipped: ") if is_skip else report.longreprtext[-3000:]


def pytest_sessionfinish():
    if REPORT is not None:
        Path(REPORT).write_text(json.dumps(_results, indent=1))
