"""The output of runs: heads that load and are lossless, provenance, card, curves; for packed and adapted targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_speculate import AutoSpeculator
from hf_speculate.errors import SpeculateError
from hf_speculate.target import unwrap
from hf_speculate.target.adapters import adapter_fingerprints
from hf_speculate.target.embeddings import embedding_rows, output_rows
from hf_speculate.testing import check_lossless
from hf_speculate_gguf import load_model
from hf_speculate_gguf.native.backends import choose_backend
from hf_speculate_gguf.native.modules import PackedLinear
from hf_speculate_plugins.origin import describe_identity
from hf_speculate_plugins.origin.targets import adapter_mismatch
from hf_speculate_training.__main__ import app
from hf_speculate_training.methods.eagle import Eagle3Shape, new_eagle3
from hf_speculate_training.run import read_recipe, recipe_from, train_head
from hf_speculate_training.target import TargetSection, load_target
from tests.support.random_gguf import FileShape, one_type, write_random_file
from tests.support.training import BYTE_VOCAB_SIZE


PNG = b"\x89PNG\r\n\x1a\n"


def provenance(folder) -> dict:
    return json.loads((Path(folder) / "provenance.json").read_text())


def drafts_losslessly(folder, model) -> None:
    speculator = AutoSpeculator.from_pretrained(folder, target=model, max_nodes=8)
    prompts = [torch.arange(5 + i, 15 + i) for i in range(2)]
    report = check_lossless(model, speculator, prompts, max_new_tokens=14, eos_token_id=None, do_sample=False)
    assert report.num_cases == 2
    assert speculator.stats.rounds > 0


@pytest.mark.parametrize(
    ("method", "layout"),
    [("eagle3", "specforge"), ("medusa", "fasterdecoding"), ("eagle1", "safeailab")],
)
def test_a_trained_head_loads_and_is_lossless(recipe_values, saved_target, method, layout):
    recipe_values["method"] = {"name": method}
    recipe_values["output"]["layout"] = layout
    folder = train_head(recipe_from(recipe_values))
    drafts_losslessly(folder, AutoModelForCausalLM.from_pretrained(saved_target))


@pytest.fixture(scope="module")
def finished(make_recipe_values, tmp_path_factory):
    """A recipe that was run, and its folder."""
    recipe = recipe_from(make_recipe_values(tmp_path_factory.mktemp("run") / "out"))
    return recipe, train_head(recipe)


def test_provenance_says_what_a_head_was_made_from(finished):
    recipe, folder = finished
    found = provenance(folder)
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
    found = provenance(folder)
    history = json.loads((folder / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    lengths = {e["step"]: e["eval_mean_acceptance_length"] for e in history if "eval_mean_acceptance_length" in e}
    assert found["training"]["best_step"] == max(lengths, key=lambda step: (lengths[step], -step))
    assert found["metrics"]["eval_mean_acceptance_length"] == max(lengths.values())


def test_a_folder_that_is_not_empty_is_refused(recipe_values):
    folder = Path(recipe_values["output"]["folder"])
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(SpeculateError, match="is not empty"):
        train_head(recipe_from(recipe_values))
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


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
        assert f"{other}/checkpoint-* (" in result.output
        assert provenance(other)["training"]["steps"] == 2

    def test_dry_run_writes_nothing(self, recipe_values, tmp_path):
        result = self.run(recipe_values, tmp_path, "--dry-run")
        assert result.exit_code == 0, result.output
        for part in ("head.fc.weight", "optimizer steps", "MiB (computed)", "measured"):
            assert part in result.output
        assert not Path(recipe_values["output"]["folder"]).exists()


METHODS = ("eagle3", "medusa")


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory) -> str:
    """A random Qwen2 in Q8_0 that says other things than its last token."""
    path = tmp_path_factory.mktemp("gguf") / "tiny-Q8_0.gguf"
    shape = FileShape("qwen2", BYTE_VOCAB_SIZE + 1, 64, 96, 3, 4, 2, 256, is_tied=False, embedding_std=1.0)
    write_random_file(path, shape, one_type("Q8_0"))
    return str(path)


@pytest.fixture(scope="module")
def adapter_folder(saved_target, tmp_path_factory) -> str:
    """A LoRA of `saved_target` that changes its text."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj", "lm_head"])
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(saved_target), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=generator)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder, save_embedding_layers=False)
    return str(folder)


