"""Acceptance, losses and batches, how requests are run, tables and quick commands; no assertion on times."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import pytest
import torch
import typer
from torch._dynamo.utils import counters
from transformers import AutoTokenizer
from typer.testing import CliRunner

from hf_speculate import AutoSpeculator, SpeculateError, Speculator
from hf_speculate.bench import (
    AcceptanceSettings,
    BatchSettings,
    LossSettings,
    bench_acceptance,
    bench_batch,
    bench_loss,
    fixed_length,
)
from hf_speculate.bench.acceptance import jackknife
from hf_speculate.bench.acceptance import tables as acceptance_tables
from hf_speculate.bench.generate import tables as generate_tables
from hf_speculate.bench.loss import figures as loss_figures
from hf_speculate.bench.loss import tables as loss_tables
from hf_speculate.bench.methods import Method, eager_method, speculator_method
from hf_speculate.bench.runs import TimedRun, batches, fitting, measure_in_turn, rotated, seconds_by_repeat
from hf_speculate.commands import Grid, add_command
from hf_speculate.stats import SpeculationStats

from ..support.bench import bench, last_line, run_of, stats_of


@pytest.fixture
def target(bench_folders):
    return str(bench_folders / "target")


def test_acceptance_of_fixed_trees(target):
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


def test_acceptance_is_measured_up_to_the_end_of_the_text(target, monkeypatch):
    settings = AcceptanceSettings(target=target, nodes=[4], temperatures=[0.0], max_new_tokens=12, limit=2)
    asked = []

    def generate_once(model, method, request, arguments):
        asked.append(arguments["eos_token_id"])
        return run_of(stats=stats_of(1, 1))

    monkeypatch.setattr("hf_speculate.bench.acceptance.generate_once", generate_once)
    bench_acceptance(settings)
    assert set(asked) == {AutoTokenizer.from_pretrained(target).eos_token_id} != {None}


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


def test_options_of_the_speculator_beat_the_size(target):
    settings = AcceptanceSettings(
        target=target, speculators=["prompt_lookup:max_nodes=1"], nodes=[8], temperatures=[0.0], max_new_tokens=8
    )
    assert bench_acceptance(settings)["rows"][0]["drafted_nodes"] == 1


def test_jackknife():
    # Equal rounds: the standard error of a mean of lengths 2, 3, 4 is s / sqrt(3) = 1 / sqrt(3).
    assert jackknife([stats_of(10, 10), stats_of(10, 20), stats_of(10, 30)]) == pytest.approx(3**-0.5)
    assert jackknife([stats_of(10, 10), stats_of(30, 30), stats_of(0, 0)]) == pytest.approx(0.0)
    assert jackknife([stats_of(10, 10), stats_of(0, 0)]) is None


def test_loss(target):
    settings = LossSettings(
        target=target, max_new_tokens=12, repeats=2, adaptive=False, speculators=["prompt_lookup"], limit=2
    )
    found = bench_loss(settings)
    rows = {row["drafter"]: row for row in found["rows"]}
    assert list(rows) == ["random", "adversarial", "never", "prompt_lookup"]
    assert rows["never"]["drafted_share"] == 0
    # Never right: each of the 11 rounds emits one token, and every round but those at the end drafts.
    assert rows["adversarial"]["accepted_tokens"] == 0
    assert rows["adversarial"]["drafted_share"] == pytest.approx(10 / 11)
    assert rows["adversarial"]["drafted_tokens"] > 5 * 16
    assert json.loads(json.dumps(found)) == found
    settings.drafters = ["rude"]
    with pytest.raises(SpeculateError, match="no bad drafter rude; there are random, adversarial, never"):
        bench_loss(settings)


def test_loss_figures_take_the_drafters_prefill_apart():
    stats = SpeculationStats(calls=1, rounds=3, rounds_without_draft=1, drafter_prefill_seconds=0.5)
    runs = [
        *(run_of("eager", repeat=i, seconds=s) for i, s in enumerate((2.0, 3.0, 4.0))),
        *(run_of("bad", repeat=i, seconds=s, stats=stats) for i, s in enumerate((4.0, 4.0, 4.0))),
    ]
    found = loss_figures(runs, "bad")
    assert found["speedup"] == {"median": 0.75, "min": 0.5, "max": 1.0}
    assert found["speedup_without_drafter_prefill"]["median"] == pytest.approx(3 / 3.5)
    assert found["drafted_share"] == 0.75
    assert found["drafter_prefill_ms"] == pytest.approx(500)


def test_fresh_begins_anew(target, monkeypatch):
    made = []
    monkeypatch.setattr("hf_speculate.bench.loss.Speculator", lambda *a, **k: made.append(1) or Speculator(*a, **k))
    settings = LossSettings(target=target, drafters=["never"], max_new_tokens=4, repeats=3, fresh=True)
    bench_loss(settings)
    assert len(made) == 1 + 3  # the warm-up, and one a repeat
    made.clear()
    settings.fresh = False
    bench_loss(settings)
    assert len(made) == 1


def test_batch_sizes_with_and_without_the_switch(target):
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


@pytest.mark.parametrize("command", ["acceptance", "loss", "batch"])
def test_commands_end_in_one_line_of_json(command, target):
    more = {
        "acceptance": ["--nodes", "3"],
        "loss": ["--repeats", "1"],
        "batch": ["--repeats", "1", "--limit", "1", "--batch-size", "1"],
    }
    arguments = [command, "--target", target, "--max-new-tokens", "5", *more[command]]
    result = bench(*arguments, "--markdown")
    assert last_line(result)["bench"] == command
    assert any(line.startswith("| ") for line in result.stdout.splitlines())


def test_grid_as_markdown():
    grid = Grid(title="t", columns=["a", "b\nc"], rows=[["x|y", "1"]], words={"a"}, caption="below")
    assert grid.markdown() == "**t**\n\n| a | b c |\n| --- | ---: |\n| x\\|y | 1 |\n\nbelow"


def test_grid_of_rows():
    rows = [{"name": "a", "size": 1, "found": {"x": 0.5}}, {"name": "b", "size": 2, "found": None}, {"name": "b"}]
    columns = {"name": "{name}", "x": "{found[x]:.1f}", "size": lambda row: f"{row['size']}!", "absent": "{absent:d}"}
    grid = Grid.of("t", rows, columns, groups=["name"])
    assert (grid.columns, grid.words, grid.breaks) == (["name", "x", "size"], {"name"}, [1])
    assert grid.rows == [("a", "0.5", "1!"), ("b", "", "2!"), ("b", "", "")]


def test_a_command_of_settings():
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


def test_every_method_has_every_place_in_turn(tiny_model, prompt):
    methods = [eager_method(), *(eager_method() for _ in range(2))]
    for index, method in enumerate(methods):
        object.__setattr__(method, "name", f"m{index}")
    assert [rotated(methods, turn)[0].name for turn in range(4)] == ["m0", "m1", "m2", "m0"]
    requests = batches([("a", prompt(6)[0]), ("a", prompt(9)[0])], 1, torch.device("cpu"))
    steps = []
    runs = measure_in_turn(tiny_model(), methods, requests, fixed_length(3), 2, steps.append)
    assert len(runs) == 3 * 2 * 2
    assert len(steps) == 3 * (2 * 2 + 1)
    assert all(run.num_tokens == 3 for run in runs)
    assert seconds_by_repeat(runs, "m1") == pytest.approx(
        [sum(r.seconds for r in runs if r.method == "m1" and r.repeat == i) for i in range(2)]
    )


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


def test_a_method_may_bring_its_own_model(tiny_model, prompt):
    requests = batches([("a", prompt(6)[0])], 1, torch.device("cpu"))
    methods = [eager_method(), Method(name="other", kind="eager", model=tiny_model(seed=1))]
    plain, other = measure_in_turn(tiny_model(), methods, requests, fixed_length(6), 1, lambda step: None)
    assert plain.rows == tiny_model().generate(prompt(6), **fixed_length(6))[:, 6:].tolist()
    assert other.rows == tiny_model(seed=1).generate(prompt(6), **fixed_length(6))[:, 6:].tolist() != plain.rows


def test_what_compiles_warms_up_until_nothing_is_compiled(tiny_model, prompt, monkeypatch):
    passes = []

    def generate(model, method, request, arguments, repeat=0):
        passes.append((method.name, request.index, arguments["max_new_tokens"]))
        counters["stats"]["unique_graphs"] += method.compiles and len(passes) < 4  # also in the second pass
        return TimedRun(
            method=method.name,
            request=request.index,
            category="a",
            repeat=repeat,
            seconds=1,
            rows=[[0] * 40],
            stats=None,
        )

    monkeypatch.setattr("hf_speculate.bench.runs.generate_once", generate)
    requests = batches([("a", prompt(6)[0]), ("a", prompt(9)[0])], 1, torch.device("cpu"))
    for method in (eager_method(), Method(name="c", kind="speculator", arguments={}, compiles=True)):
        passes.clear()
        measure_in_turn(tiny_model(), [method], requests, fixed_length(40), 1, lambda step: None)
        if method.compiles:
            assert passes == [("c", 0, 40), ("c", 1, 40)] * 4  # three, and the measured one
        else:
            assert passes == [("eager", 1, 16), ("eager", 0, 40), ("eager", 1, 40)]


def test_a_text_of_another_length_is_refused(tiny_model, prompt):
    stops = eager_method()
    stops.arguments["eos_token_id"] = list(range(96))
    requests = batches([("a", prompt(6)[0])], 1, torch.device("cpu"))
    with pytest.raises(SpeculateError, match=r"eager emitted \[1\] tokens instead of 3"):
        measure_in_turn(tiny_model(), [stops], requests, fixed_length(3), 1, lambda step: None)


def test_prompts_that_do_not_fit(tiny_model, prompt):
    assert len(fitting([("a", prompt(5)[0]), ("a", prompt(250)[0])], tiny_model(), 16)) == 1
    with pytest.raises(SpeculateError, match="the shortest has 250"):
        fitting([("a", prompt(250)[0])], tiny_model(), 16)


def test_loss_names_the_worst_prompt():
    seconds = {"eager": {0: (2.0, 2.0, 2.0), 1: (3.0, 3.0, 3.0)}, "bad": {0: (2.0, 4.0, 9.0), 1: (3.0, 2.0, 3.0)}}
    runs = [
        run_of(method, request=request, repeat=i, seconds=s, stats=SpeculationStats(calls=1))
        for method, requests in seconds.items()
        for request, repeats in requests.items()
        for i, s in enumerate(repeats)
    ]
    assert loss_figures(runs, "bad")["worst"] == pytest.approx(0.5)


def test_loss_on_hard_prompts(target, tmp_path, monkeypatch):
    settings = LossSettings(target=target, hard=True, drafters=["never"], max_new_tokens=3, repeats=1, temperature=0.7)
    found = bench_loss(settings)
    assert found["num_prompts"] == 8
    assert found["temperature"] == 0.7
    assert "T=0.7" in str(loss_tables(found)[0].title)
    with pytest.raises(SpeculateError, match="Take one of the two"):
        bench_loss(replace(settings, prompts=[tmp_path / "own.jsonl"]))
    with pytest.raises(SpeculateError, match="temperature"):
        bench_loss(replace(settings, temperature=-1.0))
