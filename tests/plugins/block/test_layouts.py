"""The layouts of autumn 2026 in tiny heads: what their switches mean, what contradicts them, what is not read."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_speculate import AutoSpeculator
from hf_speculate.errors import CheckpointError
from hf_speculate_plugins.block import BlockDrafter
from hf_speculate_plugins.heads.head import with_sink
from hf_speculate_tools.check import check_head
from hf_speculate_tools.check.conventions import alternatives

from ...support.block_heads import edited, random_block
from ...support.heads import target


def written(tmp_path, kind, layout, change=None):
    """The folder of a head whose tensors `change` has edited."""
    folder = tmp_path / "head"
    random_block(kind, target()).save_pretrained(folder, layout)
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
    return folder


def test_attention_sink_is_a_logit_without_a_value():
    generator = torch.Generator().manual_seed(0)
    queries, keys, values, sink = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 4, 3, 8), (2, 4, 6, 8), (2, 4, 6, 8), (4,))
    )
    mask = torch.zeros(2, 1, 3, 6, dtype=torch.float64)
    mask[1, :, :, :2] = -torch.inf
    for given in (None, mask):
        scores = queries @ keys.mT / 8**0.5 + (0 if given is None else given)
        weights = torch.cat([scores, sink[None, :, None, None].expand(2, 4, 3, 1)], dim=-1).softmax(-1)[..., :-1]
        found = torch.nn.functional.scaled_dot_product_attention(
            queries, *(parts := with_sink(sink, keys, values, given, 3))[:2], attn_mask=parts[2]
        )
        torch.testing.assert_close(found, weights @ values)


def turned_pairs(states, theta=10000.0):
    """RoPE of neighbouring values, as complex numbers [N, heads, d]."""
    pairs = torch.view_as_complex(states.unflatten(-1, (-1, 2)))
    size = states.shape[-1]
    angles = torch.arange(len(states))[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)


def test_interleaved_rope_turns_neighbouring_values(tmp_path):
    """The products of queries and keys are those of RoPE that turns pairs, and nothing is left to convert."""
    folder = written(tmp_path, "dspark", "deepspec")
    plain = load_file(folder / "model.safetensors")
    edited(folder, lambda config: config.update(rope_is_neox_style=False))
    drafter = BlockDrafter.from_folder(str(folder), target())
    assert drafter.spec.rope_interleaved
    assert {"rope_interleaved": False} in [each.options for each in alternatives(drafter, target(), {})]
    attention, inputs = drafter.head.layers[0].self_attn, torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    seen = []
    rotary = drafter.head.rotary(inputs[None], torch.arange(5)[None])
    attention(inputs[None], rotary, lambda _, queries, keys, values: seen.append((queries, keys)) or queries)
    queries, keys = seen[0]

    def reference(name):
        part = f"layers.0.self_attn.{name}"
        states = (inputs @ plain[f"{part}_proj.weight"].T).unflatten(-1, (-1, 8))
        return turned_pairs(torch.nn.functional.rms_norm(states, (8,), plain[f"{part}_norm.weight"], 1e-6))

    expected = torch.einsum("nhd,mhd->hnm", reference("q"), reference("k").repeat_interleave(2, dim=1))
    torch.testing.assert_close((queries @ keys.repeat_interleave(2, dim=1).mT)[0], expected, atol=1e-4, rtol=1e-4)
    drafter.save_pretrained(tmp_path / "again", "speculators")
    again = BlockDrafter.from_folder(str(tmp_path / "again"), target())
    assert not again.spec.rope_interleaved
    assert all(torch.equal(value, again.head.state_dict()[name]) for name, value in drafter.head.state_dict().items())
    stated = BlockDrafter.from_folder(edited(folder, lambda c: c.pop("rope_is_neox_style")), target())
    asked = BlockDrafter.from_folder(str(folder), target(), rope_interleaved=True)
    for name in ("q_proj", "k_norm"):
        mine, theirs, other = (getattr(each.head.layers[1].self_attn, name).weight for each in (drafter, asked, stated))
        assert torch.equal(mine, theirs)
        assert not torch.equal(mine, other)


def as_nemotron(config):
    config["dflash_config"] = {"use_swa": True, "swa_window_size": 6, "causal": True, "attention_sink_bias": True}
    config["sample_from_anchor"] = False


def test_head_with_own_embeddings_uses_the_targets_output_matrix(tmp_path):
    """Nemotron's DSpark in DeepSpec's layout: windows, sinks, a causal block, an anchor that proposes nothing."""

    def change(tensors):
        del tensors["lm_head.weight"]
        tensors["embed_tokens.weight"] = torch.randn(96, 32)
        tensors |= {f"layers.{layer}.self_attn.attention_sink_bias": torch.ones(4) for layer in (0, 1)}

    model = target()
    drafter = BlockDrafter.from_folder(edited(written(tmp_path, "dspark", "deepspec", change), as_nemotron), model)
    spec = drafter.spec
    assert (spec.dialect, spec.first_slot, spec.windows, spec.causal) == ("deepspec", 1, (6, 6), (True, True))
    assert spec.attention_sinks
    assert drafter.head.shared == {"embed_tokens": None, "lm_head": model.get_output_embeddings()}
    with pytest.raises(CheckpointError, match=r"modelopt layout cannot express this head: .*embeddings of its own"):
        drafter.save_pretrained(tmp_path / "again", "modelopt")


@pytest.mark.parametrize("nested", [True, False])
def test_from_folder_reads_flat_and_nested_dspark_names(tmp_path, nested):
    folder = written(tmp_path, "rnn", "modelopt")
    tensors = load_file(folder / "model.safetensors")
    assert {"markov_w1.weight", "markov_w2.weight", "joint_proj.weight", "joint_proj.bias"} <= tensors.keys()
    if nested:  # then only the place of the other keys is ModelOpt's
        tensors = {f"markov_head.{k}" if k.startswith(("markov", "joint")) else k: v for k, v in tensors.items()}
        save_file(tensors, folder / "model.safetensors")
    spec = BlockDrafter.from_folder(str(folder), target()).spec
    dialect = "specforge" if nested else "modelopt"
    assert spec == dataclasses.replace(random_block("rnn", target()).spec, dialect=dialect)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c.update(swa_window_size=4),
            r"swa_window_size in config\.json is 4, expected at least the block's 5",
        ),
        (lambda c: c.update(shift_label=False), r"shift_label in config\.json is False, expected true"),
        (lambda c: c.update(attention_value_scale=0.5), "attention_value_scale"),
        (lambda c: c.update(attention_sink_bias=False), r"unknown: layers\.0\.self_attn\.attention_sink_bias"),
    ],
)
def test_from_folder_refuses_contradicting_modelopt_keys(tmp_path, change, message):
    folder = edited(written(tmp_path, "modelopt", "modelopt"), lambda config: change(config["dflash_config"]))
    with pytest.raises(CheckpointError, match=message):
        BlockDrafter.from_folder(folder, target())


def test_from_folder_refuses_duplicate_and_missing_tensors(tmp_path):
    def both(tensors):
        tensors["markov_head.markov_w1.weight"] = tensors["markov_w1.weight"].clone()

    with pytest.raises(CheckpointError, match=r"unknown: markov_w1\.weight"):
        BlockDrafter.from_folder(str(written(tmp_path, "rnn", "modelopt", both)), target())
    folder = written(tmp_path, "sinks", "modelopt", lambda t: t.pop("layers.1.self_attn.attention_sink_bias"))
    with pytest.raises(CheckpointError, match=r"missing: layers\.1\.self_attn\.attention_sink_bias"):
        BlockDrafter.from_folder(str(folder), target())


def test_windows_of_modelopt_need_full_attention_in_layer_types(tmp_path):
    """Else the types give the windows. The length may stand in either of two places."""
    folder = edited(written(tmp_path, "modelopt", "modelopt"), lambda c: c["dflash_config"].pop("swa_window_size"))
    assert BlockDrafter.from_folder(folder, target()).spec.windows == (6, 6)
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "use_sliding_window": True}
    with pytest.raises(CheckpointError, match=r"use_swa in config\.json is True, expected false where layer_types"):
        BlockDrafter.from_folder(edited(tmp_path / "head", lambda config: config.update(sliding)), target())


def test_domino_and_xpress_repeat_sizes_in_their_configs(tmp_path):
    folder = written(tmp_path, "domino", "modelopt")
    assert {"prefix_gru.weight_ih_l0", "embed_proj.2.weight"} <= load_file(folder / "model.safetensors").keys()
    for change, message in (
        ({"gru_hidden_dim": 7}, r"gru_hidden_dim in config\.json is 7, that of the weights 6"),
        ({"emb_dim": 7, "gru_hidden_dim": 6}, r"emb_dim in config\.json is 7, that of the weights 4"),
        ({"pure_draft_prefix_len": 5, "emb_dim": 4}, r"pure_draft_prefix_len in config\.json is 5, expected .* 0 to 4"),
        ({"pure_draft_prefix_len": 1, "shift_label": False}, r"shift_label in config\.json is False, expected true"),
    ):
        edited(folder, lambda config, change=change: config["dflash_config"].update(change))
        with pytest.raises(CheckpointError, match=message):
            BlockDrafter.from_folder(str(folder), target())
    folder = written(tmp_path / "second", "xpress", "speculators")
    assert {"refiner_head.mix_l", "refiner_head.readout.weight"} <= load_file(folder / "model.safetensors").keys()
    with pytest.raises(CheckpointError, match=r"xpress_mlp_ratio in config\.json is 4, that of the weights 2"):
        BlockDrafter.from_folder(edited(folder, lambda config: config.update(xpress_mlp_ratio=4)), target())


def test_from_pretrained_finds_a_head_in_its_targets_folder(tmp_path):
    """SGLang keeps a target's head in `dspark/`. It is a head for that target only: a draft model for others."""
    target().save_pretrained(tmp_path / "target")
    random_block("dspark", target()).save_pretrained(tmp_path / "target" / "dspark")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    found = AutoSpeculator.from_pretrained(tmp_path / "target", target=model).drafter
    assert isinstance(found, BlockDrafter)
    assert found.spec == random_block("dspark", model).spec
    other = AutoSpeculator.from_pretrained(tmp_path / "target", target=target(depth=9)).drafter
    assert other.name == "draft_model"
    check = check_head(tmp_path / "target", model, [torch.tensor([5, 9, 11, 3])], depth=2, max_new_tokens=12)
    assert check.drafter == "block"


