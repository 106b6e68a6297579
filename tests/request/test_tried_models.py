"""Models that nobody has tried: what they may draft, so that the text is that of plain `generate`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional
from transformers import DynamicCache, ImageGPTConfig, ImageGPTForCausalImageModeling, LlamaForCausalLM

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.cache import CACHE_NAME, as_cache
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.request.trial import needs_trial, request_shape
from hf_speculate.testing import EmptyDrafter, RandomDrafter, ScriptedDrafter

from ..support.inputs import padded_batch
from ..support.models import VOCAB_SIZE, build_tiny_model
from ..support.requests import SEED, assert_same, run


class Biased(LlamaForCausalLM):
    def forward(self, *args, bias=0.0, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + bias * torch.linspace(0, 2, VOCAB_SIZE)
        return output


class BiasByLength(Biased):
    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return inputs | {"bias": float(input_ids.shape[1] % 5)}


class BiasByStep(Biased):
    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs):
        kept = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        return kept | {"bias": (kept.get("bias", 0) + 1) % 5}


class Harmless(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return super().prepare_inputs_for_generation(input_ids, **kwargs)

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs):
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)


class Signature(LlamaForCausalLM):
    """Arguments as code of users often has them, named ones only."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)


class AnyArguments(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class WithoutPadding(Signature):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        if attention_mask is not None and attention_mask.dim() == 2 and not attention_mask.all():
            raise ValueError("this model takes no padding")
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)


