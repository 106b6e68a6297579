"""One-pass heads in files: every layout written and read again, look-alikes told apart, broken files refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_speculate import AutoSpeculator
from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate_plugins.block import BlockDrafter, BlockFiles, write_head
from hf_speculate_plugins.checkpoints import TargetFiles
from hf_speculate_plugins.eagle import EagleDrafter

from ...support.block_heads import KINDS, edited, random_block, spec_of
from ...support.heads import target


OWN = {kind: fields["dialect"] for kind, fields in KINDS.items()}
# Layouts that can say each kind.
LAYOUTS = {
    "dflash": ["zlab", "speculators", "modelopt"],
    "jetspec": ["zlab", "modelopt"],
    "windows": ["speculators"],
    "dspark": ["deepspec", "speculators", "modelopt"],
    "gated": ["deepspec", "speculators", "modelopt"],
    "rnn": ["deepspec", "speculators", "modelopt"],
    "reduced": ["speculators"],
    "sinks": ["modelopt"],
    "modelopt": ["modelopt"],
    "domino": ["modelopt"],
    "xpress": ["speculators"],
    "dflash2": ["zlab"],
    "lilicorr": ["zlab"],
}
CASES = [(kind, layout) for kind, layouts in LAYOUTS.items() for layout in layouts]


def test_every_kind_has_its_own_layout_by_default():
    assert {kind: BlockFiles.default_layout(spec_of(kind)) for kind in KINDS} == OWN


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_save_pretrained_is_read_as_the_same_head(tmp_path, kind, layout):
    model = target()
    drafter = random_block(kind, model)
    saved = drafter.save_pretrained(tmp_path / "head", layout)
    assert (saved.algorithm, saved.layout) == (drafter.spec.method, layout)
    assert BlockDrafter.recognizes(str(tmp_path / "head"))
    assert not EagleDrafter.recognizes(str(tmp_path / "head"))
    again = AutoSpeculator.from_pretrained(str(tmp_path / "head"), target=model).drafter
    free = {"dialect": layout, "window_from_anchor": drafter.spec.window_from_anchor}
    assert dataclasses.replace(again.spec, **free) == dataclasses.replace(drafter.spec, **free)
    assert again.head.shared["embed_tokens"] is model.get_input_embeddings()
    ours, theirs = drafter.head.state_dict(), again.head.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    if drafter.target_ids is not None:
        assert torch.equal(again.target_ids, drafter.target_ids)
    described = BlockDrafter.describe(str(tmp_path / "head"))
    assert (described.algorithm, described.layout) == (drafter.spec.method, layout)


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_that_cannot_say_a_head_are_refused(tmp_path, kind):
    drafter = random_block(kind, target())
    for layout in {"zlab", "deepspec", "speculators", "modelopt"} - set(LAYOUTS[kind]):
        with pytest.raises(CheckpointError, match=f"the {layout} layout cannot express this head: it has "):
            drafter.save_pretrained(tmp_path / layout, layout)
        assert not (tmp_path / layout).exists()
    with pytest.raises(CheckpointError, match="unknown layout 'specforge'; known are 'zlab'"):
        BlockFiles.check_layout("specforge", drafter.spec)


def test_conversion_keeps_every_bit(tmp_path):
    model = target()
    model.save_pretrained(tmp_path / "target")
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    random_block("dspark", model).save_pretrained(first, "speculators")
    with pytest.raises(CheckpointError, match=r"has no embed_tokens.weight .* give the target"):
        BlockDrafter.convert(str(first), second, "deepspec")
    BlockDrafter.convert(str(first), second, "deepspec", TargetFiles(tmp_path / "target"))
    stored = load_file(second / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], model.lm_head.weight)
    BlockDrafter.convert(str(second), third, "speculators", TargetFiles(tmp_path / "target"))
    before, after = (load_file(folder / "model.safetensors") for folder in (first, third))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def zlab(tmp_path, kind="dflash"):
    random_block(kind, target()).save_pretrained(tmp_path / "head", "zlab")
    return tmp_path / "head"


def test_specforge_dspark_is_read(tmp_path):
    """The same tensors as speculators' full-vocabulary heads, its switches inside `dflash_config`."""
    model = target()
    drafter = random_block("dspark", model)
    drafter.save_pretrained(tmp_path / "head", "deepspec")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        del tensors[name]
    save_file(tensors, tmp_path / "head" / "model.safetensors")

    def nest(config):
        names = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head")
        moved = {name: config.pop(name) for name in (*names, "confidence_head_with_markov")}
        config |= {"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark", **moved}}

    spec = BlockDrafter.from_folder(edited(tmp_path / "head", nest), model).spec
    assert spec == dataclasses.replace(drafter.spec, dialect="specforge")


def test_look_alikes_are_told_apart(tmp_path):
    model = target()
    folder = zlab(tmp_path)
    assert BlockDrafter.from_folder(str(folder), model).spec.causal == (False, False)
    edited(folder, lambda config: config["dflash_config"].update(causal_head=True))
    assert BlockDrafter.from_folder(str(folder), model).spec.causal == (True, True)
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
    edited(folder, lambda config: config.update(sliding))
    edited(folder, lambda config: config["dflash_config"].pop("causal_head"))
    spec = BlockDrafter.from_folder(str(folder), model).spec
    assert (spec.windows, spec.causal) == ((4, None), (True, False))
    edited(folder, lambda config: config.update(is_causal=False))
    assert BlockDrafter.from_folder(str(folder), model).spec.causal == (False, False)


