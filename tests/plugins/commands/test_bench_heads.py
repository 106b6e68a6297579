"""`bench heads` at a tiny shape: every head runs, shares are shares, scaling is said. Times are not looked at."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hf_speculate import cli
from hf_speculate.bench import read_profile
from hf_speculate.commands import ModelShape, shapes
from hf_speculate.errors import SpeculateError
from hf_speculate_plugins.commands.bench_heads import HEADS, measure_heads, tables


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch):
    monkeypatch.setattr(shapes, "SHAPES", {"tiny": ModelShape(64, 96, 32, 4, 2, 128, False)})


def test_every_head_runs_and_its_parts_add_up():
    result = measure_heads("tiny", layers=2, dtype="float32", prompt_length=8, rounds=4, repeats=1)
    assert [row["head"] for row in result["rows"]] == list(HEADS)
    for row in result["rows"]:
        assert row["rounds"] >= 4
        assert row["mean_acceptance_length"] == 1  # nothing is accepted
        assert row["nodes"] > 2
        assert row["round_ms"] == pytest.approx(row["target_ms"] + row["drafter_ms"] + row["rest_ms"])
        assert row["drafter_share"] == pytest.approx(row["drafter_ms"] / row["round_ms"])
        assert row["drafter_in_tokens"] == pytest.approx(row["drafter_ms"] / result["plain_token_ms"])
        assert row["speedup"] == pytest.approx(row["tokens_a_round"] * result["plain_token_ms"] / row["round_ms"])
        assert 0 < row["engine_efficiency"] <= 1
    assert (result["layers_run"], result["layers"]) == (2, 32)
    (grid,) = tables(result)
    assert "2 of 32 layers timed, scaled to 32" in grid.title
    assert "x plain" not in grid.columns


def test_acceptance_is_set_while_the_head_works(monkeypatch):
    worked = []
    build = HEADS["eagle3-32k"][1]

    def spied(target, shape):
        drafter = build(target, shape)
        start = drafter.start
        monkeypatch.setattr(drafter, "start", lambda request: _spy(start(request), worked))
        return drafter

    monkeypatch.setitem(HEADS, "eagle3-32k", (HEADS["eagle3-32k"][0], spied))
    profile = read_profile("1,1,1", 3)
    result = measure_heads(
        "tiny", ["eagle3-32k"], profile=profile, layers=1, dtype="float32", prompt_length=8, rounds=5, repeats=1
    )
    (row,) = result["rows"]
    assert row["tokens_a_round"] > 3.5  # all but the last round emit three drafted tokens and the bonus one
    assert worked.count("draft") == worked.count("observe") >= 2 * row["rounds"]  # warm-up and one repeat
    assert "x plain" in tables(result)[0].columns


def _spy(session, worked):
    for name in ("draft", "observe"):
        method = getattr(session, name)
        setattr(session, name, lambda *a, m=method, n=name: (worked.append(n), m(*a))[1])
    return session


def test_the_command_ends_in_one_line_of_json():
    arguments = ["bench", "heads", "--shape", "tiny", "--head", "medusa-v2", "--dtype", "float32", "--context", "8"]
    result = CliRunner().invoke(cli.app, [*arguments, "--rounds", "2", "--repeats", "1", "--layers", "1"])
    assert result.exit_code == 0, result.output
    assert "share of" in result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["rows"][0]["head"] == "medusa-v2"
    assert "heads" in CliRunner().invoke(cli.app, ["bench", "--help"]).stdout


def test_unknown_names():
    with pytest.raises(SpeculateError, match="unknown shape '70B'; there are tiny"):
        measure_heads("70B")
    with pytest.raises(SpeculateError, match=r"knows the heads eagle3-32k, .*; not hydra"):
        measure_heads("tiny", ["hydra"])
