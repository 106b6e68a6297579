"""`bench heads` at a tiny shape: every head runs, shares are shares, scaling is said. Times are not looked at."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hf_speculate import cli
from hf_speculate.errors import SpeculateError
from hf_speculate_plugins.commands import bench_heads as module
from hf_speculate_plugins.commands.bench_heads import HEADS, TargetShape, measure_heads, table


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch):
    shape = TargetShape(64, 96, 32, 2, 4, 2, 128, False)
    monkeypatch.setattr(module, "SHAPES", {"tiny": shape})


def test_every_head_runs_and_its_parts_add_up():
    result = measure_heads("tiny", dtype="float32", prompt_length=8, rounds=4, repeats=1)
    assert [row["head"] for row in result["rows"]] == list(HEADS)
    for row in result["rows"]:
        assert row["rounds"] >= 4
        assert row["nodes"] > 2
        assert row["round_ms"] == pytest.approx(row["target_ms"] + row["drafter_ms"] + row["rest_ms"])
        assert row["drafter_share"] == pytest.approx(row["drafter_ms"] / row["round_ms"])
        assert row["drafter_in_tokens"] == pytest.approx(row["drafter_ms"] / result["plain_token_ms"])
        assert 0 < row["engine_efficiency"] <= 1
    assert (result["layers_run"], result["layers"]) == (2, 32)
    assert "2 of 32 layers timed, scaled to 32" in table(result).title


def test_the_command_ends_in_one_line_of_json():
    arguments = ["bench", "heads", "--shape", "tiny", "--head", "medusa-v2", "--dtype", "float32", "--context", "8"]
    result = CliRunner().invoke(cli.app, [*arguments, "--rounds", "2", "--repeats", "1"])
    assert result.exit_code == 0, result.output
    assert "share of" in result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["rows"][0]["head"] == "medusa-v2"
    assert "heads" in CliRunner().invoke(cli.app, ["bench", "--help"]).stdout


def test_unknown_names():
    with pytest.raises(SpeculateError, match="knows the shapes tiny and the heads eagle3-32k"):
        measure_heads("70B")
    with pytest.raises(SpeculateError, match="got 'tiny' and"):
        measure_heads("tiny", ["hydra"])
