"""Heads know their target: another one is refused or named as surely as it is known to be another one."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path

import pytest
import torch

from hf_speculate import AutoSpeculator
from hf_speculate.errors import TargetMismatchError
from hf_speculate.stats import HeadRecord
from hf_speculate_gguf import load_model
from hf_speculate_plugins.origin import describe_identity, head_record
from hf_speculate_plugins.origin.targets import _model_name

from ..support.models import VOCAB_SIZE, build_tiny_model
from ..support.random_gguf import FileShape, find_recipe, write_random_file
from ..support.tiny_heads import write_eagle_head


@pytest.fixture
def said(caplog, monkeypatch):
    """Loads a head whose folder says of its target what is given; what was logged."""
    for name in ("transformers", "hf_speculate"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)

    def load(folder, target):
        caplog.clear()
        AutoSpeculator.from_pretrained(folder, target=target, feature_layers=(0, 1, 2))
        return [record.getMessage() for record in caplog.records]

    return load


@pytest.fixture
def head(tmp_path):
    def write(identity=None, **config):
        folder = write_eagle_head(tmp_path / "head", 32, VOCAB_SIZE)
        if identity is not None:
            (tmp_path / "head" / "provenance.json").write_text(json.dumps({"adapters": {}, "identity": identity}))
        path = tmp_path / "head" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return folder

    return write


def named(model, name):
    model = copy.deepcopy(model)
    model.config._name_or_path = model.name_or_path = name
    return model


class TestIdentity:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_own_target_gets_no_warning(self, head, said, dtype):
        folder = head(describe_identity(build_tiny_model(dtype=torch.bfloat16)))
        assert said(folder, build_tiny_model(dtype=dtype)) == []

    def test_head_record_holds_target_and_accuracy(self, head):
        folder = head(describe_identity(build_tiny_model()))
        path = Path(folder) / "provenance.json"
        metrics = {"eval_accuracy_0": 0.5, "eval_mean_acceptance_length": 2.5}
        training = {"training": {"steps": 12}}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"metrics": metrics} | training))
        assert head_record(folder, build_tiny_model()) == HeadRecord(True, 0.5, 2.5, 12)
        tuned = copy.deepcopy(build_tiny_model())
        tuned.model.norm.weight.data += 0.1
        assert head_record(folder, tuned).is_own_target is False
        speculator = AutoSpeculator.from_pretrained(folder, target=build_tiny_model(), feature_layers=(0, 1, 2))
        assert speculator.stats.advice.record == HeadRecord(True, 0.5, 2.5, 12)
        path.unlink()
        assert head_record(folder, build_tiny_model()) == HeadRecord()

    def test_heads_without_provenance_get_no_warning(self, head, said):
        assert said(head(), build_tiny_model()) == []

    def test_a_fine_tune_is_named_once(self, head, said):
        tuned = copy.deepcopy(build_tiny_model())
        with torch.no_grad():
            for parameter in tuned.parameters():
                parameter += 0.003 * torch.randn_like(parameter)
        folder = head(describe_identity(build_tiny_model()))
        (message,) = said(folder, tuned)
        assert "trained for other weights of this architecture" in message
        assert "of 10 tensors that were sampled 10 differ" in message
        assert "`hf-speculate check" in message
        assert said(folder, tuned) == []

    def test_another_depth_is_refused_with_both_numbers(self, head, said):
        folder = head(describe_identity(build_tiny_model()))
        with pytest.raises(TargetMismatchError, match=r"num_hidden_layers 2 .* has 3"):
            said(folder, build_tiny_model(num_layers=3))

    def test_an_extended_vocabulary_is_named_and_compared_by_its_first_rows(self, head, said):
        longer = copy.deepcopy(build_tiny_model())
        longer.resize_token_embeddings(VOCAB_SIZE + 5, mean_resizing=False)
        folder = head(describe_identity(build_tiny_model()))
        (message,) = said(folder, longer)
        assert f"knows {VOCAB_SIZE} tokens and never drafts the others of the 101" in message
        assert head_record(folder, longer).is_own_target
        with pytest.raises(TargetMismatchError, match=r"vocab_size 96 .* has 90"):
            head_record(folder, build_tiny_model(vocab_size=90))

    def test_another_class_is_named(self, head, said):
        identity = describe_identity(build_tiny_model())
        identity["weights"] = {f"h.{name}": text for name, text in identity["weights"].items()}
        (message,) = said(head(identity | {"architecture": "OtherForCausalLM"}), build_tiny_model())
        assert "trained for a OtherForCausalLM, and the target is a LlamaForCausalLM" in message

    @pytest.mark.parametrize("weights", [None, 3, [], {"norm.weight": 3}, {"norm.weight": "float32 4 00"}])
    def test_broken_identities_get_no_warning(self, head, said, weights):
        identity = describe_identity(build_tiny_model()) | {"weights": weights}
        assert said(head(identity), build_tiny_model(seed=1)) == []


class TestQuantisation:
    @pytest.fixture
    def path(self, tmp_path):
        shape = FileShape("llama", VOCAB_SIZE, 32, 64, 3, 4, 2, 256, is_tied=False, embedding_std=1.0)
        write_random_file(tmp_path / "model.gguf", shape, find_recipe("Q4_0", shape))
        return tmp_path / "model.gguf"

    def test_identity_names_the_quantisation(self, path):
        packed, dense = (load_model(path, dtype=torch.float32, backend=name) for name in ("dequantize", "dense"))
        identity = describe_identity(packed)
        assert identity["quantization"] == "GGUF (Q4_0)"
        assert describe_identity(dense)["quantization"] == ""

    def test_another_one_is_named_as_such_and_not_as_another_model(self, path, head, said):
        packed, dense = (load_model(path, dtype=torch.float32, backend=name) for name in ("dequantize", "dense"))
        (message,) = said(head(describe_identity(dense)), packed)
        assert "trained for its target without quantisation, and this one is GGUF (Q4_0)" in message

    def test_the_same_one_is_not_worth_a_word_nor_are_dense_weights_that_may_have_its_values(self, path, head, said):
        packed, dense = (load_model(path, dtype=torch.float32, backend=name) for name in ("dequantize", "dense"))
        folder = head(describe_identity(packed))
        assert said(folder, packed) == said(folder, dense) == []


class TestStatedInConfigs:
    def test_another_depth_is_refused_with_both_numbers(self, head, said):
        with pytest.raises(TargetMismatchError, match=r"a target of 28 layers .num_target_layers.* has 2"):
            said(head(num_target_layers=28), build_tiny_model())

    def test_another_name_is_named(self, head, said):
        verifier = {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct", "architectures": ["LlamaForCausalLM"]}
        folder = head(speculators_config={"verifier": verifier})
        (message,) = said(folder, named(build_tiny_model(), "NousResearch/Hermes-3-Llama-3.1-8B"))
        assert "made for meta-llama/Llama-3.1-8B-Instruct, and the target is NousResearch/Hermes-3-Llama" in message

    @pytest.mark.parametrize("name", ["unsloth/Llama-3.1-8B-Instruct-bnb-4bit", "/models/llama", "examples/pycoder"])
    def test_copies_and_folders_get_no_warning(self, head, said, name):
        folder = head(speculators_config={"verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct"}})
        assert said(folder, named(build_tiny_model(), name)) == []

    def test_another_class_is_named(self, head, said):
        folder = head(speculators_config={"verifier": {"architectures": ["Qwen3ForCausalLM"]}})
        (message,) = said(folder, build_tiny_model())
        assert "made for a Qwen3ForCausalLM, and the target is a LlamaForCausalLM" in message

    def test_an_identity_counts_more_than_a_name(self, head, said):
        folder = head(describe_identity(build_tiny_model()), base_model_name_or_path="owner/first")
        assert said(folder, named(build_tiny_model(), "owner/second")) == []


@pytest.mark.parametrize(
    ("copy_name", "name"),
    [
        ("TheBloke/Mistral-7B-Instruct-v0.2-GPTQ", "mistralai/Mistral-7B-Instruct-v0.2"),
        ("neuralmagic/Llama-3.1-8B-quantized.w4a16", "meta-llama/Llama-3.1-8B"),
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "Qwen/Qwen3-8B"),
    ],
)
def test_copies_go_by_the_name_of_the_model(copy_name, name):
    assert _model_name(copy_name) == _model_name(name)
    assert _model_name(name) != _model_name("Qwen/Qwen3-8B-Base")
