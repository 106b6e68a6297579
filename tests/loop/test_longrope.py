"""Phi-3 and PhiMoE with longrope: where RoPE changes, stock drops the cache and runs the text anew; so do we, once."""

from __future__ import annotations

import inspect
from functools import cache

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, Phi3Config, Phi3ForCausalLM, PhimoeConfig, PhimoeForCausalLM

from hf_speculate import Speculator
from hf_speculate.cache import CACHE_NAME, as_cache, cache_of
from hf_speculate.compatibility import versions
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.testing import EmptyDrafter, RandomDrafter, ScriptedDrafter

from ..support.inputs import padded_batch, random_prompt
from ..support.models import SIZES, VOCAB_SIZE, random_model
from ..support.tiers import quick
from ..support.versions import needs_transformers


LOSES_NOTHING = needs_transformers("5.20", "Phi-3 loses its text where RoPE changes")
BORDER = 32
"""Positions with the short factors."""

MODELS = {
    "phi3": (Phi3ForCausalLM, Phi3Config, {}),
    "phi3 windows": (Phi3ForCausalLM, Phi3Config, {"sliding_window": 8}),
    "phimoe": (PhimoeForCausalLM, PhimoeConfig, {"num_local_experts": 4}),
}


@cache
def build(name="phi3", attention="sdpa"):
    kind, config, options = MODELS[name]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": BORDER,
        "partial_rotary_factor": 1.0,
        "short_mscale": 1.0,
        "long_mscale": 1.2,
    }
    return random_model(
        kind,
        config(
            **SIZES,
            num_hidden_layers=2,
            original_max_position_embeddings=BORDER,
            rope_parameters=rope,
            attn_implementation=attention,
            **options,
        ),
    )


def run(model, inputs, speculator=None, **request):
    torch.manual_seed(7)
    return model.generate(**inputs, speculator=speculator, **request), torch.get_rng_state()


def scripted(text, accuracy=0.8, branching=(2, 2, 1)):
    return Speculator(ScriptedDrafter(text, branching, accuracy=accuracy, vocab_size=VOCAB_SIZE))


def speculators(text):
    return {
        "none": Speculator(EmptyDrafter()),
        "perfect": scripted(text, 1.0, (1, 1, 1, 1)),
        "some": scripted(text),
        "random": Speculator(RandomDrafter(vocab_size=VOCAB_SIZE)),
    }


def single(length):
    return {"input_ids": random_prompt(length)}


@pytest.fixture
def widths(monkeypatch):
    """Of every forward of a model, its tokens and what its cache holds before it."""
    seen = []

    def watch(model):
        original = model.forward

        def forward(input_ids=None, **kwargs):
            cache = kwargs.get(CACHE_NAME)
            seen.append((input_ids.shape[1], cache.get_seq_length() if cache else 0))
            return original(input_ids=input_ids, **kwargs)

        forward.__signature__ = inspect.signature(original)
        monkeypatch.setattr(model, "forward", forward)
        run(model, single(4), Speculator(EmptyDrafter()), max_new_tokens=1)  # the trial is over
        seen.clear()
        return seen

    return watch


def states_of(cache):
    return [state for layer in cache.layers for state in (layer.keys, layer.values)]


