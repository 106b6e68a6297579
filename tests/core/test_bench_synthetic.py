"""Benchmarks at shapes with random weights, plots, and what is measured apart; no assertion on times."""

from __future__ import annotations

import builtins
import json

import pytest
import torch
from typer.testing import CliRunner

from hf_speculate import AutoSpeculator, SpeculateError, Speculator
from hf_speculate.bench import ContextSettings, GenerateSettings, bench_context, bench_generate
from hf_speculate.bench.context import figures as context_figures
from hf_speculate.bench.context import tables as context_tables
from hf_speculate.bench.memory import drafter_mb, peak_memory
from hf_speculate.bench.plots import write_plots
from hf_speculate.bench.profiles import AcceptanceProfile, read_profile
from hf_speculate.bench.replay import record_budgets, recorded_budgets, replayed
from hf_speculate.bench.runs import Run, batches, fixed_length, generate_once, seconds_to_first_token
from hf_speculate.bench.synthetic_workload import plain_texts
from hf_speculate.cli import app
from hf_speculate.commands import shapes
from hf_speculate.commands.methods import Method, compiled_method, eager_method, stock_speculative_methods
from hf_speculate.commands.shapes import SHAPES, ModelShape, find_shape, random_prompt
from hf_speculate.stats import SpeculationStats
from hf_speculate.testing import ScriptedDrafter
from hf_speculate.tuning import Budget


CPU = torch.device("cpu")


@pytest.fixture
def tiny_shape(monkeypatch):
    monkeypatch.setattr(shapes, "SHAPES", {"tiny": ModelShape(32, 48, 3, 4, 2, 200)})


def run(*arguments):
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result


def test_parameters_of_the_shapes(tiny_shape):
    """A model's matrices, counted: what says whether it fits."""
    shape = find_shape("tiny")
    model = shape.build(torch.float32, CPU)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert shape.with_layers(1).num_parameters < shape.num_parameters
    sizes = {name: round(known.num_parameters / 1e9, 2) for name, known in SHAPES.items()}
    assert sizes == {"0.5B": 0.49, "1.5B": 1.54, "llama2-7b": 6.74, "8B": 8.03}  # as their makers say
    with pytest.raises(SpeculateError, match="unknown shape 'huge'; there are tiny"):
        find_shape("huge")


@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_repeat_the_last_token(tied):
    model = ModelShape(32, 48, 2, 4, 2, 200, tied).build(torch.bfloat16, CPU)
    prompt = random_prompt(9, 200)
    text = model.generate(prompt, **fixed_length(6))[0, 9:]
    assert set(text.tolist()) == {int(prompt[0, -1])}


def test_generate_at_a_shape(tiny_shape):
    settings = GenerateSettings(
        shape="tiny",
        layers=2,
        profile=read_profile("1,1,1", 4),
        temperatures=(0.0,),
        batch_sizes=(1, 2),
        max_new_tokens=13,
        repeats=1,
        apart=False,
        round_costs=True,
    )
    found = bench_generate(settings)
    assert [row["method"] for row in found["rows"]] == ["eager", "automatic", "fixed 4"] * 2
    fixed = found["rows"][2]
    assert fixed["identical"]["share"] == 1
    assert fixed["speculation"]["mean_acceptance_length"] == 4  # perfect: twelve tokens in three rounds
    assert set(found["speedup"]) >= {"eager", "best_stock_speculative"}
    assert [row["nodes"] for row in found["round_costs"]] == [1, 2, 4, 8, 16, 32, 64]
    assert json.dumps(found)
    settings.temperatures = (1.0,)
    with pytest.raises(SpeculateError, match="is measured greedily"):
        bench_generate(settings)


def test_context_beside_plain(tiny_shape):
    settings = ContextSettings(
        contexts=(40, 16), shape="tiny", profile=read_profile("1,1", 2), dtype="float32", max_new_tokens=10, repeats=1
    )
    found = bench_context(settings)
    assert [(row["context"], row["method"]) for row in found["rows"]] == [
        (context, method) for context in (16, 40) for method in ("eager", "automatic", "fixed 2")
    ]
    assert found["rows"][0]["speedup"]["median"] == 1
    for row in found["rows"]:
        if row["method"] == "fixed 2":
            # Right wherever it drafts: the entries that were made up are the same for all methods.
            assert row["mean_acceptance_length"] == 3
            assert row["drafted_nodes"] == 2
    (grid,) = context_tables(found)
    assert [row[0] for row in grid.rows] == ["16", "40"]
    with pytest.raises(SpeculateError, match="context must be at least 1"):
        bench_context(ContextSettings(contexts=(0,), shape="tiny"))
    arguments = ("context", "--shape", "tiny", "--contexts", 8, "--max-new-tokens", 4, "--repeats", 1, "--nodes", 3)
    assert json.loads(run(*arguments).stdout.splitlines()[-1])["nodes"] == 3


