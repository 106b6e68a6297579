"""Prompts that are not (only) tokens: embeddings, and the virtual tokens of prompt-learning adapters."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.target import outdated_peft
from hf_speculate.testing.scripted import RandomDrafter, ScriptedDrafter

from ..support.models import VOCAB_SIZE


peft = pytest.importorskip("peft")

ADAPTERS = {
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16),
    "prefix tuning": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
}
RANDOM = RandomDrafter(vocab_size=VOCAB_SIZE)
PLAIN = {"max_new_tokens": 24, "pad_token_id": 0, "return_dict_in_generate": True}


@pytest.fixture(params=ADAPTERS)
def adapted(request, tiny_model):
    if problem := outdated_peft():
        pytest.skip(problem)
    return with_adapter(request.param, tiny_model)


def with_adapter(name, tiny_model):
    model = peft.get_peft_model(copy.deepcopy(tiny_model(dtype=torch.float64)), ADAPTERS[name]).eval()
    for parameter in model.prompt_encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.double()


def drafters(plain, num_prompt):
    script = plain.sequences[:, num_prompt:]
    return [
        ScriptedDrafter(script, (2, 2, 1), accuracy=0.7, vocab_size=VOCAB_SIZE),
        RandomDrafter(vocab_size=VOCAB_SIZE),
    ]


INPUTS = {
    "no mask": {"input_ids": torch.arange(3, 12)[None]},
    "batch": {"input_ids": torch.arange(3, 21).view(2, 9), "attention_mask": torch.ones(2, 9).long()},
    "left padded": {
        "input_ids": torch.arange(3, 21).view(2, 9),
        "attention_mask": (torch.arange(9) >= torch.tensor([[0], [4]])).long(),
    },
}


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("do_sample", [False, True])
def test_text_and_cache_are_plain_generates(adapted, inputs, do_sample):
    torch.manual_seed(1)
    plain = adapted.generate(**inputs, **PLAIN, do_sample=do_sample)
    for drafter in drafters(plain, 9):
        speculator = Speculator(drafter)
        torch.manual_seed(1)
        ours = adapted.generate(**inputs, **PLAIN, do_sample=do_sample, speculator=speculator)
        assert torch.equal(ours.sequences, plain.sequences)
        assert speculator.stats.rounds > 2
        for mine, its in zip(cache_of(ours).layers, cache_of(plain).layers, strict=True):
            torch.testing.assert_close(mine.keys, its.keys, rtol=0, atol=1e-10)


def test_a_cache_cannot_be_continued_behind_virtual_tokens(adapted, prompt):
    """Neither by plain `generate`; ours says so."""
    first = adapted.generate(input_ids=prompt(9), **PLAIN)
    text = torch.cat([first.sequences, prompt(3)], dim=1)
    with pytest.raises(UnsupportedRequestError, match="cannot continue a cache that begins with virtual tokens"):
        adapted.generate(input_ids=text, **as_cache(cache_of(first)), **PLAIN, speculator=Speculator(RANDOM))


def test_a_peft_that_is_too_old_for_transformers_is_named(tiny_model, monkeypatch, prompt):
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "99.0")
    model, speculator = with_adapter("prompt tuning", tiny_model), Speculator(RANDOM)
    with pytest.raises(UnsupportedRequestError, match=r"needs peft >= 99\.0, .* is installed"):
        model.generate(input_ids=prompt(9), max_new_tokens=3, speculator=speculator)


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_prompt_of_embeddings_gives_plain_text(tiny_model, with_ids, padded):
    model, inputs = tiny_model(dtype=torch.float64), INPUTS["left padded" if padded else "batch"]
    given = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]) * 1.1}
    given |= {"attention_mask": inputs["attention_mask"]} | ({"input_ids": inputs["input_ids"]} if with_ids else {})
    plain = model.generate(**given, **PLAIN)
    num_prompt = 9 if with_ids else 0
    for drafter in drafters(plain, num_prompt):
        speculator = Speculator(drafter)
        ours = model.generate(**given, **PLAIN, speculator=speculator)
        assert torch.equal(ours.sequences, plain.sequences)
        assert speculator.stats.rounds > 2


@pytest.mark.parametrize("name", ["prompt_lookup", "draft_model"])
def test_drafters_cope_with_a_prompt_that_has_no_tokens(tiny_model, name):
    model = tiny_model(dtype=torch.float64)
    options = {"model": tiny_model(seed=1, dtype=torch.float64)} if name == "draft_model" else {}
    speculator = AutoSpeculator.from_name(name, target=model, **options)
    embeds = model.get_input_embeddings()(torch.arange(3, 12)[None])
    plain = model.generate(inputs_embeds=embeds, **PLAIN)
    ours = model.generate(inputs_embeds=embeds, **PLAIN, speculator=speculator)
    assert torch.equal(ours.sequences, plain.sequences)
    # and a second turn on the cache, whose first entries are no tokens at all
    mask = torch.ones(1, cache_of(ours).get_seq_length() + 4).long()
    turn = {"input_ids": torch.arange(20, 24)[None], "attention_mask": mask}
    again = model.generate(**turn, **as_cache(cache_of(plain)), **PLAIN)
    ours = model.generate(**turn, **as_cache(cache_of(ours)), **PLAIN, speculator=speculator)
    assert torch.equal(ours.sequences, again.sequences)