def assert_same_cache(mine, theirs):
    assert mine.get_seq_length() == theirs.get_seq_length()
    for a, b in zip(states_of(mine), states_of(theirs), strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


TARGETS = [("phi3", "sdpa"), ("phi3", "eager"), ("phi3 windows", "sdpa"), ("phimoe", "eager")]


@LOSES_NOTHING
@pytest.mark.parametrize("kind", quick(TARGETS, ("phi3", "eager"), ("phi3 windows", "sdpa")), ids="-".join)
class TestText:
    @pytest.mark.parametrize("length", quick([24, 31, 32, 33, 40], 24, 33))
    def test_text_of_one_row_is_plain_across_the_border(self, kind, length):
        model, request = build(*kind), {"max_new_tokens": 16, "do_sample": length % 8 == 0}
        plain = run(model, single(length), **request)
        for kind, speculator in speculators(plain[0][:, length:]).items():
            ours = run(model, single(length), speculator, **request)
            assert torch.equal(ours[0], plain[0]), kind
            assert torch.equal(ours[1], plain[1]), kind

    @pytest.mark.parametrize(
        ("lengths", "request_"),
        [
            ((28, 23, 27), {"do_sample": True}),
            ((28, 23, 27), {"eos_token_id": [*range(3, 9)]}),
            ((32, 5), {}),
            ((20, 36, 33), {}),
        ],
        ids=str,
    )
    def test_text_of_a_padded_batch_is_plain_across_the_border(self, kind, lengths, request_):
        model, inputs = build(*kind), padded_batch(random_prompt, lengths)
        request = {"max_new_tokens": 12, **request_}
        plain = run(model, inputs, **request)
        for kind, speculator in speculators(plain[0][:, max(lengths) :]).items():
            ours = run(model, inputs, speculator, **request)
            assert torch.equal(ours[0], plain[0]), kind
            assert torch.equal(ours[1], plain[1]), kind


@LOSES_NOTHING
class TestSpeed:
    @pytest.mark.parametrize("name", MODELS)
    def test_crossing_the_border_recomputes_the_text_once(self, name, widths):
        model, length, count = build(name), 12, 48
        text = run(model, single(length), max_new_tokens=count)[0][:, length:]
        speculator, seen = scripted(text, 1.0, (1, 1, 1, 1)), widths(model)
        ours = run(model, single(length), speculator, max_new_tokens=count)[0][:, length:]
        assert torch.equal(ours, text)
        rounds = seen[1:]
        anew = [width for width, cached in rounds if cached == 0]
        assert anew == [BORDER + 1]
        assert max(width for width, cached in rounds if 0 < cached < BORDER) == 5
        assert max(width for width, cached in rounds if cached > BORDER) == 5
        assert len(rounds) < count / 3
        assert speculator.stats.target_forwards == len(rounds)


@LOSES_NOTHING
@pytest.mark.parametrize("name", quick(MODELS, "phi3 windows"))
@pytest.mark.parametrize("lengths", [(28,), (30, 22, 26)])
class TestOutputs:
    REQUEST = {"max_new_tokens": 14, "return_dict_in_generate": True}  # noqa: RUF012

    def test_outputs_of_every_step_equal_plain(self, name, lengths):
        model, inputs = build(name, "eager"), padded_batch(random_prompt, lengths)
        parts = ("hidden_states", "attentions", "scores", "logits")
        request = {**self.REQUEST, **{f"output_{part}": True for part in parts}}
        plain = run(model, inputs, **request)[0]
        for kind, speculator in speculators(plain.sequences[:, max(lengths) :]).items():
            ours = run(model, inputs, speculator, **request)[0]
            for part in parts:
                assert len(ours[part]) == len(plain[part]) == 14
                for mine, theirs in zip(ours[part], plain[part], strict=True):
                    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4, msg=f"{kind}: {part}")

    @pytest.mark.parametrize("num_padding", [0, 5])
    def test_returned_cache_equals_plain(self, name, lengths, num_padding):
        """Stock returns another object than the one it was given, which it leaves as it was at the border: by the
        entries, padding counted."""
        model, inputs, results = build(name), padded_batch(random_prompt, lengths), []
        inputs["attention_mask"][:, :num_padding] = 0
        text = run(model, inputs, **self.REQUEST)[0].sequences[:, max(lengths) :]
        for speculator in (None, scripted(text, 1.0, (1, 1, 1, 1))):
            given = DynamicCache(config=model.config)
            output = run(model, inputs, speculator, **as_cache(given), **self.REQUEST)[0]
            assert cache_of(output) is not given
            results.append((given, cache_of(output)))
        for mine, theirs in zip(*reversed(results), strict=True):
            assert_same_cache(mine, theirs)


def test_long_texts_are_refused_where_transformers_loses_them(monkeypatch):
    model, speculator = build(), Speculator(EmptyDrafter())
    monkeypatch.setattr(versions, "installed_version", lambda: "5.19.0")
    said = "Phi3ForCausalLM with more than 32 tokens needs transformers >= 5.20, but 5.19.0 is installed"
    with pytest.raises(UnsupportedRequestError, match=said):
        run(model, single(20), speculator, max_new_tokens=13)
    assert run(model, single(20), speculator, max_new_tokens=12)[0].shape == (1, 32)


class Boom(Exception):
    pass


class Raising(LogitsProcessor):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == self.length:
            raise Boom
        return scores


@LOSES_NOTHING
class TestInterruptions:
    @pytest.mark.parametrize("length", [29, 31, 32, 33, 34, 36])
    @pytest.mark.parametrize("name", ["phi3", "phi3 windows"])
    def test_the_callers_cache_stays_usable(self, name, length):
        model, cache_ = build(name), DynamicCache(config=build(name).config)
        text = run(model, single(20), max_new_tokens=30)[0]
        with pytest.raises(Boom):
            run(
                model,
                single(20),
                scripted(text[:, 20:]),
                max_new_tokens=30,
                **as_cache(cache_),
                logits_processor=[Raising(length)],
            )
        known = cache_.get_seq_length()
        assert known == min(length - 1, BORDER)
        for speculator in (scripted(text[:, known + 1 :]), None):
            turn = {"input_ids": text[:, : known + 1], CACHE_NAME: cache_}
            ours = run(model, turn, speculator, max_new_tokens=12)[0]
            assert torch.equal(ours, text[:, : known + 13])
            if cache_.get_seq_length() > known:
                cache_.crop(known - cache_.get_seq_length())
