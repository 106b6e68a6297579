"""Heads trained on targets as people have them: packed GGUF files, LoRA adapters, bitsandbytes.

Each run is short: the head is written, says what it was trained for, loads on that target again and drafts losslessly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_speculate import AutoSpeculator
from hf_speculate.errors import SpeculateError
from hf_speculate.gguf import load_model
from hf_speculate.gguf.backends import choose_backend
from hf_speculate.gguf.modules import PackedLinear
from hf_speculate.hub import describe_identity
from hf_speculate.hub.targets import adapter_mismatch
from hf_speculate.models import unwrap
from hf_speculate.target.adapters import adapter_fingerprints
from hf_speculate.target.embeddings import embedding_rows, output_rows
from hf_speculate.testing import check_lossless
from hf_speculate_training.methods.eagle import new_eagle3
from hf_speculate_training.run import recipe_from, train_head
from hf_speculate_training.target import TargetSection, load_target
from tests.support.training import BYTE_VOCAB_SIZE

from ...support.random_gguf import FileShape, one_type, write_random_file


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


def drafts_losslessly(folder, model) -> None:
    speculator = AutoSpeculator.from_pretrained(folder, target=model, max_nodes=8)
    prompts = [torch.arange(5 + i, 15 + i) for i in range(2)]
    report = check_lossless(model, speculator, prompts, max_new_tokens=14, eos_token_id=None, do_sample=False)
    assert report.num_cases == 2
    assert speculator.stats.rounds > 0


def provenance(folder) -> dict:
    return json.loads((Path(folder) / "provenance.json").read_text())


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
        """What is packed cannot be read, but asked: the same rows as those of the dequantised file."""
        packed, dense = (load_model(gguf_path, dtype=torch.float32, backend=name) for name in ("auto", "dense"))
        assert isinstance(packed.lm_head, PackedLinear)
        ids = torch.tensor([3, 50, 200])
        for rows in (None, ids):
            found, expected = (output_rows(model.lm_head, 64, torch.float32, rows) for model in (packed, dense))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)
        embeddings = [embedding_rows(model.get_input_embeddings(), BYTE_VOCAB_SIZE + 1) for model in (packed, dense)]
        torch.testing.assert_close(*embeddings, atol=1e-6, rtol=1e-5)
        head = new_eagle3(packed, ids, own_embeddings=True)
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

    def test_a_folder_another_backend_and_transformers_own_loader(self, gguf_path):
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