def test_figures_of_a_context():
    stats = SpeculationStats(rounds=3, rounds_without_draft=1, drafted_tokens=12, accepted_tokens=3, bonus_tokens=3)
    runs = [
        Run(method=name, request=0, category="c", repeat=repeat, seconds=seconds, rows=[[1] * 8], stats=found)
        for repeat, pair in enumerate(((2.0, 1.0), (2.0, 4.0), (3.0, 1.0)))
        for name, seconds, found in (("eager", pair[0], None), ("automatic", pair[1], stats))
    ]
    found = context_figures(runs, "automatic")
    assert found["speedup"] == {"median": 2.0, "min": 0.5, "max": 3.0}
    assert found["tokens_per_second"]["median"] == 8.0
    assert (found["mean_acceptance_length"], found["drafted_nodes"], found["drafted_share"]) == (2.0, 4.0, 0.75)


def test_rates_of_a_measured_file(bench_folders, tmp_path):
    """What `bench acceptance` writes is what a synthetic drafter reads."""
    path = tmp_path / "measured.json"
    run(
        "acceptance",
        "--target",
        bench_folders / "target",
        "--nodes",
        8,
        "--limit",
        2,
        "--max-new-tokens",
        40,
        "--out",
        path,
    )
    row = next(r for r in json.loads(path.read_text())["rows"] if (r["nodes"], r["temperature"]) == (8, 0.0))
    profile = read_profile(f"{path}@prompt_lookup", 8)
    # A round that ends the text has no bonus token.
    assert 1 + sum(profile.rates) == pytest.approx(row["mean_acceptance_length"], abs=0.2)
    assert read_profile(str(path), 8) == profile
    with pytest.raises(SpeculateError, match="greedy rows of 16 nodes for: none"):
        read_profile(str(path), 16)


@pytest.fixture(scope="module", name="result")
def plotted_result(bench_folders, tmp_path_factory):
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"category": name, "prompt": f"def {name}(x):"} for name in "ab"]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    settings = GenerateSettings(
        target=str(bench_folders / "target"),
        speculators=[f"draft_model:model={bench_folders / 'draft'}"],
        prompts=[prompts],
        max_new_tokens=6,
        repeats=2,
        apart=False,
        round_costs=True,
    )
    return bench_generate(settings)


class TestPlots:
    def test_four_pictures(self, result, tmp_path):
        written = write_plots(result, tmp_path / "new" / "plots")
        assert [path.name for path in written] == ["speedup.png", "acceptance.png", "time.png", "round_costs.png"]
        assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in written)

    def test_a_folder_that_cannot_be(self, result, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(SpeculateError, match="cannot write plots"):
            write_plots(result, tmp_path / "file" / "plots")

    def test_without_matplotlib(self, bench_folders, tmp_path, monkeypatch):
        real = builtins.__import__

        def without(name, *args, **kwargs):
            if name.startswith("matplotlib"):
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without)
        arguments = ["bench", "generate", "--target", "absent", "--plot", str(tmp_path)]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1
        assert "pip install 'hf-speculate[plots]'" in result.stderr