class WithImage(LlamaForCausalLM):
    """Puts an image in front of the text: more cache entries than tokens."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, pixel_values=None, **kwargs):
        inputs = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            position_ids, inputs = None, torch.cat([pixel_values, inputs], dim=1)
        if attention_mask is not None and attention_mask.dim() == 2:
            missing = kwargs[CACHE_NAME].get_seq_length() + inputs.shape[1] - attention_mask.shape[1]
            attention_mask = functional.pad(attention_mask, (missing, 0), value=1)
        return super().forward(None, attention_mask, position_ids, inputs_embeds=inputs, **kwargs)


def build(kind: type) -> LlamaForCausalLM:
    """A fresh one, untried, with the weights of the tiny Llama."""
    tiny = build_tiny_model()
    model = kind(copy.deepcopy(tiny.config)).eval().requires_grad_(False)
    model.load_state_dict(tiny.state_dict())
    model.generation_config.pad_token_id = 0
    return model


def run_attached(model, speculator, **request):
    hf_speculate.attach(model, speculator)
    torch.manual_seed(SEED)
    try:
        return model.generate(**request), torch.get_rng_state()
    finally:
        hf_speculate.detach(model)


def shape_of(model):
    return request_shape(model, DynamicCache(config=model.config))


REQUESTS = [{}, {"do_sample": True}]


class TestOwnPreparation:
    @pytest.mark.parametrize("kind", [BiasByLength, BiasByStep])
    @pytest.mark.parametrize("drafter", [EmptyDrafter(), RandomDrafter(vocab_size=VOCAB_SIZE)], ids=["none", "random"])
    def test_preparation_that_depends_on_the_step_is_refused(self, kind, drafter, prompt):
        model, speculator = build(kind), Speculator(drafter)
        reason = f"{kind.__name__} does not score several tokens at once as one after another .logits differ"
        with pytest.raises(UnsupportedRequestError, match=reason):
            model.generate(prompt(9), max_new_tokens=4, speculator=speculator)
        for request in REQUESTS:
            request = {"inputs": prompt(9), "max_new_tokens": 12, **request}
            assert_same(run_attached(model, speculator, **request), run(model, **request))
        assert len(speculator.stats.fallbacks) == 1
        assert kind.__name__ in next(iter(speculator.stats.fallbacks))

    @pytest.mark.parametrize("kind", [Harmless, Signature])
    def test_harmless_preparation_takes_trees(self, kind, prompt):
        model = build(kind)
        for request in REQUESTS:
            request = {**padded_batch(prompt, (9, 4)), "max_new_tokens": 20, **request}
            plain = run(model, **request)
            drafter = ScriptedDrafter(plain[0][:, 9:], (2, 2, 1), accuracy=0.9, vocab_size=VOCAB_SIZE)
            speculator = Speculator(drafter)
            assert_same(run(model, speculator, **request), plain)
            assert speculator.stats.accepted_tokens > 10
            assert not speculator.stats.fallbacks

    def test_a_model_that_refuses_padding_is_tried_without(self):
        assert shape_of(build(WithoutPadding)) == ("tree", "")

    def test_arguments_without_names_are_tried_too(self, prompt):
        model = build(AnyArguments)
        assert shape_of(model) == ("chain", "AnyArguments takes no position ids: chains only")
        request = {"inputs": prompt(9), "max_new_tokens": 20}
        plain = run(model, **request)
        speculator = Speculator(ScriptedDrafter(plain[0][:, 9:], vocab_size=VOCAB_SIZE))
        assert_same(run(model, speculator, **request), plain)
        assert speculator.stats.accepted_tokens > 10

    def test_models_that_raise_in_the_trial_get_no_drafts(self):
        class Broken(LlamaForCausalLM):
            def forward(self, *args, **kwargs):
                raise ZeroDivisionError("by\ndesign")

        assert shape_of(build(Broken)) == (
            "single",
            "Broken could not be tried with a few tokens (ZeroDivisionError: by): no drafts",
        )


@pytest.mark.parametrize("request_", REQUESTS, ids=["greedy", "sampled"])
def test_a_model_that_flattens_masks_gets_chains(request_):
    torch.manual_seed(0)
    config = ImageGPTConfig(vocab_size=100, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3)
    model = ImageGPTForCausalImageModeling(config).eval().requires_grad_(False)
    request = {"input_ids": torch.randint(3, 99, (1, 7)), "max_new_tokens": 30, "do_sample": False, **request_}
    plain = run(model, **request)
    drafter = ScriptedDrafter(plain[0][:, 7:], (3, 2, 2), accuracy=0.5, vocab_size=99)
    speculator = Speculator(drafter)
    assert_same(run(model, speculator, **request), plain)
    assert list(speculator.stats.fallbacks) == [
        "ImageGPTForCausalImageModeling scores chains as one token after another, but no trees: chains only"
    ]
    assert speculator.stats.drafted_tokens > 0


class TestMoreEntriesThanTokens:
    def test_an_explicit_speculator_says_so_before_anything_is_emitted(self, prompt):
        class Streamer:
            num_puts = 0

            def put(self, value):
                self.num_puts += value.shape[-1] != 9

        model, streamer = build(WithImage), Streamer()
        cache, before = DynamicCache(config=model.config), torch.get_rng_state()
        pixels = torch.ones(1, 3, 32)
        with pytest.raises(UnsupportedRequestError, match="WithImage keeps 12 cache entries of a prompt of 9 tokens"):
            model.generate(
                prompt(9),
                pixel_values=pixels,
                **as_cache(cache),
                max_new_tokens=4,
                do_sample=True,
                streamer=streamer,
                speculator="prompt_lookup",
            )
        assert streamer.num_puts == cache.get_seq_length() == 0
        assert torch.equal(torch.get_rng_state(), before)


def test_a_known_model_whose_forward_was_replaced_is_tried(prompt):
    """By a method that treats the last position in its own way, as steering code does."""
    model = copy.deepcopy(build_tiny_model())
    cache = DynamicCache(config=model.config)
    assert not needs_trial(model, cache)
    forward = model.forward

    def steered(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits[:, -1] += torch.linspace(0, 3, output.logits.shape[-1])
        return output

    model.forward = steered
    assert needs_trial(model, cache)
    with pytest.raises(UnsupportedRequestError, match="logits differ"):
        model.generate(prompt(9), max_new_tokens=6, speculator=Speculator(RandomDrafter(vocab_size=96)))
