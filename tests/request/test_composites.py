"""`attach` where another model inside generates (image and speech models), and where none does."""

from __future__ import annotations

import pytest
import torch
from transformers import Blip2Config, Blip2ForConditionalGeneration, LlamaModel

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.errors import SpeculateError, TargetMismatchError, UnsupportedRequestError
from hf_speculate.speculator import attached
from hf_speculate.testing import ScriptedDrafter
from hf_speculate_plugins.draft_model import DraftModelDrafter

from ..support.models import VOCAB_SIZE, build_tiny_model


IMAGE_TOKEN = VOCAB_SIZE - 1
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {
    "model_type": "opt",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "init_std": 0.3,
}


@pytest.fixture
def model():
    """Its `generate` is its own: it embeds the image and calls `generate` of the language model."""
    config = Blip2Config(
        text_config=TEXT,
        vision_config=VISION | {"image_size": 8, "patch_size": 4},
        qformer_config=VISION | {"encoder_hidden_size": 16},
        num_query_tokens=2,
        image_token_index=IMAGE_TOKEN,
    )
    model = Blip2ForConditionalGeneration(config).eval().requires_grad_(False)
    model.generation_config.pad_token_id = model.language_model.generation_config.pad_token_id = 0
    return model


@pytest.fixture
def request_():
    ids = torch.tensor([[IMAGE_TOKEN, IMAGE_TOKEN, 5, 6, 7, 8], [IMAGE_TOKEN, IMAGE_TOKEN, 9, 3, 9, 3]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)),
        "max_new_tokens": 16,
    }


def run(model, request, **kwargs):
    torch.manual_seed(4)
    return model.generate(**request, **kwargs), torch.get_rng_state()


def scripted(text, accuracy=0.8):
    return Speculator(ScriptedDrafter(text, (2, 2, 1), accuracy=accuracy, vocab_size=VOCAB_SIZE))


@pytest.mark.parametrize("do_sample", [False, True])
def test_attached_to_the_outer_model_the_inner_one_is_sped_up(model, request_, do_sample):
    request_["do_sample"] = do_sample
    plain = run(model, request_)
    speculator = hf_speculate.attach(model, scripted(plain[0][:, -16:]))
    ours = run(model, request_)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])
    assert speculator.stats.accepted_tokens > 10
    assert 0 < speculator.stats.rounds < 2 * 16
    assert not speculator.stats.fallbacks


def test_detach_lets_go_of_all(model, request_):
    speculator = hf_speculate.attach(model, "prompt_lookup")
    assert attached(model) is attached(model.language_model) is speculator
    assert hf_speculate.detach(model) is speculator
    assert attached(model) is attached(model.language_model) is None
    run(model, request_)
    assert not speculator.stats.calls
    with pytest.raises(SpeculateError, match="no speculator is attached to this Blip2"):
        hf_speculate.detach(model)


def test_a_name_is_made_for_the_model_that_generates(model):
    draft = build_tiny_model()
    speculator = hf_speculate.AutoSpeculator.from_name("draft_model", model.language_model, model=draft)
    assert hf_speculate.attach(model, speculator) is speculator
    with pytest.raises(TargetMismatchError):
        hf_speculate.attach(model, Speculator(DraftModelDrafter(build_tiny_model(vocab_size=1000))))


def test_an_explicit_speculator_goes_through_the_outer_generate(model, request_):
    plain = run(model, request_)[0]
    speculator = scripted(plain[:, -16:])
    assert torch.equal(run(model, request_, speculator=speculator)[0], plain)
    assert speculator.stats.accepted_tokens > 10


def test_requests_that_cannot_be_sped_up_step_aside_or_are_refused(model, request_):
    beams = request_ | {"num_beams": 2}
    plain = run(model, beams)[0]
    with pytest.raises(UnsupportedRequestError, match="beam_search"):
        run(model, beams, speculator="prompt_lookup")
    speculator = hf_speculate.attach(model, "prompt_lookup")
    assert torch.equal(run(model, beams)[0], plain)
    assert "beam_search" in next(iter(speculator.stats.fallbacks))


def test_models_that_generate_nothing_are_refused():
    base = LlamaModel(build_tiny_model().config)
    for change in (lambda: hf_speculate.attach(base, "prompt_lookup"), lambda: hf_speculate.detach(base)):
        with pytest.raises(SpeculateError, match="LlamaModel has no `generate`"):
            change()