class TestApart:
    def request_of(self, prompt, *lengths):
        return batches([("a", prompt(n, seed=n)[0]) for n in lengths], len(lengths), CPU)[0]

    @pytest.mark.parametrize("kind", ["eager", "speculator", "stock"])
    def test_time_to_first_token_ends_there(self, kind, tiny_model, prompt, monkeypatch):
        model = tiny_model()
        methods = {
            "eager": eager_method(),
            "stock": stock_speculative_methods(None, 4)[0],
            "speculator": Method(
                name="s",
                kind="speculator",
                arguments={"speculator": AutoSpeculator.from_name("prompt_lookup", model)},
            ),
        }
        emitted = []
        once = generate_once

        def spied(*args, **kwargs):
            emitted.append(once(*args, **kwargs))
            return emitted[-1]

        monkeypatch.setattr("hf_speculate.bench.runs.generate_once", spied)
        seconds = seconds_to_first_token(model, methods[kind], self.request_of(prompt, 20), fixed_length(30))
        assert seconds > 0
        # Stock's prompt lookup hands on its first round; the others one token.
        assert emitted[0].num_tokens < (8 if kind == "stock" else 2)

    def test_first_tokens_of_a_batch(self, tiny_model, prompt):
        request = self.request_of(prompt, 9, 14)
        assert seconds_to_first_token(tiny_model(), eager_method(), request, fixed_length(5)) > 0

    def test_memory_sees_what_a_call_takes(self):
        held = []
        found = peak_memory(lambda: held.append(torch.ones(64 * 1024 * 1024 // 4)), CPU)
        if found is None:
            pytest.skip("this platform does not tell the peak of the resident set")
        assert found["kind"] == "resident"
        assert 56 < found["above_start_mb"] < 96
        assert found["peak_mb"] > found["above_start_mb"]
        held.clear()
        assert peak_memory(lambda: None, CPU)["above_start_mb"] < 16

    def test_weights_of_a_drafter(self, tiny_model):
        model, draft = tiny_model(), tiny_model(seed=1)
        drafter = AutoSpeculator.from_name("draft_model", model, model=draft).drafter
        weights = sum(p.numel() * 4 for p in draft.parameters()) / 2**20
        assert drafter_mb(drafter, model) == pytest.approx(weights)
        assert drafter_mb(AutoSpeculator.from_name("draft_model", model, model=model).drafter, model) == 0
        assert drafter_mb(AutoSpeculator.from_name("prompt_lookup", model).drafter, model) == 0

    def test_the_compiled_baseline_is_stock_with_a_static_cache(self, tiny_model, prompt):
        method = compiled_method()
        method.arguments["compile_config"].backend = "eager"  # no compiler in tests
        model, request = tiny_model(), self.request_of(prompt, 11)
        plain = generate_once(model, eager_method(), request, fixed_length(6))
        compiled = generate_once(model, method, request, fixed_length(6))
        assert compiled.rows == plain.rows
        assert (method.kind, method.compiles, eager_method().compiles) == ("stock_compiled", True, False)


class TestReplay:
    def test_the_same_trees_again(self, tiny_model, prompt):
        model, ids = tiny_model(), prompt(12)
        (request,) = batches([("a", ids[0])], 1, CPU)
        texts = plain_texts(model, [request], fixed_length(40))
        profile = AcceptanceProfile((0.8, 0.6, 0.5), (3, 2, 2))
        # A switch that chooses by a list: what a real one chooses depends on the clock.
        chosen = [Budget(4, 2), Budget(0, 0), Budget(7, 3), Budget(1, 1)] * 10
        speculator = replayed(Speculator(profile.drafter(texts, vocab_size=96)), chosen)
        record_budgets(speculator)
        method = Method(name="s", kind="speculator", arguments={"speculator": speculator})
        run = generate_once(model, method, request, fixed_length(40))
        assert run.budgets == recorded_budgets(speculator)
        assert run.budgets == chosen[: run.stats.rounds + run.stats.rounds_without_draft]
        assert run.stats.rounds > 5
        again = Method(name="s", kind="speculator", arguments={"speculator": replayed(speculator, run.budgets)})
        for _ in range(2):
            repeated = generate_once(model, again, request, fixed_length(40))
            for name in ("rounds", "rounds_without_draft", "drafted_tokens", "drafted_to_depth", "accepted_histogram"):
                assert getattr(repeated.stats, name) == getattr(run.stats, name), name

    def test_budgets_are_obeyed(self, tiny_model, prompt):
        model = tiny_model()
        (request,) = batches([("a", prompt(12)[0])], 1, CPU)
        drafter = AcceptanceProfile((0.0, 0.0), (2, 2)).drafter(
            plain_texts(model, [request], fixed_length(9)), vocab_size=96
        )
        speculator = replayed(Speculator(drafter), [Budget(1, 1), Budget(0, 0), Budget(3, 2)])
        run = generate_once(
            model, Method(name="s", kind="speculator", arguments={"speculator": speculator}), request, fixed_length(9)
        )
        assert (run.stats.drafted_tokens, run.stats.rounds) == (4, 2)

    def test_what_is_paid_for_drafts_as_deep_as_what_is_verified(self, tiny_model, prompt, monkeypatch):
        model, depths = tiny_model(), []
        (request,) = batches([("a", prompt(12)[0])], 1, CPU)
        paid = ScriptedDrafter([[5] * 20], [1] * 6, vocab_size=96)
        start = paid.start

        def watched(request):
            session = start(request)
            draft = session.draft
            monkeypatch.setattr(session, "draft", lambda state: depths.append(state.max_depth) or draft(state))
            return session

        monkeypatch.setattr(paid, "start", watched)
        texts, profile = plain_texts(model, [request], fixed_length(9)), AcceptanceProfile((0.9, 0.5), (2, 2))
        drafter = profile.drafter(texts, vocab_size=96, paid=paid)
        method = Method(
            name="s", kind="speculator", arguments={"speculator": Speculator(drafter, adaptive=False)}, spec=None
        )
        generate_once(model, method, request, fixed_length(9))
        assert max(depths) == 2

    def test_fixed_speculators_have_none(self, tiny_model):
        speculator = AutoSpeculator.from_name("prompt_lookup", tiny_model(), adaptive=False)
        record_budgets(speculator)
        assert recorded_budgets(speculator) is None
        assert recorded_budgets(None) is None
        assert replayed(speculator, None).experience is None
