"""Models that see images: what they do with them behind the prompt is stock's, or a speculator steps aside."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GitConfig,
    GitForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MllamaConfig,
    MllamaForConditionalGeneration,
)

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.cache import as_cache
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.testing import RandomDrafter, ScriptedDrafter

from ..support.models import SIZES
from ..support.pictures import IMAGE, QWENS, qwen
from ..support.tiers import quick
from ..support.versions import skip_before


VOCAB_SIZE = 96
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
TEXT = SIZES | {"num_hidden_layers": 4}


def llava():
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config={"model_type": "clip_vision_model", **VISION},
            text_config={"model_type": "llama", **TEXT},
            image_token_index=IMAGE,
            vision_feature_layer=-1,
            image_seq_length=4,
        )
    ), {"input_ids": torch.tensor([[5, IMAGE, IMAGE, IMAGE, IMAGE, 6, 7]])}


def gemma3():
    ids = torch.tensor([[5, 93, IMAGE, IMAGE, IMAGE, IMAGE, 94, 6, 7]])
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            vision_config={"model_type": "siglip_vision_model", **VISION},
            text_config={**TEXT, "head_dim": 8, "sliding_window": 8},
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
            boi_token_index=93,
            eoi_token_index=94,
        )
    ), {"input_ids": ids, "token_type_ids": (ids == IMAGE).long()}


def git():
    """Puts the image into the cache, in front of the text."""
    config = GitConfig(vision_config=VISION, **{k: v for k, v in TEXT.items() if k != "num_key_value_heads"})
    return GitForCausalLM(config), {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}


def mllama():
    """Makes a cross-attention mask of its own for every step."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "max_num_tiles": 1,
        "intermediate_layers_indices": [0],
        "vision_output_dim": 32,
        "supported_aspect_ratios": [[1, 1]],
    }
    config = MllamaConfig(vision_config=vision, text_config={**TEXT, "cross_attention_layers": [1]})
    inputs = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9]]),
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 5, 1, 1, dtype=torch.long),
    }
    return MllamaForConditionalGeneration(config), inputs


def made(make):
    torch.manual_seed(0)
    model, inputs = make()
    model.eval().requires_grad_(False)
    model.generation_config.pad_token_id = 0
    if "pixel_values" in inputs:
        return model, inputs
    image = torch.randn(1, 3, 8, 8)
    image = image[:, None, None] if make is mllama else image
    return model, {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"]), "pixel_values": image}


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("make", [llava, gemma3])
def test_images_in_the_text_are_sped_up(make, do_sample):
    model, inputs = made(make)
    request = {**inputs, "max_new_tokens": 14, "do_sample": do_sample}
    torch.manual_seed(3)
    plain = model.generate(**request)
    width = inputs["input_ids"].shape[1]
    for drafter in (
        ScriptedDrafter(plain[:, width:], (2, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE),
        RandomDrafter(vocab_size=VOCAB_SIZE),
    ):
        speculator = Speculator(drafter)
        torch.manual_seed(3)
        assert torch.equal(model.generate(**request, speculator=speculator), plain)
        assert not speculator.stats.fallbacks


@pytest.mark.parametrize("do_sample", quick([False, True]))
@pytest.mark.parametrize("kind", quick(QWENS, "qwen2_5_vl", "qwen3_5"))
def test_pictures_that_take_fewer_positions_than_tokens(kind, do_sample):
    """Trees of padded batches, chains of hybrids. What stock keeps of a request for the next one stays its own."""
    if kind == "qwen3_5":
        skip_before("5.14", "recurrent layers take no drafts")
    model, inputs = made(partial(qwen, kind))
    request = {**inputs, "max_new_tokens": 16, "do_sample": do_sample}
    torch.manual_seed(3)
    plain = model.generate(**request)
    deltas = model.model.rope_deltas
    assert deltas.unique().numel() == 2  # the pictures shorten each row by another number
    width = inputs["input_ids"].shape[1]
    for drafter in (
        ScriptedDrafter(plain[:, width:], (2, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE),
        RandomDrafter(vocab_size=VOCAB_SIZE),
    ):
        speculator = Speculator(drafter, adaptive=False)
        torch.manual_seed(3)
        assert torch.equal(model.generate(**request, speculator=speculator), plain)
        assert torch.equal(model.model.rope_deltas, deltas)
        assert bool(speculator.stats.fallbacks) == (kind == "qwen3_5")
    assert speculator.stats.drafted_tokens


def test_a_conversation_about_a_picture_goes_on():
    """Only new tokens are passed: positions go on behind those that the pictures left out."""
    model, inputs = made(partial(qwen, "qwen2_5_vl"))
    request = {name: values[:1] for name, values in inputs.items()} | {"pixel_values": inputs["pixel_values"][:24]}
    texts = []
    for drafter in (None, RandomDrafter(vocab_size=VOCAB_SIZE)):
        named = {} if drafter is None else {"speculator": Speculator(drafter, adaptive=False)}
        cache = DynamicCache(config=model.config)
        first = model.generate(**request, **as_cache(cache), max_new_tokens=6, **named)
        longer = torch.cat([first, torch.tensor([[11, 12, 13]])], dim=1)
        later = {"attention_mask": torch.ones_like(longer), "mm_token_type_ids": (longer == IMAGE).long()}
        texts.append(model.generate(longer, **later, **as_cache(cache), max_new_tokens=8, **named))
    assert torch.equal(*texts)


def test_exact_forwards_have_one_kind_of_positions():
    model, inputs = made(partial(qwen, "qwen2_vl"))
    speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE), exact=True)
    with pytest.raises(UnsupportedRequestError, match="counts positions of texts and pictures apart"):
        model.generate(**inputs, max_new_tokens=4, speculator=speculator)


@pytest.mark.parametrize(("make", "why"), [(git, "does not score several tokens"), (mllama, "cross_attention_mask")])
def test_other_image_models_give_the_reason_or_run_plain(make, why):
    model, inputs = made(make)
    plain = model.generate(**inputs, max_new_tokens=9)
    speculator = hf_speculate.attach(model, Speculator(RandomDrafter(vocab_size=VOCAB_SIZE)))
    try:
        assert torch.equal(model.generate(**inputs, max_new_tokens=9), plain)
    finally:
        hf_speculate.detach(model)
    assert why in " ".join(speculator.stats.fallbacks)
    with pytest.raises(UnsupportedRequestError, match=why):
        model.generate(**inputs, max_new_tokens=9, speculator=speculator)
