"""`bench ahead` at a tiny shape, and its clock of two devices with times that are given."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hf_speculate import cli
from hf_speculate.commands import ModelShape, shapes
from hf_speculate_plugins.commands.bench_ahead import AHEAD, SIMULATED, WAITS, measure_ahead, simulated, tables


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch):
    monkeypatch.setattr(shapes, "SHAPES", {"tiny": ModelShape(128, 192, 4, 4, 2, 128, False)})


def test_all_three_ways_are_measured_and_their_parts_add_up():
    result = measure_ahead("tiny", rates=[1.0, 0.0], depths=[2], dtype="float32", prompt_length=8, rounds=6, repeats=1)
    rows = {(row["rate"], row["way"]): row for row in result["rows"]}
    assert set(rows) == {(rate, way) for rate in (1.0, 0.0) for way in (WAITS, AHEAD, SIMULATED)}
    for row in result["rows"]:
        parts = [row[name] for name in ("target_ms", "drafter_ms", "rest_ms")]
        assert row["round_ms"] == pytest.approx(sum(parts))
    assert rows[1.0, AHEAD]["share_right"] > 0.7  # not where the text ends
    assert rows[1.0, AHEAD]["tokens_a_round"] > 2.5
    assert rows[0.0, AHEAD]["share_right"] == 0
    assert rows[0.0, WAITS]["speedup"] == 1
    (grid,) = tables(result)
    assert len(grid.rows) == 6


@pytest.mark.parametrize(
    ("target", "drafter", "share", "waited"),
    [
        (100.0, 20.0, 1.0, 0.0),  # hidden
        (100.0, 200.0, 1.0, 140.0),  # one level more than the 200, 100 of them hidden
        (100.0, 20.0, 0.0, 20.0),  # it has ended long ago
        (100.0, 200.0, 0.0, 220.0),  # the third level, begun at 80, ends at 120
        (100.0, 200.0, 0.5, 180.0),
    ],
)
def test_two_clocks(target, drafter, share, waited):
    row = simulated({"target_ms": target, "drafter_ms": drafter, "rest_ms": 1.0}, share, depth=5)
    assert row["drafter_ms"] == pytest.approx(waited)
    assert row["round_ms"] == pytest.approx(target + waited + 1.0)


@pytest.mark.parametrize("kind", [[], ["--type", "Q8_0"]], ids=["dense", "packed"])
def test_the_command_ends_with_one_line_of_json(kind):
    arguments = [
        "bench",
        "ahead",
        "--shape",
        "tiny",
        "--rate",
        "0.8",
        "--depth",
        "2",
        "--rounds",
        "4",
        "--repeats",
        "1",
    ]
    result = CliRunner().invoke(cli.app, [*arguments, "--context", "8", "--json", *kind])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output.splitlines()[-1])
    assert found["weights"] == (kind[-1] if kind else "bfloat16")
    assert [row["way"] for row in found["rows"]] == [WAITS, AHEAD, SIMULATED]
