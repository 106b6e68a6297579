"""Acceptance and batches, how requests are run, tables and quick commands; no assertion on times."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import pytest
import torch
import typer
from typer.testing import CliRunner

from hf_speculate import AutoSpeculator, SpeculateError
from hf_speculate_tools.bench import fixed_length
from hf_speculate_tools.bench.acceptance import AcceptanceSettings, bench_acceptance, jackknife
from hf_speculate_tools.bench.acceptance import tables as acceptance_tables
from hf_speculate_tools.bench.generate import BatchSettings, bench_batch
from hf_speculate_tools.bench.generate import tables as generate_tables
from hf_speculate_tools.bench.methods import eager_method, speculator_method
from hf_speculate_tools.bench.runs import batches, fitting, measure_in_turn
from hf_speculate_tools.commands import Grid, add_command

from ..support.bench import bench, last_line, stats_of


@pytest.fixture
def target(bench_folders):
    return str(bench_folders / "target")


def test_acceptance_of_fixed_trees_is_measured(target):
    settings = AcceptanceSettings(
        target=target, speculators=["prompt_lookup"], nodes=[2, 6], max_new_tokens=10, limit=3
    )
    found = bench_acceptance(settings)
    assert json.loads(json.dumps(found))["bench"] == "acceptance"
    assert [(row["temperature"], row["nodes"]) for row in found["rows"]] == [(0.0, 2), (0.0, 6), (1.0, 2), (1.0, 6)]
    for row in found["rows"]:
        # Every prompt emits ten tokens: the prefill's, and those of rounds with and without a draft.
        assert row["rounds"] + row["rounds_without_draft"] <= 3 * 9
        assert 0 < row["drafted_nodes"] <= row["nodes"]
        assert row["mean_acceptance_length"] >= 1
    narrow, wide = found["rows"][:2]
    assert wide["mean_acceptance_length"] >= narrow["mean_acceptance_length"]
    (grid,) = acceptance_tables(found)
    assert [row[:3] for row in grid.rows] == [(t, "prompt_lookup", n) for t in "01" for n in "26"]
    assert list(grid.columns)[3:] == ["tokens\na round", "mean acceptance\nlength", "±", "drafted\na round", "by depth"]
    assert bench_acceptance(settings)["rows"] == found["rows"]  # no clock in it


def test_acceptance_cuts_prompts(target, tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text(
        "\n".join(json.dumps({"text": "ab" * n, "category": c}) for n, c in ((40, "x"), (50, "y"), (3, "x")))
    )
    settings = AcceptanceSettings(target=target, prompts=[path], nodes=[4], temperatures=[0.0], max_new_tokens=6)
    settings.prompt_tokens, settings.first_token = 16, 20
    found = bench_acceptance(settings)
    assert (found["num_prompts"], found["mean_prompt_length"]) == (2, 16)  # the text of 6 bytes ends before
    assert set(found["rows"][0]["categories"]) == {"x", "y"}
    settings.first_token = 200
    with pytest.raises(SpeculateError, match=r"no prompt has 216 tokens \(the longest has 100\)"):
        bench_acceptance(settings)


def test_the_standard_error_is_that_of_the_jackknife():
    # Equal rounds: the standard error of a mean of lengths 2, 3, 4 is s / sqrt(3) = 1 / sqrt(3).
    assert jackknife([stats_of(10, 10), stats_of(10, 20), stats_of(10, 30)]) == pytest.approx(3**-0.5)
    assert jackknife([stats_of(10, 10), stats_of(30, 30), stats_of(0, 0)]) == pytest.approx(0.0)
    assert jackknife([stats_of(10, 10), stats_of(0, 0)]) is None


def test_bench_batch_compares_adaptive_and_fixed_drafting_at_every_size(target):
    settings = BatchSettings(
        target=target,
        speculators=["prompt_lookup"],
        batch_sizes=[1, 2],
        temperatures=[0.0],
        max_new_tokens=8,
        repeats=1,
        limit=2,
    )
    found = bench_batch(settings)
    names = ["eager", "prompt_lookup:adaptive=True", "prompt_lookup:adaptive=False"]
    assert [(row["batch_size"], row["method"]) for row in found["rows"]] == [(b, n) for b in (1, 2) for n in names]
    assert all(row["identical"]["share"] == 1 for row in found["rows"] if row["kind"] == "speculator")  # fp32
    grid = generate_tables(found)[0]
    assert [row[2] for row in grid.rows] == 2 * names
    assert grid.breaks == [3]


@pytest.mark.parametrize("command", ["acceptance", "batch"])
def test_commands_end_in_one_line_of_json(command, target):
    more = {
        "acceptance": ["--nodes", "3"],
        "batch": ["--repeats", "1", "--limit", "1", "--batch-size", "1"],
    }
    arguments = [command, "--target", target, "--max-new-tokens", "5", *more[command]]
    result = bench(*arguments, "--markdown")
    assert last_line(result)["bench"] == command
    assert any(line.startswith("| ") for line in result.stdout.splitlines())


def test_grid_formats_columns_and_breaks_between_groups():
    rows = [{"name": "a", "size": 1, "found": {"x": 0.5}}, {"name": "b", "size": 2, "found": None}, {"name": "b"}]
    columns = {"name": "{name}", "x": "{found[x]:.1f}", "size": lambda row: f"{row['size']}!", "absent": "{absent:d}"}
    grid = Grid.of("t", rows, columns, groups=["name"])
    assert (grid.columns, grid.words, grid.breaks) == (["name", "x", "size"], {"name"}, [1])
    assert grid.rows == [("a", "0.5", "1!"), ("b", "", "2!"), ("b", "", "")]


def test_a_command_takes_its_options_from_settings():
    """Fields with an option are options; `--quick` sets what was not given."""

    @dataclass(kw_only=True)
    class Settings:
        QUICK: ClassVar = {"count": 1, "sizes": [7]}
        name: Annotated[str | None, typer.Option("--other-name")] = None
        count: Annotated[int, typer.Option(min=1)] = 5
        sizes: Annotated[list[int], typer.Option("--size")] = field(default_factory=lambda: [1, 2])
        secret: bool = True

    found: list[Any] = []

    def measure(given):
        """Does it.

        More.
        """
        return {"found": found.append(given)}

    made = typer.Typer()
    add_command(made, "one", Settings, measure, lambda result: [])
    run = CliRunner().invoke
    for arguments, expected in (
        ([], Settings()),
        (["--other-name", "x", "--size", "3"], Settings(name="x", sizes=[3])),
        (["--quick", "--count", "5"], Settings(count=5, sizes=[7])),
    ):
        assert run(made, arguments).exit_code == 0
        assert found[-1] == expected
    assert run(made, ["--count", "0"]).exit_code == 2
    shown = run(made, ["--help"]).stdout
    assert "Does it." in shown
    assert "More." not in shown
    assert "--secret" not in shown
    assert "--plot" not in shown


def test_batches_pad_left_and_stay_within_a_category():
    prompts = [("a", torch.arange(1, n + 1)) for n in (2, 4, 3)] + [("b", torch.arange(1, 3))]
    requests = batches(prompts, 2, torch.device("cpu"))
    assert [request.category for request in requests] == ["a", "a", "b"]
    assert requests[0].input_ids.tolist() == [[0, 0, 1, 2], [1, 2, 3, 4]]
    assert requests[0].attention_mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert requests[1].input_ids.tolist() == [[1, 2, 3], [0, 1, 2]]  # filled up with the first of its category


def test_no_repeat_drafts_from_the_texts_of_another(tiny_model, prompt):
    """A store would hold the very answers."""
    model, requests = tiny_model(), batches([("a", prompt(6)[0]), ("a", prompt(9)[0])], 1, torch.device("cpu"))
    speculator = AutoSpeculator.from_name("suffix", target=model, store=True, adaptive=False)
    runs = measure_in_turn(
        model, [speculator_method("s", speculator)], requests, fixed_length(24), 3, lambda step: None
    )
    forwards = [sum(run.stats.target_forwards for run in runs if run.repeat == repeat) for repeat in range(3)]
    assert min(forwards) > 0.8 * forwards[0], forwards
    assert len(speculator.drafter.store) == len(requests), "within a repeat it serves as ever"


def test_a_text_of_another_length_is_refused(tiny_model, prompt):
    stops = eager_method()
    stops.arguments["eos_token_id"] = list(range(96))
    requests = batches([("a", prompt(6)[0])], 1, torch.device("cpu"))
    with pytest.raises(SpeculateError, match=r"eager emitted \[1\] tokens instead of 3"):
        measure_in_turn(tiny_model(), [stops], requests, fixed_length(3), 1, lambda step: None)


def test_prompts_that_do_not_fit_are_left_out(tiny_model, prompt):
    assert len(fitting([("a", prompt(5)[0]), ("a", prompt(250)[0])], tiny_model(), 16)) == 1
    with pytest.raises(SpeculateError, match="the shortest has 250"):
        fitting([("a", prompt(250)[0])], tiny_model(), 16)
