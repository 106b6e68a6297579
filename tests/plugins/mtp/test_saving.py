"""Draft layers stay with a model that is saved: fine-tuned, merged, in shards, or by the command."""

from __future__ import annotations

import copy
import json

import peft
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_speculate
from hf_speculate import AutoSpeculator
from hf_speculate.errors import CheckpointError
from hf_speculate_plugins.mtp import MtpDrafter, Source, keep
from hf_speculate_plugins.mtp.saving import INDEX, WEIGHTS
from hf_speculate_plugins.mtp.source import SHARD
from hf_speculate_tools import cli

from ...support.mtp import DEPTH, FAMILIES, build, draft_tensors, load_target, write_target
from ...support.tiers import quick_quarter
from ...support.versions import needs_transformers


@pytest.fixture
def folder(tmp_path):
    return write_target(tmp_path / "base", "glm4_moe")


def stored(path):
    with safe_open(path, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def changed(model):
    model = copy.deepcopy(model)
    with torch.no_grad():
        next(model.model.layers[0].mlp.parameters()).add_(0.01)
    return model


@pytest.mark.parametrize("family", quick_quarter(FAMILIES))
@pytest.mark.parametrize("shard", [None, "20KB"])
def test_save_pretrained_keeps_draft_layers_of_a_fine_tuned_model(tmp_path, family, shard):
    target = changed(load_target(write_target(tmp_path / "base", family)))
    options = {} if shard is None else {"max_shard_size": shard}
    names = hf_speculate.save_pretrained(target, tmp_path / "new", **options)
    assert names == sorted(draft_tensors(family))
    found = stored(tmp_path / "new" / SHARD)
    assert all(torch.equal(found[name], tensor) for name, tensor in draft_tensors(family).items())
    weights = json.loads((tmp_path / "new" / INDEX).read_text())["weight_map"]
    assert {name for name, file in weights.items() if file == SHARD} == set(names)
    assert all((tmp_path / "new" / file).exists() for file in weights.values())
    again = load_target(tmp_path / "new")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in target.state_dict().items())
    drafter = MtpDrafter.for_target(again)
    assert torch.equal(drafter.head.fc.weight, MtpDrafter.for_target(target).head.fc.weight)


@needs_transformers("5.17", "the config of GLM-4.5 keeps no count")
def test_save_pretrained_counts_stored_layers_in_the_config(tmp_path, folder):
    target = load_target(folder)
    target.config.num_mtp_layers = 3
    hf_speculate.save_pretrained(target, tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_a_merged_adapter_keeps_them_and_an_adapter_alone_needs_none(tmp_path, folder):
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(load_target(folder), config)
    assert AutoSpeculator.from_name("mtp", model).drafter.spec.num_stored == 1
    assert hf_speculate.save_pretrained(model, tmp_path / "adapter") == []
    assert not (tmp_path / "adapter" / SHARD).exists()
    assert hf_speculate.save_pretrained(model.merge_and_unload(), tmp_path / "merged") == sorted(
        draft_tensors("glm4_moe")
    )


def test_a_model_without_them_is_saved_as_it_is(tmp_path, logged):
    model = copy.deepcopy(build("llama"))
    assert hf_speculate.save_pretrained(model, tmp_path / "new") == []
    assert logged() == []
    AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    model = copy.deepcopy(build("glm4_moe"))
    model.config.num_mtp_layers = 1
    hf_speculate.save_pretrained(model, tmp_path / "counting")
    assert any("has no draft layers, though its config counts some" in line for line in logged())


def test_keep_writes_nothing_that_is_there(folder):
    before = (folder / SHARD).stat().st_mtime_ns
    assert keep(Source.find(folder, DEPTH), folder) == []
    assert (folder / SHARD).stat().st_mtime_ns == before


def test_an_index_of_an_earlier_save_in_shards_is_not_believed(tmp_path, folder):
    target = load_target(folder)
    hf_speculate.save_pretrained(target, tmp_path / "new", max_shard_size="20KB")
    names = hf_speculate.save_pretrained(target, tmp_path / "new")
    assert names == sorted(draft_tensors("glm4_moe"))
    weights = json.loads((tmp_path / "new" / INDEX).read_text())["weight_map"]
    assert set(weights.values()) == {SHARD, WEIGHTS}
    assert MtpDrafter.for_target(load_target(tmp_path / "new")).spec.num_stored == 1


def test_an_upload_comes_after_saving(tmp_path, folder):
    with pytest.raises(ValueError, match="save first, then"):
        hf_speculate.save_pretrained(load_target(folder), tmp_path / "new", push_to_hub=True)
    assert not (tmp_path / "new").exists()


def test_a_model_of_another_depth_is_refused(tmp_path, folder):
    config = copy.deepcopy(build("glm4_moe").config)
    config.num_hidden_layers = 2
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "short")
    with pytest.raises(CheckpointError, match=r"has a config of 2 layers; the draft layers in .* of 4"):
        keep(Source.find(folder, DEPTH), tmp_path / "short")
    assert not (tmp_path / "short" / SHARD).exists()


def test_keep_command_adds_draft_layers(tmp_path, folder):
    load_target(folder).save_pretrained(tmp_path / "new")
    result = CliRunner().invoke(cli.app, ["mtp", "keep", str(folder), str(tmp_path / "new")])
    assert not result.exit_code, result.output
    assert "of 1 draft layer(s), DeepSeek and GLM names" in result.output
    assert MtpDrafter.for_target(load_target(tmp_path / "new")).spec.num_stored == 1
    result = CliRunner().invoke(cli.app, ["mtp", "keep", str(folder), str(tmp_path / "new"), "--json"])
    assert json.loads(result.output)["tensors"] == []
