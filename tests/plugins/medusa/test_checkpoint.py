"""Published layouts of Medusa heads: read, written, refused; the backbone of Medusa-2."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_speculate import AutoSpeculator
from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate_plugins.checkpoints import read_checkpoint
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaHeads, MedusaOptions
from hf_speculate_plugins.medusa.loading import read_heads
from hf_speculate_plugins.medusa.saving import write_heads

from ...support.heads import HIDDEN, MEDUSA_LAYOUTS, VOCAB, random_heads, write_medusa_heads


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(str(folder), strip=()).tensors)


def rewrite(folder: Path, change) -> Path:
    """Applies `change` to the tensors of a Medusa-1 folder."""
    tensors = {name: tensor.clone() for name, tensor in tensors_of(folder).items()}
    change(tensors)
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return folder


@pytest.mark.parametrize("name", MEDUSA_LAYOUTS)
def test_every_layout_round_trips_exactly(tmp_path, name):
    folder = write_medusa_heads(tmp_path, name)
    assert MedusaDrafter.recognizes(str(folder))
    heads = MEDUSA_LAYOUTS[name][1]
    read = read_heads(str(folder)).heads
    assert read.state_dict().keys() == heads.state_dict().keys()
    for key, value in heads.state_dict().items():
        assert torch.equal(read.state_dict()[key], value), key
        assert read.state_dict()[key].dtype == value.dtype


def test_files_and_configs_are_those_of_the_layouts(tmp_path):
    assert sorted(os.listdir(write_medusa_heads(tmp_path / "a", "medusa1"))) == ["config.json", "medusa_lm_head.pt"]
    assert sorted(os.listdir(write_medusa_heads(tmp_path / "b", "v2"))) == ["config.json", "medusa_lm_head.safetensors"]
    assert json.loads((tmp_path / "b" / "config.json").read_text())["version"] == "2"
    truncated = write_medusa_heads(tmp_path / "c", "vllm-truncated")
    config = json.loads((truncated / "config.json").read_text())
    assert config["model_type"] == "medusa"
    assert (config["truncated_vocab_size"], config["vocab_size"]) == (40, VOCAB)
    assert config["medusa_fc_bias"] is True
    assert set(tensors_of(truncated)) >= {"blocks.0.layers.0.weight", "lm_heads.2.weight", "token_map"}


def test_save_pretrained_of_a_loaded_drafter(tmp_path, tiny_model):
    target = tiny_model()
    drafter = MedusaDrafter.from_folder(str(write_medusa_heads(tmp_path / "a")), target)
    drafter.save_pretrained(tmp_path / "b", layout="vllm")
    again = MedusaDrafter.from_folder(str(tmp_path / "b"), target)
    assert all(torch.equal(again.heads.state_dict()[k], v) for k, v in drafter.heads.state_dict().items())


def test_a_layout_that_cannot_express_the_heads_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="vllm"):
        write_heads(str(tmp_path), MEDUSA_LAYOUTS["vllm-truncated"][1], "fasterdecoding", vocab_size=VOCAB)
    with pytest.raises(CheckpointError, match="fasterdecoding"):
        write_heads(str(tmp_path), MEDUSA_LAYOUTS["v2"][1], "vllm", vocab_size=VOCAB)
    with pytest.raises(ValueError, match="unknown layout"):
        write_heads(str(tmp_path), MEDUSA_LAYOUTS["v2"][1], "onnx", vocab_size=VOCAB)


def test_vllm_prefix_and_full_matrices_beside_a_token_map(tmp_path):
    """vLLM strips `medusa_heads.` and takes the mapped rows of full output matrices."""
    heads = random_heads(truncated=40)
    full = torch.randn(3, VOCAB, HIDDEN)
    full[:, heads.token_ids] = heads.output_weight.detach()
    write_heads(str(tmp_path), heads, "vllm", vocab_size=VOCAB)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"lm_heads.{h}.weight": full[h].clone() for h in range(3)}
    save_file({f"medusa_heads.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    read = read_heads(str(tmp_path)).heads
    assert torch.equal(read.output_weight, heads.output_weight)
    assert torch.equal(read.token_ids, heads.token_ids)


def test_an_original_lm_head_equal_to_the_targets_is_shared_not_copied(tmp_path, tiny_model):
    target = tiny_model()
    own = random_heads(outputs=0)
    stored = MedusaHeads(own.block_weight.data, own.block_bias.data, target.lm_head.weight.detach()[None].clone())
    write_heads(str(tmp_path), stored, "vllm", vocab_size=VOCAB)
    assert MedusaDrafter.from_folder(str(tmp_path), target).heads.output_weight is None
    assert MedusaDrafter.from_folder(
        str(write_medusa_heads(tmp_path / "other", "vllm-original-lm-head")), target
    ).heads.vocab_size


def test_head_count_is_read_off_the_tensors_and_config_may_be_absent(tmp_path, tiny_model):
    folder = write_medusa_heads(tmp_path)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 7}))
    assert read_heads(str(folder)).heads.num_heads == 3
    (folder / "config.json").unlink()
    speculator = AutoSpeculator.from_pretrained(folder, target=tiny_model())
    assert speculator.drafter.name == "medusa"
    assert (speculator.drafter.heads.num_heads, speculator.drafter.heads.num_layers) == (3, 1)


def medusa2(folder: Path, target, sharded=False) -> Path:
    target.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    write_heads(str(folder / "heads"), random_heads(), "fasterdecoding", vocab_size=VOCAB)
    tensors |= {f"medusa_head.{name}": tensor for name, tensor in tensors_of(folder / "heads").items()}
    if sharded:
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        shards = {name: f"model-{1 + 2 * i // len(names):05}-of-00002.safetensors" for i, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        for shard in set(shards.values()):
            held = {name: tensor for name, tensor in tensors.items() if shards[name] == shard}
            save_file(held, folder / shard, metadata={"format": "pt"})
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"medusa_num_heads": 3}))
    return folder


@pytest.mark.parametrize("sharded", [False, True])
def test_medusa2_heads_are_read_and_another_backbone_is_logged(tmp_path, tiny_model, sharded, caplog):
    target = tiny_model()
    folder = medusa2(tmp_path, target, sharded)
    speculator = AutoSpeculator.from_pretrained(folder, target=target)
    assert speculator.drafter.heads.num_heads == 3
    assert not caplog.messages
    AutoSpeculator.from_pretrained(folder, target=tiny_model(seed=1))
    assert "Load the target from that checkpoint" in caplog.text


def test_a_slightly_tuned_backbone_is_logged_and_a_cast_one_is_not(tmp_path, tiny_model, caplog):
    folder = medusa2(tmp_path, tiny_model())
    MedusaDrafter.from_folder(str(folder), tiny_model(dtype=torch.bfloat16))
    tuned = copy.deepcopy(tiny_model())
    for parameter in tuned.parameters():
        parameter.add_(0.03 * parameter.std() * torch.randn_like(parameter))
    assert not caplog.messages
    MedusaDrafter.from_folder(str(folder), tuned)
    assert "differs by" in caplog.text


def test_another_target_is_refused_with_both_numbers(tmp_path, tiny_model):
    folder = write_medusa_heads(tmp_path)
    with pytest.raises(TargetMismatchError, match=r"96.*64"):
        MedusaDrafter.from_folder(str(folder), tiny_model(vocab_size=64))
    heads = random_heads(truncated=40)
    with pytest.raises(TargetMismatchError, match=r"vocabulary has 50"):
        MedusaDrafter(heads, tiny_model(), MedusaOptions()).check_target(tiny_model(vocab_size=50))
    wide = MedusaHeads(torch.zeros(1, 1, 48, 48), None, torch.zeros(1, VOCAB, 48))
    with pytest.raises(TargetMismatchError, match=r"size 48.*have 32"):
        MedusaDrafter(wide, tiny_model()).check_target(tiny_model())
    drafter = MedusaDrafter.from_folder(str(folder), tiny_model())
    drafter._num_target_layers = 5
    with pytest.raises(TargetMismatchError, match=r"5 layers.*has 2"):
        drafter.check_target(tiny_model())


@pytest.mark.parametrize(
    ("key", "found"), [("hidden_size", 32), ("num_heads", 3), ("num_hidden_layers", 2), ("truncated_vocab_size", 96)]
)
def test_from_folder_refuses_a_config_that_contradicts_the_weights(tmp_path, tiny_model, key, found):
    folder = write_medusa_heads(tmp_path, "vllm")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: 7}))
    with pytest.raises(CheckpointError, match=f"{key} in config.json is 7, that of the weights {found}"):
        MedusaDrafter.from_folder(str(folder), tiny_model())


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path):
    cases = [
        (lambda t: t.pop("1.0.linear.weight"), r"missing: 1\.0\.linear\.weight"),
        (lambda t: t.pop("2.0.linear.bias"), r"missing: 2\.0\.linear\.bias"),
        (lambda t: t.pop("0.1.weight"), r"missing: 0\.1\.weight"),
        (lambda t: t.update({"extra.weight": torch.zeros(2)}), r"unknown: extra\.weight"),
        (lambda t: t.update({"1.0.linear.bias": torch.zeros(7)}), r"1\.0\.linear\.bias has shape \(7,\)"),
        (lambda t: t.update({"1.1.weight": torch.zeros(7, HIDDEN)}), r"different vocabularies"),
    ]
    for index, (change, message) in enumerate(cases):
        folder = rewrite(write_medusa_heads(tmp_path / str(index)), change)
        with pytest.raises(CheckpointError, match=message):
            read_heads(str(folder))


def test_other_folders_are_not_recognised(tmp_path, tiny_model):
    assert not MedusaDrafter.recognizes(str(tmp_path))
    assert not MedusaDrafter.recognizes(str(tmp_path / "absent"))
    tiny_model().save_pretrained(tmp_path)
    assert not MedusaDrafter.recognizes(str(tmp_path))
