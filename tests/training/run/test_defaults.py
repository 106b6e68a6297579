"""A recipe from target and data alone: as the shipped ones where they are of the same size, and one that runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config
from typer.testing import CliRunner

from hf_speculate import AutoSpeculator
from hf_speculate_tools import cli
from hf_speculate_training.methods import installed_methods, load_method
from hf_speculate_training.run import defaults, read_recipe, recipe_from
from hf_speculate_training.run.defaults import default_choices, recipe_values
from hf_speculate_training.sections import RecipeError
from tests.support.paths import REPOSITORY


# Their sizes, by the shipped recipe for them.
CONFIGS = {
    "smollm2-eagle3": LlamaConfig(hidden_size=576, vocab_size=49152, max_position_embeddings=2048),
    "qwen2-16m-eagle3": Qwen2Config(hidden_size=384, vocab_size=8192, max_position_embeddings=1024),
    "qwen2-0.5b-eagle3": Qwen2Config(hidden_size=896, vocab_size=151936),
    "llama-3.1-8b-eagle3": LlamaConfig(hidden_size=4096, vocab_size=128256, max_position_embeddings=131072),
}


def run(*arguments):
    return CliRunner().invoke(cli.app, ["train", *map(str, arguments)])


@pytest.mark.parametrize("name", CONFIGS)
def test_defaults_are_those_of_the_shipped_recipe_of_that_size(monkeypatch, name):
    monkeypatch.setattr(defaults, "load_config", lambda section: CONFIGS[name])
    monkeypatch.setattr(defaults, "load_tokenizer", lambda section: type("Tokenizer", (), {"chat_template": "x"}))
    made, shipped = recipe_values(default_choices("org/target", "own.jsonl", "eagle3")), read_recipe(name)
    recipe_from(made)
    assert made["data"]["max_length"] == shipped.data.max_length
    assert made["method"].get("head", {}).get("draft_vocab_size") == shipped.method.head.get("draft_vocab_size")
    # SmolLM2's head had three steps, and rows for two cores, which is what an hour had time for.
    is_hurried = name == "smollm2-eagle3"
    steps = 5 if is_hurried else shipped.method.options["steps"]
    assert made["method"].get("options", {}).get("steps", 7) == steps
    for key in ("learning_rate", "adamw_learning_rate", "muon", "max_grad_norm", "warmup_steps"):
        assert made["training"].get(key) == shipped.training.get(key), key
    rows = ("per_device_train_batch_size", "gradient_accumulation_steps")
    step, other = ([values.get(key, 1) for key in rows] for values in (made["training"], shipped.training))
    assert step == ([4, 1] if is_hurried else other)
    assert made["evaluation"]["nodes"] == shipped.evaluation.nodes
    assert made["output"]["folder"] == "runs/target-eagle3"


@pytest.mark.parametrize("method", installed_methods())
@pytest.mark.parametrize("hidden_size", [64, 1024, 4096])
def test_every_method_is_suggested_what_it_knows(method, hidden_size):
    kind = load_method(method)
    suggested = kind.suggested(PretrainedConfig(hidden_size=hidden_size, vocab_size=200_000))
    assert suggested.keys() <= {"head", "options"}
    kind.head_class(**suggested.get("head", {}))
    kind.options_class(**suggested.get("options", {}))


@pytest.mark.parametrize("method", ["dspark", "medusa"])
def test_target_and_data_are_enough(saved_target, own_texts, tmp_path, monkeypatch, method):
    monkeypatch.chdir(tmp_path)
    short = ["--set", "training.max_steps=2", "--set", "evaluation.max_new_tokens=4", "--set", "data.eval_fraction=0.3"]
    result = run("--target", saved_target, "--data", own_texts, "--method", method, *short)
    assert result.exit_code == 0, result.output
    folder = Path("runs") / f"{saved_target.name}-{method}"
    assert f"goes by its size (--init - shows it): {folder}" in result.stdout
    assert json.loads((folder / "provenance.json").read_text())["training"]["steps"] == 2
    AutoSpeculator.from_pretrained(folder, target=AutoModelForCausalLM.from_pretrained(saved_target))


class TestInit:
    def test_init_writes_the_recipe_that_would_run(self, saved_target, tmp_path):
        path = tmp_path / "recipe.yaml"
        result = run("--target", saved_target, "--data", "own.jsonl", "--method", "medusa", "--init", path)
        assert result.exit_code == 0, result.output
        assert f"hf-speculate train --config {path}" in result.stderr
        choices = default_choices(str(saved_target), "own.jsonl", "medusa")
        assert read_recipe(path).to_yaml() == recipe_from(recipe_values(choices)).to_yaml()
        assert "# the target's own answers are best" in path.read_text()
        again = run("--target", saved_target, "--data", "own.jsonl", "--init", path)
        assert again.exit_code == 1
        assert "cannot write the recipe" in again.stderr

    def test_init_writes_a_shipped_recipe_with_comments(self):
        result = run("--config", "pycoder-eagle3", "--init", "-")
        assert result.stdout == (REPOSITORY / "training" / "recipes" / "pycoder-eagle3.yaml").read_text()

    def test_init_refuses_options_that_it_would_leave_out(self, tmp_path):
        for extra in (["--set", "a.b=c"], ["--data", "x"]):
            result = run("--config", "pycoder-eagle3", "--init", tmp_path / "x.yaml", *extra)
            assert "--init writes a recipe as it is" in result.stderr


class TestNames:
    def test_read_recipe_lists_recipes_for_an_unknown_name(self):
        with pytest.raises(
            RecipeError, match=r"unknown recipe 'qwen2-0\.5b'.*mean 'qwen2-0\.5b-eagle3'.*pycoder-eagle3"
        ):
            read_recipe("qwen2-0.5b")

    def test_options_win_over_the_recipe_and_set_over_options(self, saved_target, tmp_path):
        data = tmp_path / "data.jsonl"
        data.write_text('{"text": "a"}')
        sets = ("--set", f"data.train={data}", "--set", f"data.eval={data}")
        result = run("--config", "pycoder-eagle3", "--target", "./a: b", *sets, "--data", "d")
        assert "cannot load target: './a: b' is not a folder here" in result.stderr
        result = run("--config", "pycoder-eagle3", "--target", saved_target, "--data", "./d", "--set", "data.train=./c")
        assert "cannot read the data './c'" in result.stderr


def test_train_names_a_missing_option():
    assert "--data must be given, or a recipe with --config: a file, or one of llama" in run("--target", "x").stderr
