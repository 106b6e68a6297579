"""Benchmarks at shapes with random weights, set acceptance, plots, replays; no assertion on times."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from hf_speculate import SpeculateError, Speculator, rounds
from hf_speculate.policy import NOTHING, Budget
from hf_speculate.testing import ScriptedDrafter
from hf_speculate_tools.bench import GenerateSettings, bench_generate, fixed_length
from hf_speculate_tools.bench.methods import compiled_method, eager_method, speculator_method
from hf_speculate_tools.bench.replay import Replay, record_budgets, recorded_budgets, replayed
from hf_speculate_tools.bench.runs import batches, generate_once
from hf_speculate_tools.cli import app
from hf_speculate_tools.plots import draw_generate

from ..benchmarks import shapes
from ..benchmarks.scripted import AcceptanceProfile, plain_texts, read_profile
from ..benchmarks.shapes import SHAPES, ModelShape, find_shape
from ..support.models import VOCAB_SIZE


CPU = torch.device("cpu")


@pytest.fixture
def tiny_shape(monkeypatch):
    monkeypatch.setattr(shapes, "SHAPES", {"tiny": ModelShape(32, 48, 3, 4, 2, 200)})


def test_parameters_of_the_shapes_are_counted(tiny_shape):
    """A model's matrices, counted: what says whether it fits."""
    shape = find_shape("tiny")
    model = shape.build(torch.float32, CPU)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert shape.with_layers(1).num_parameters < shape.num_parameters
    sizes = {name: round(known.num_parameters / 1e9, 2) for name, known in SHAPES.items()}
    assert sizes == {"0.5B": 0.49, "1.5B": 1.54, "llama2-7b": 6.74, "8B": 8.03}  # as their makers say
    with pytest.raises(SpeculateError, match="unknown shape 'huge'; there are tiny"):
        find_shape("huge")


def test_a_profile_is_read_from_text():
    assert read_profile("0.8,0.4", 3).rates == (0.8, 0.4)
    assert read_profile("0.8,0.4", 3).conditional == pytest.approx((0.8, 0.5))
    assert read_profile("0.8,0.4", 3).mean_length == pytest.approx(2.2)
    for wrong, message in (("0.4,0.8", "never rising"), ("1.2", "between 0 and 1"), ("high", "rates by depth")):
        with pytest.raises(SpeculateError, match=message):
            read_profile(wrong, 4)
    with pytest.raises(SpeculateError, match="at least one node"):
        read_profile("0.5", 0)


def test_acceptance_profile_spreads_nodes_by_their_probability():
    assert AcceptanceProfile.of_nodes((0.9, 0.8, 0.7), 3).widths == (1, 1, 1)
    assert AcceptanceProfile.of_nodes((0.3, 0.1), 4).widths == (3, 1)
    for nodes in (1, 7, 32):
        assert AcceptanceProfile.of_nodes((0.8, 0.6, 0.4, 0.2), nodes).nodes == nodes


def test_synthetic_acceptance_is_what_was_asked_for(tiny_model, prompt):
    """200 rounds or more; each rate within 4.5 standard deviations, a false alarm once in 50 000 seeds and depths."""
    model, ids = tiny_model(max_positions=2048), prompt(7)
    request = fixed_length(600)
    text = model.generate(ids, **request)[0, 7:].tolist()
    profile = AcceptanceProfile((0.8, 0.5, 0.2), (3, 2, 1))
    drafter = profile.drafter({tuple(ids[0].tolist()): text}, vocab_size=96)
    output = model.generate(
        ids, **request, speculator=Speculator(drafter, adaptive=False), return_dict_in_generate=True
    )
    assert output.sequences[0, 7:].tolist() == text
    stats = output.speculation
    assert stats.rounds > 200
    for depth, rate in enumerate(profile.rates, start=1):
        allowed = 4.5 * (rate * (1 - rate) / stats.drafted_to_depth[depth]) ** 0.5
        assert abs(stats.acceptance_rate_by_depth[depth] - rate) < allowed, depth
    # The deepest right nodes are in the tree however it is cut, as `tree.first` may.
    assert stats.drafted_tokens / stats.rounds > 5.9


