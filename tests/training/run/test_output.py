"""What a run leaves behind: a head that loads and is lossless, its provenance, card, curves; and what it refuses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_speculate import AutoSpeculator
from hf_speculate.errors import SpeculateError
from hf_speculate.testing import check_lossless
from hf_speculate_training.__main__ import app
from hf_speculate_training.run import prepare, read_recipe, recipe_from, train_head


PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("method", "layout"),
    [("eagle3", "speculators"), ("eagle3", "specforge"), ("medusa", "fasterdecoding"), ("eagle1", "safeailab")],
)
def test_a_trained_head_loads_and_is_lossless(recipe_values, saved_target, method, layout):
    recipe_values["method"] = {"name": method}
    recipe_values["output"]["layout"] = layout
    folder = train_head(recipe_from(recipe_values))
    model = AutoModelForCausalLM.from_pretrained(saved_target)
    speculator = AutoSpeculator.from_pretrained(folder, target=model, max_nodes=8)
    prompts = [torch.arange(5 + i, 15 + i) for i in range(2)]
    report = check_lossless(model, speculator, prompts, max_new_tokens=16, eos_token_id=None, do_sample=False)
    assert report.num_cases == 2
    assert speculator.stats.rounds > 0


@pytest.fixture(scope="module")
def finished(make_recipe_values, tmp_path_factory):
    """A recipe that was run, and its folder."""
    recipe = recipe_from(make_recipe_values(tmp_path_factory.mktemp("run") / "out"))
    return recipe, train_head(recipe)


def test_provenance_says_what_a_head_was_made_from(finished):
    recipe, folder = finished
    found = json.loads((folder / "provenance.json").read_text())
    assert found["status"] == "complete"
    assert found["target"]["name"] == Path(recipe.target.path).name
    assert found["target"]["dtype"] == "float32"
    assert len(found["target"]["fingerprint"]) == 64
    assert found["recipe"]["training"] == recipe.training
    assert found["data"]["train"]["num_documents"] == 12
    assert len(found["data"]["train"]["fingerprint"]) == 64
    assert found["seed"] == 0
    assert found["training"]["steps"] == 4
    assert found["training"]["tokens"] == 4 * 4 * 48
    assert found["training"]["seconds"] > 0
    assert found["sessions"][0]["from_step"] == 0
    assert found["metrics"]["eval_mean_acceptance_length"] >= 1
    assert found["environment"]["versions"]["transformers"]
    assert found["head"]["trained_parameters"] > 0
    for name in ("model.safetensors", "config.json"):
        assert found["files"][name] == hashlib.sha256((folder / name).read_bytes()).hexdigest()


def test_the_folder_holds_card_curves_and_the_recipe(finished):
    recipe, folder = finished
    assert (folder / "curves.png").read_bytes().startswith(PNG)
    card = (folder / "README.md").read_text()
    assert "mean_acceptance_length" in card
    assert "speculative-decoding" in card
    assert read_recipe(folder / "recipe.local.yaml").to_yaml() == recipe.to_yaml()
    assert read_recipe(folder / "recipe.yaml").to_yaml() == recipe.to_yaml(publish=True)
    assert not list(folder.glob("*.partial"))


def test_the_written_head_is_the_best_one(recipe_values):
    """The weights that were saved are those of the best checkpoint, not of the last step."""
    recipe_values["training"] |= {"max_steps": 6, "learning_rate": 3e-3}
    recipe = recipe_from(recipe_values)
    folder = train_head(recipe)
    outcome = json.loads((folder / "provenance.json").read_text())["training"]
    history = json.loads((folder / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    lengths = {e["step"]: e["eval_mean_acceptance_length"] for e in history if "eval_mean_acceptance_length" in e}
    assert outcome["best_step"] == max(lengths, key=lambda step: (lengths[step], -step))
    best = json.loads((folder / "provenance.json").read_text())["metrics"]["eval_mean_acceptance_length"]
    assert best == max(lengths.values())


def test_a_folder_that_is_not_empty_is_refused(recipe_values):
    folder = Path(recipe_values["output"]["folder"])
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(SpeculateError, match="is not empty"):
        train_head(recipe_from(recipe_values))
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_nothing_is_written_when_the_data_are_empty(recipe_values, tmp_path):
    (tmp_path / "none.jsonl").write_text("")
    recipe_values["data"] = {"train": str(tmp_path / "none.jsonl")}
    with pytest.raises(SpeculateError, match="no records"):
        train_head(recipe_from(recipe_values))
    assert not Path(recipe_values["output"]["folder"]).exists()


def test_a_target_that_is_not_there(recipe_values):
    recipe_values["target"]["path"] = "./nowhere"
    with pytest.raises(SpeculateError, match=r"cannot load the target '\./nowhere'"):
        prepare(recipe_from(recipe_values))


def test_prompts_that_fill_the_context_are_refused(recipe_values):
    recipe_values["evaluation"]["max_new_tokens"] = 252
    with pytest.raises(SpeculateError, match="leaves room for 252 new tokens"):
        prepare(recipe_from(recipe_values))


def test_features_from_a_cache_give_the_same_head(recipe_values, tmp_path):
    recipe_values["training"] |= {"eval_strategy": "no", "max_steps": 3}
    del recipe_values["data"]["eval"]
    weights = []
    for source in ("online", "cache"):
        recipe_values["features"] = {"source": source, "folder": str(tmp_path / "features")}
        recipe_values["output"]["folder"] = str(tmp_path / source)
        folder = train_head(recipe_from(recipe_values))
        weights.append((folder / "model.safetensors").read_bytes())
    assert (tmp_path / "features").is_dir()
    assert weights[0] == weights[1]


class TestCommand:
    def run(self, values, tmp_path, *arguments):
        config = tmp_path / "recipe.yaml"
        config.write_text(yaml.safe_dump(values))
        return CliRunner().invoke(app, ["train", "--config", str(config), *arguments])

    def test_train_with_overrides(self, recipe_values, tmp_path):
        other = tmp_path / "other"
        result = self.run(recipe_values, tmp_path, "--set", f"output.folder={other}", "--set", "training.max_steps=2")
        assert result.exit_code == 0, result.output
        assert "AutoSpeculator.from_pretrained" in result.output
        assert json.loads((other / "provenance.json").read_text())["training"]["steps"] == 2

    def test_dry_run_writes_nothing(self, recipe_values, tmp_path):
        result = self.run(recipe_values, tmp_path, "--dry-run")
        assert result.exit_code == 0, result.output
        for part in ("head.fc.weight", "optimizer steps", "MiB (computed)", "measured"):
            assert part in result.output
        assert not Path(recipe_values["output"]["folder"]).exists()

    def test_errors_are_speculate_errors(self, recipe_values, tmp_path):
        result = self.run(recipe_values, tmp_path, "--set", "training.learnin_rate=1")
        assert isinstance(result.exception, SpeculateError)
        assert "Did you mean 'learning_rate'" in str(result.exception)
