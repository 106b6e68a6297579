"""What tests of benchmarks share: the command line, runs and statistics that nobody measured."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from hf_speculate.stats import SpeculationStats
from hf_speculate_tools.bench.runs import TimedRun
from hf_speculate_tools.cli import app


def bench(*arguments: Any):
    """`hf-speculate bench ...`, which must succeed."""
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert result.exit_code == 0, result.output or result.exception
    return result


def last_line(result) -> dict[str, Any]:
    """The JSON that a command ends in."""
    return json.loads(result.stdout.splitlines()[-1])


def run_of(method="eager", request=0, repeat=0, seconds=1.0, stats=None, rows=((1, 2),)) -> TimedRun:
    return TimedRun(
        method=method,
        request=request,
        category="c",
        repeat=repeat,
        seconds=seconds,
        rows=[list(row) for row in rows],
        stats=stats,
    )


def stats_of(rounds: int, accepted: int, **more) -> SpeculationStats:
    return SpeculationStats(calls=1, rounds=rounds, accepted_tokens=accepted, bonus_tokens=rounds, **more)