class TestGguf:
    @pytest.mark.parametrize("method", METHODS)
    def test_a_head_for_a_packed_file(self, recipe_values, saved_target, gguf_path, method):
        recipe_values["target"] = {"path": gguf_path, "tokenizer": str(saved_target), "dtype": "float32"}
        recipe_values["method"] = {"name": method}
        folder = train_head(recipe_from(recipe_values))
        drafts_losslessly(folder, load_model(gguf_path, dtype=torch.float32))
        target = provenance(folder)["target"]
        assert target["name"] == Path(gguf_path).name
        fastest = choose_backend("auto", torch.device("cpu"), torch.float32).name
        assert target["quantization"] == {"quant_method": "gguf", "types": ["Q8_0"], "backends": [fastest, "rows"]}

    def test_the_head_begins_with_the_packed_output_rows(self, gguf_path):
        """Packed rows cannot be read, but computed: they equal those of the dequantised file."""
        packed, dense = (load_model(gguf_path, dtype=torch.float32, backend=name) for name in ("auto", "dense"))
        assert isinstance(packed.lm_head, PackedLinear)
        ids = torch.tensor([3, 50, 200])
        for rows in (None, ids):
            found, expected = (output_rows(model.lm_head, 64, torch.float32, rows) for model in (packed, dense))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)
        embeddings = [embedding_rows(model.get_input_embeddings(), BYTE_VOCAB_SIZE + 1) for model in (packed, dense)]
        torch.testing.assert_close(*embeddings, atol=1e-6, rtol=1e-5)
        head = new_eagle3(packed, Eagle3Shape(own_embeddings=True), ids)
        torch.testing.assert_close(head.lm_head.weight.data, output_rows(dense.lm_head, 64, torch.float32, ids))
        torch.testing.assert_close(head.embed_tokens.weight.data, embeddings[1])

    @pytest.mark.parametrize("backend", ["auto", "dequantize"])
    def test_states_get_a_gradient_through_a_packed_output_matrix(self, gguf_path, backend):
        gradients = []
        for name in (backend, "dense"):
            states = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
            logits = load_model(gguf_path, dtype=torch.float32, backend=name).lm_head(states)
            logits.log_softmax(-1)[..., 5].sum().backward()
            gradients.append(states.grad)
        torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-3)

    def test_load_target_takes_every_gguf_backend_and_names_unknown_ones(self, gguf_path):
        section: Any = {"path": str(Path(gguf_path).parent), "gguf_file": Path(gguf_path).name}
        packed: Any = load_target(TargetSection(**section, gguf_backend="dequantize"), torch.device("cpu"))
        assert packed.lm_head.backend.name == "dequantize"
        stock = load_target(TargetSection(**section, gguf_backend="transformers"), torch.device("cpu"))
        assert type(stock.lm_head) is torch.nn.Linear
        with pytest.raises(SpeculateError, match="unknown GGUF backend 'fast'"):
            load_target(TargetSection(**section, gguf_backend="fast"), torch.device("cpu"))
        with pytest.raises(SpeculateError, match=r"target\.quantization does not go with a GGUF file"):
            load_target(TargetSection(**section, quantization="4bit"), torch.device("cpu"))


class TestLora:
    def adapted(self, saved_target, adapter_folder):
        peft = pytest.importorskip("peft")
        return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(saved_target), adapter_folder).eval()

    @pytest.mark.parametrize("method", METHODS)
    def test_a_head_for_an_adapter(self, recipe_values, saved_target, adapter_folder, method):
        recipe_values["target"]["adapter"] = adapter_folder
        recipe_values["method"] = {"name": method}
        folder = train_head(recipe_from(recipe_values))
        model = self.adapted(saved_target, adapter_folder)
        drafts_losslessly(folder, model)
        found = provenance(folder)
        assert found["recipe"]["target"]["adapter"] == Path(adapter_folder).name
        base = Path(saved_target).name
        assert found["target"]["adapters"] == {"default": {"type": "PeftType.LORA", "base": base}}
        assert found["adapters"] == adapter_fingerprints(unwrap(model))
        assert found["identity"] == describe_identity(unwrap(model))  # of the base
        assert "chat_template" in found
        assert adapter_mismatch(str(folder), unwrap(model)) == ""
        with model.disable_adapter():
            assert "with the PEFT adapter 'default', and none is" in adapter_mismatch(str(folder), unwrap(model))
            drafts_losslessly(folder, model)

    def test_the_head_begins_with_the_adapted_output_rows(self, saved_target, adapter_folder):
        model = self.adapted(saved_target, adapter_folder)
        found = output_rows(unwrap(model).get_output_embeddings(), 32, torch.float32)
        merged = model.merge_and_unload().get_output_embeddings()
        assert type(merged) is torch.nn.Linear
        torch.testing.assert_close(found, merged.weight.detach(), atol=1e-5, rtol=1e-4)
