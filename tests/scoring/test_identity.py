"""A model is known again by a sample of its weights, in any dtype and packed, and told from its like."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_speculate.models import unwrap
from hf_speculate.scoring.identity import WeightSample, compare_weights, quantization_label, sample_weights

from ..support.adapters import perturbed
from ..support.models import build_tiny_model


def likeness(first, second):
    return compare_weights(sample_weights(first), sample_weights(second))


class TestSamples:
    def test_cover_embeddings_every_kind_of_layer_and_of_norm(self):
        found = sample_weights(build_tiny_model())
        kinds = {name.replace("layers.0.", "").replace("layers.1.", "") for name in found}
        linear = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
        norms = {"input_layernorm", "post_attention_layernorm", "norm"}
        assert kinds == {f"{name}.weight" for name in {"embed_tokens", *linear, *norms}}
        assert {tuple(sample.values.shape) for sample in found.values()} == {(4, 4), (16,)}

    def test_text_of_them_is_read_back_bit_for_bit(self):
        for sample in sample_weights(build_tiny_model(dtype=torch.bfloat16)).values():
            again = WeightSample.parse(sample.text)
            assert (again.held, again.values.shape) == ("bfloat16", sample.values.shape)
            assert torch.equal(again.values, sample.values)

    @pytest.mark.parametrize("text", ["", "float32", "float32 4x4 00", "float32 2 zz zz", "float32 x 00000000"])
    def test_text_of_something_else_is_refused(self, text):
        with pytest.raises(ValueError, match="no sample of weights"):
            WeightSample.parse(text)


class TestLikeness:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_a_cast_is_the_same_model(self, dtype):
        found = likeness(build_tiny_model(), build_tiny_model(dtype=dtype))
        assert len(found.compared) == 11
        assert not found.changed
        assert found.similarity == pytest.approx(1, abs=1e-4)

    def test_a_fine_tune_is_told_by_what_it_changed(self):
        tuned = copy.deepcopy(build_tiny_model())
        with torch.no_grad():
            for layer in tuned.model.layers:
                layer.self_attn.v_proj.weight += 0.003 * torch.randn_like(layer.self_attn.v_proj.weight)
        found = likeness(build_tiny_model(), tuned)
        (changed,) = found.changed
        assert changed.endswith("self_attn.v_proj.weight")
        assert found.similarity > 0.99

    def test_another_model_of_the_same_sizes_is_unrelated(self):
        assert abs(likeness(build_tiny_model(), build_tiny_model(seed=1)).similarity) < 0.4

    def test_unmerged_adapters_are_no_part_of_the_model(self):
        peft = pytest.importorskip("peft")
        adapted = peft.get_peft_model(copy.deepcopy(build_tiny_model()), peft.LoraConfig(target_modules="all-linear"))
        found = likeness(build_tiny_model(), unwrap(perturbed(adapted)))
        assert (len(found.compared), found.changed) == (11, ())


@pytest.mark.parametrize(
    ("config", "label"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes (nf4)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes (int8)"),
        ({"quant_method": "gptq", "bits": 4}, "gptq (4 bit)"),
        ({"quant_method": "fp8"}, "fp8"),
    ],
)
def test_labels_say_method_and_width(config, label):
    model = copy.deepcopy(build_tiny_model())
    model.config.quantization_config = config
    assert quantization_label(model) == label
