"""A model is recognised by a sample of its weights in any dtype, and told from a fine-tune."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_speculate.target import unwrap
from hf_speculate_plugins.origin import compare_weights, sample_weights

from ..support.adapters import perturbed
from ..support.models import build_tiny_gpt2, build_tiny_model


def compared(first, second):
    return compare_weights(sample_weights(first), sample_weights(second))


def test_samples_cover_every_kind_of_layer_and_of_norm():
    found = sample_weights(build_tiny_model())
    kinds = {name.replace("layers.0.", "").replace("layers.1.", "") for name in found}
    linear = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    norms = {"input_layernorm", "post_attention_layernorm", "norm"}
    assert kinds == {f"{name}.weight" for name in {*linear, *norms}}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_is_the_same_model(dtype):
    found = compared(build_tiny_model(), build_tiny_model(dtype=dtype))
    assert len(found) == 10
    assert all(found.values())


def test_a_fine_tune_is_told_by_what_it_changed():
    tuned = copy.deepcopy(build_tiny_model())
    with torch.no_grad():
        for layer in tuned.model.layers:
            layer.self_attn.v_proj.weight += 0.003 * torch.randn_like(layer.self_attn.v_proj.weight)
    (changed,) = (name for name, is_same in compared(build_tiny_model(), tuned).items() if not is_same)
    assert changed.endswith("self_attn.v_proj.weight")


def test_sample_weights_leaves_out_offloaded_weights():
    model = copy.deepcopy(build_tiny_model())
    model.model.norm.to("meta")
    assert "norm.weight" not in sample_weights(model)


def test_compare_weights_compares_equal_names_only():
    assert not compared(build_tiny_model(), build_tiny_gpt2())


def test_compare_weights_ignores_unmerged_adapters():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(copy.deepcopy(build_tiny_model()), peft.LoraConfig(target_modules="all-linear"))
    found = compared(build_tiny_model(), unwrap(perturbed(adapted)))
    assert len(found) == 10
    assert all(found.values())


@pytest.mark.parametrize(
    "text", [None, "", "float32", "float32 4x4 00", "float32 2 zz zz", "float32 x 00000000", "GGUF(Q4_0) 1 00000000"]
)
def test_compare_weights_ignores_broken_samples(text):
    ours = sample_weights(build_tiny_model())
    assert compare_weights(ours, dict.fromkeys(ours, text)) == {}