def test_a_deepspec_dflash_head_has_the_name_of_a_dspark_head(tmp_path):
    model = target()
    plain = {"method": "dflash", "markov": None, "markov_rank": 0}
    spec = spec_of("dspark", **plain, confidence=False, confidence_with_markov=False)
    head = random_block("dflash", model).head
    wide = type(head)(spec, *head.shared.values())
    wide.load_state_dict(head.state_dict())
    write_head(tmp_path / "head", wide, None, "deepspec", num_target_layers=None)
    assert json.loads((tmp_path / "head" / "config.json").read_text())["architectures"] == ["Qwen3DSparkModel"]
    found = BlockDrafter.from_folder(str(tmp_path / "head"), model).spec
    assert (found.method, found.first_slot, found.dialect) == ("dflash", 0, "deepspec")


@pytest.mark.parametrize("name", ["ptd_token_id", "pard_token", "dspark_noise_token_id"])
def test_the_mask_token_under_other_names_and_given(tmp_path, name):
    model, folder = target(), zlab(tmp_path)
    token = BlockDrafter.from_folder(str(folder), model).spec.mask_token_id
    edited(folder, lambda config: config["dflash_config"].pop("mask_token_id"))
    with pytest.raises(CheckpointError, match=r"lacks mask_token_id.*pass mask_token_id="):
        BlockDrafter.from_folder(str(folder), model)
    assert BlockDrafter.from_folder(str(folder), model, mask_token_id=3).spec.mask_token_id == 3
    edited(folder, lambda config: config.update({name: token}))
    assert BlockDrafter.from_folder(str(folder), model).spec.mask_token_id == token


def test_layers_that_no_file_names_are_guessed_aloud(tmp_path, logged):
    model, folder = target(), str(zlab(tmp_path))
    BlockDrafter.from_folder(folder, model)
    assert not logged()
    edited(tmp_path / "head", lambda config: config["dflash_config"].pop("target_layer_ids"))
    BlockDrafter.from_folder(folder, model, feature_layers=(1, 3))
    assert not logged()
    BlockDrafter.from_folder(folder, model)
    (line,) = logged()
    assert folder in line
    assert "give feature_layers yourself" in line


def test_conventions_override_the_file(tmp_path):
    model = target()
    options = {"feature_layers": [2, 4], "mask_token_id": 3, "first_slot": 0, "causal": True, "rope_theta": 5e5}
    spec = BlockDrafter.from_folder(str(zlab(tmp_path)), model, **options).spec
    assert (spec.feature_layers, spec.mask_token_id, spec.first_slot, spec.causal) == ((2, 4), 3, 0, (True, True))
    assert spec.rope["rope_theta"] == 5e5
    with pytest.raises(CheckpointError, match="takes 2 features, feature_layers names 3"):
        BlockDrafter.from_folder(str(tmp_path / "head"), model, feature_layers=[1, 2, 3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["dflash_config"].pop("mask_token_id"), "lacks mask_token_id"),
        (lambda c: c["dflash_config"].update(mask_token_id="x"), "expected a token id"),
        (lambda c: c.update(block_size=1), "at least one slot that proposes"),
        (lambda c: c.update(block_size=10**9), "block_size"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 2]), "fc.weight takes 64 inputs, no multiple"),
        (lambda c: c["dflash_config"].update(projector_type="other"), "projector_type"),
        (lambda c: c["dflash_config"].update(attention_sink_bias=True), "attention_sink_bias"),
        (lambda c: c.update(rope_parameters={"rope_type": "none", "rope_theta": 1e4}), "makes no one-pass head"),
        (lambda c: c.update(hidden_size=64), "hidden_size in config.json is 64, that of the weights 32"),
        (lambda c: c.update(intermediate_size=7), "intermediate_size in config.json is 7, that of the weights 48"),
        (lambda c: c.clear(), "has no config.json"),
    ],
)
def test_from_folder_refuses_incomplete_or_contradicting_configs(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        BlockDrafter.from_folder(edited(zlab(tmp_path), change), target())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), r"missing: layers\.1\.mlp\.up_proj\.weight"),
        (lambda t: t.update({"extra.weight": torch.zeros(3)}), r"unknown: extra\.weight"),
        (lambda t: t.update({"norm.weight": torch.ones(5)}), r"norm\.weight has shape \(5,\)"),
        (lambda t: t["fc.weight"].fill_(torch.nan), "fc.weight"),
        (lambda t: t.update({"fc.weight": torch.ones(32)}), r"fc\.weight has shape \(32,\), expected 2 dimensions"),
    ],
)
def test_from_folder_refuses_missing_or_misshapen_tensors(tmp_path, change, message):
    folder = zlab(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        BlockDrafter.from_folder(str(folder), target())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(num_target_layers=5), "made for a target of 5 layers"),
        (lambda c: c.update(vocab_size=500), "vocabulary 500"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[0, 40]), "hidden states 0 to 7"),
        (lambda c: c["dflash_config"].update(mask_token_id=96), "mask token of this dflash head is 96"),
    ],
)
def test_from_folder_refuses_heads_of_other_targets(tmp_path, change, message):
    with pytest.raises(TargetMismatchError, match=message):
        BlockDrafter.from_folder(edited(zlab(tmp_path), change), target())