def test_a_synthetic_drafter_knows_its_prompts_only(tiny_model, prompt):
    drafter = AcceptanceProfile((0.5,), (1,)).drafter({(1, 2): [3]}, vocab_size=96)
    with pytest.raises(SpeculateError, match="no text for"):
        tiny_model().generate(prompt(5), max_new_tokens=4, speculator=Speculator(drafter))
    with pytest.raises(SpeculateError, match="larger than 4 tokens"):
        AcceptanceProfile((0.5,), (4,)).drafter({}, vocab_size=4)


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
    )
    return bench_generate(settings)


class TestPlots:
    def test_pictures_are_drawn(self, result, tmp_path):
        written = draw_generate(result, tmp_path / "new" / "plots")
        assert [path.name for path in written] == ["speedup.png", "acceptance.png"]
        assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in written)

    def test_figures_outlive_a_picture_that_fails(self, bench_folders, tmp_path):
        (tmp_path / "file").write_text("")
        out, target = tmp_path / "out.json", str(bench_folders / "target")
        arguments = ["--target", target, "--limit", "1", "--max-new-tokens", "4", "--repeats", "1", "--out", str(out)]
        ran = CliRunner().invoke(app, ["bench", "generate", *arguments, "--plot", str(tmp_path / "file" / "plots")])
        assert ran.exit_code == 1
        assert "cannot write plots" in ran.stderr
        assert json.loads(ran.stdout.splitlines()[-1]) == json.loads(out.read_text())

    def test_without_matplotlib_it_says_what_to_install(self, tmp_path, monkeypatch):
        monkeypatch.setattr("hf_speculate_tools.commands.checks.find_spec", lambda name: None)
        result = CliRunner().invoke(app, ["bench", "generate", "--target", ".", "--plot", str(tmp_path)])
        assert result.exit_code == 1
        assert "pip install 'hf-speculate[plots]'" in result.stderr


def test_the_compiled_baseline_is_stock_with_a_static_cache(tiny_model, prompt):
    method = compiled_method()
    method.arguments["compile_config"].backend = "eager"  # no compiler in tests
    model, (request,) = tiny_model(), batches([("a", prompt(11)[0])], 1, CPU)
    plain = generate_once(model, eager_method(), request, fixed_length(6))
    compiled = generate_once(model, method, request, fixed_length(6))
    assert compiled.rows == plain.rows
    assert (method.kind, method.compiles, eager_method().compiles) == ("stock_compiled", True, False)


class TestReplay:
    def test_replay_repeats_its_list_and_then_drafts_nothing(self, tiny_model, prompt):
        model, ids = tiny_model(), prompt(9)
        plain = model.generate(ids, max_new_tokens=48)[:, ids.shape[1] :]
        drafter = ScriptedDrafter(plain, (3, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE)
        speculator = Speculator(drafter, policy=Replay([Budget(1, 1), NOTHING, Budget(3, 2)]))
        for _ in range(2):
            _, *later = rounds(model, ids, speculator=speculator, max_new_tokens=24, do_sample=False)
            assert [round.num_nodes for round in later[:3]] == [1, 0, 3]
            assert not any(round.num_nodes for round in later[3:])

    def test_a_replay_drafts_the_same_trees_again(self, tiny_model, prompt):
        model, ids = tiny_model(), prompt(12)
        (request,) = batches([("a", ids[0])], 1, CPU)
        texts = plain_texts(model, [request], fixed_length(40))
        profile = AcceptanceProfile((0.8, 0.6, 0.5), (3, 2, 2))
        # A switch that chooses by a list: what a real one chooses depends on the clock.
        chosen = [Budget(4, 2), Budget(0, 0), Budget(7, 3), Budget(1, 1)] * 10
        speculator = replayed(Speculator(profile.drafter(texts, vocab_size=96)), chosen)
        record_budgets(speculator)
        method = speculator_method("s", speculator)
        run = generate_once(model, method, request, fixed_length(40))
        assert run.budgets == recorded_budgets(speculator)
        assert run.budgets == chosen[: run.stats.rounds + run.stats.rounds_without_draft]
        assert run.stats.rounds > 5
        again = speculator_method("s", replayed(speculator, run.budgets))
        for _ in range(2):
            repeated = generate_once(model, again, request, fixed_length(40))
            for name in ("rounds", "rounds_without_draft", "drafted_tokens", "drafted_to_depth", "accepted_histogram"):
                assert getattr(repeated.stats, name) == getattr(run.stats, name), name