def carried_inputs(head, seen, codes):
    """Inputs [1, S, r] that a Markov head makes of the slots [1, S, F], each after a token of these codes [1, S, c]."""
    found, carried = [], None
    for slot in range(seen.shape[1]):
        inputs, carried = head.markov_head.inputs(seen[:, slot, None], codes[:, slot, None], carried, slot)
        found.append(inputs)
    return torch.cat(found, dim=1)


def test_domino_is_torchs_gru_over_the_embeddings_of_the_path():
    head = random_block("domino", target()).head
    markov, generator = head.markov_head, torch.Generator().manual_seed(4)
    states, path = torch.randn(1, 5, 32, generator=generator), torch.tensor([[7, 3, 9, 9, 40]])
    gru = torch.nn.GRU(32, 6, bias=False, batch_first=True)
    gru.load_state_dict({"weight_ih_l0": markov.gru_input.weight, "weight_hh_l0": markov.gru_state.weight})
    prefix, _ = gru(head.embed(path))
    expected = torch.nn.functional.silu(torch.cat([states, prefix], dim=-1) @ markov.joint_proj.weight.T)
    expected[:, :1] = 0  # the first slot is left alone
    torch.testing.assert_close(carried_inputs(head, states, head.codes(path)), expected)


def test_xpress_mixes_the_slots_of_a_block_causally():
    head = random_block("xpress", target()).head
    refiner, slots = head.markov_head.refiner, torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(4))
    codes = head.codes(torch.tensor([[2, 7, 3, 9, 40]]))
    mean = slots.mean(1, keepdim=True) @ refiner.down_g.weight.T
    own = torch.cat([slots @ refiner.down_h.weight.T, mean.expand(-1, 5, -1), codes], dim=-1) @ refiner.in_proj.weight.T
    mixed = own + torch.einsum("rkj,njr->nkr", refiner.mix_l.tril(), own)
    gated = torch.nn.functional.silu(mixed @ refiner.mlp_gate.weight.T) * (mixed @ refiner.mlp_up.weight.T)
    expected = mixed + gated @ refiner.mlp_down.weight.T
    torch.testing.assert_close(carried_inputs(head, refiner.features(slots), codes), expected)
