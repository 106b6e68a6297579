"""Draft layers of classes that call their layers in ways of their own.

They compute what the target's layers compute, or are refused before anything is trained or drafted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.errors import TargetMismatchError
from hf_speculate.target import decoder_of
from hf_speculate_plugins.heads import CachedAttention
from hf_speculate_plugins.mtp import MtpDrafter, new_head
from hf_speculate_plugins.mtp.saving import WEIGHTS

from ...support.architectures import build
from ...support.models import SIZES, random_model
from ...support.mtp import load_target, skip_where_not_drafted, write_target
from ...support.versions import needs_transformers


# Class -> part of the sentence that refuses it.
REFUSED = {
    "gpt2": "GPT2Model has no layers, no norm, no rotary_emb",
    "gpt_neox": "GPTNeoXModel has no norm",
    "bloom": "BloomModel has no layers",
    "granitemoehybrid": "GraniteMoeHybridModel has no rotary_emb",
    "stablelm": "its attention passes on no arguments of the layer",
    "minimax": "it attends 0 times, not once",
}
# Classes with something of their own: RoPE by type, a decoder that `get_decoder` misses, norms without weights, with a
# bias, around zero; other names of norms, residuals in parallel, latent attention.
OWN = (
    "gemma3_text",
    "olmo3",
    "llama4_text",
    "olmo",
    "starcoder2",
    "phimoe",
    "gemma",
    "apertus",
    "cohere",
    "deepseek_v3",
)


def last_layer_run(target, ids):
    """Inputs and outputs of the target's last layer with attention, in a plain forward."""
    layer = [each for each in decoder_of(target).layers if hasattr(each, "self_attn")][-1]
    seen = SimpleNamespace()

    def keep(_module, args, kwargs, output):
        seen.inputs = args[0] if args else kwargs["hidden_states"]
        seen.outputs = output if isinstance(output, torch.Tensor) else output[0]

    hook = layer.register_forward_hook(keep, with_kwargs=True)
    target(input_ids=ids)
    hook.remove()
    return seen


@pytest.mark.parametrize("name", OWN)
@torch.no_grad()
def test_a_new_layer_computes_what_the_targets_layer_does(name, prompt):
    target, ids = build(name), prompt(6)  # within every window
    head, seen = new_head(target).eval(), last_layer_run(target, ids)
    head.fc.forward = lambda _joined: seen.inputs
    positions = torch.arange(6)[None]
    attend = CachedAttention(DynamicCache(), is_causal=True)
    found = head(ids, torch.zeros_like(seen.inputs), positions, attend)
    torch.testing.assert_close(found, seen.outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OWN)
@torch.no_grad()
def test_new_norms_change_only_the_scale(name):
    head, states = new_head(build(name)), torch.randn(4, 32) * 3
    for norm in (head.enorm, head.hnorm):
        normed = norm(states)
        torch.testing.assert_close(normed.square().mean(-1), torch.ones(4), rtol=1e-3, atol=1e-3)
        assert torch.cosine_similarity(normed, states, dim=-1).min() > 0.9


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_no_layer_can_be_made_of_is_refused_before_training(name):
    with pytest.raises(TargetMismatchError, match=REFUSED[name]):
        new_head(build(name))


@needs_transformers("5.17", "DiffLlama has attentions of its own alone")
def test_a_layer_that_attends_twice_is_refused():
    config = AutoConfig.for_model("diffllama", **SIZES, num_hidden_layers=2)
    with pytest.raises(
        TargetMismatchError, match=r"DiffLlamaForCausalLM cannot run alone.*it attends 2 times, not once"
    ):
        new_head(random_model(AutoModelForCausalLM.from_config, config))


def test_a_layer_that_cannot_be_made_with_another_attention_is_refused(monkeypatch):
    """As classes of older versions that keep a table of their own."""
    target = build("llama")

    def no_entry(_layer, config, _index):
        raise KeyError(config._attn_implementation)

    monkeypatch.setattr(type(target.model.layers[-1]), "__init__", no_entry)
    with pytest.raises(TargetMismatchError, match=r"cannot be made as a draft layer.*KeyError"):
        new_head(target)


def test_a_stored_layer_that_cannot_run_alone_is_refused_when_it_is_loaded(tmp_path):
    target = build("stablelm")
    tensors = {f"mtp_layers.0.{name}": value for name, value in decoder_of(target).layers[-1].state_dict().items()}
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors |= {
            f"mtp_layers.0.{norm}.{name}": value.clone() for name, value in target.model.norm.state_dict().items()
        }
    tensors["mtp_layers.0.input_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text('{"speculators_model_type": "mtp"}')
    with pytest.raises(TargetMismatchError, match="a decoder layer of StableLmForCausalLM cannot run alone"):
        AutoSpeculator.from_pretrained(tmp_path, target)


def test_a_rotary_module_for_pictures_gets_positions_of_every_kind(tmp_path, prompt):
    """Versions of transformers around 5.17 take nothing else."""
    skip_where_not_drafted("qwen3_5_text")
    target = load_target(write_target(tmp_path, "qwen3_5_text"))
    drafter = MtpDrafter.for_target(target)
    forward, shapes = drafter.head.rotary.forward, set()

    def watched(states, position_ids, **options):
        shapes.add((position_ids.dim(), position_ids.shape[0]))
        return forward(states, position_ids, **options)

    drafter.head.rotary.forward = watched
    ids = prompt(7)
    plain = target.generate(ids, max_new_tokens=8)
    assert torch.equal(target.generate(ids, max_new_tokens=8, speculator=Speculator(drafter)), plain)
    assert shapes == {(3, 3)}
