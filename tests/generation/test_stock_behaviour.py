"""Behaviour that transformers' own generation tests look at, with a speculator attached.

GENERATION_TESTS.md beside this file says for each of those tests where its behaviour is tested, or why it cannot apply.
Here is what no other test of ours covers. Every test attaches a speculator, as a user of code that calls `generate`
itself would, and compares with the same call without.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.testing import RandomDrafter, ScriptedDrafter

from ..support.models import VOCAB_SIZE


NEW_TOKENS = 12


@pytest.fixture(params=["llama", "qwen2"])
def model(request, tiny_model):
    return copy.deepcopy(tiny_model(request.param, attention="eager"))


def both(model, *args, **kwargs):
    """(plain, with an attached speculator) of the same call, from the same seed."""
    torch.manual_seed(0)
    plain = model.generate(*args, **kwargs, speculator=None)
    sequences = plain if isinstance(plain, torch.Tensor) else plain.sequences
    script = sequences[:, -NEW_TOKENS:]
    ours = []
    for drafter in (
        ScriptedDrafter(script, (2, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE),
        RandomDrafter(vocab_size=VOCAB_SIZE),
    ):
        speculator = hf_speculate.attach(model, Speculator(drafter))
        torch.manual_seed(0)
        ours.append(model.generate(*args, **kwargs))
        hf_speculate.detach(model)
        assert speculator.stats.calls == 1, f"it ran plain: {speculator.stats.fallbacks}"
    return plain, ours


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
def test_inputs_by_position_and_by_name(model, prompt, do_sample):
    ids = prompt(7)
    request = {"max_new_tokens": NEW_TOKENS, "do_sample": do_sample}
    for args, kwargs in (((ids,), {}), ((), {"inputs": ids}), ((), {"input_ids": ids})):
        plain, ours = both(model, *args, **kwargs, **request)
        assert plain.shape == (1, 7 + NEW_TOKENS)
        for text in ours:
            assert torch.equal(text, plain)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
def test_types_and_shapes_of_the_dict_output(model, prompt, do_sample):
    config = model.config
    plain, ours = both(
        model,
        torch.cat([prompt(7, seed=1), prompt(7, seed=2)]),
        max_new_tokens=NEW_TOKENS,
        do_sample=do_sample,
        num_return_sequences=2 if do_sample else 1,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        output_attentions=True,
    )
    rows = len(plain.sequences)
    for output in (plain, *ours):
        assert isinstance(output, GenerateDecoderOnlyOutput)
        assert output.sequences.shape == (rows, 7 + NEW_TOKENS)
        for part in (output.scores, output.logits):
            assert [step.shape for step in part] == [(rows, VOCAB_SIZE)] * NEW_TOKENS
            assert all(step.dtype == torch.float32 for step in part)
        for step in range(NEW_TOKENS):
            width, length = (7, 7) if step == 0 else (1, 7 + step)
            assert [layer.shape for layer in output.hidden_states[step]] == [(rows, width, config.hidden_size)] * 3
            assert [layer.shape for layer in output.attentions[step]] == [(rows, 4, width, length)] * 2
        cache = cache_of(output)
        assert len(cache.layers) == config.num_hidden_layers
        for layer in cache.layers:
            assert layer.keys.shape == layer.values.shape == (rows, 2, 7 + NEW_TOKENS - 1, 8)


def test_left_padding_changes_nothing(model, prompt):
    ids = prompt(7)
    padded = torch.nn.functional.pad(ids, (5, 0))
    mask = (torch.arange(12) >= 5).long()[None]
    _, ours = both(model, ids, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_scores=True)
    _, with_padding = both(
        model, padded, attention_mask=mask, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_scores=True
    )
    for alone, other in zip(ours, with_padding, strict=True):
        assert torch.equal(other.sequences[:, 12:], alone.sequences[:, 7:])
        for a, b in zip(alone.scores, other.scores, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_going_on_from_a_cache_equals_going_through(model, prompt):
    ids = prompt(7)
    request = {"return_dict_in_generate": True, "output_scores": True}
    _, whole = both(model, ids, max_new_tokens=NEW_TOKENS, **request)
    _, halves = both(model, ids, max_new_tokens=NEW_TOKENS // 2, **request)
    for through, half in zip(whole, halves, strict=True):
        hf_speculate.attach(model, "prompt_lookup")
        rest = model.generate(
            half.sequences,
            **as_cache(cache_of(half)),
            max_new_tokens=NEW_TOKENS - NEW_TOKENS // 2,
            **request,
        )
        hf_speculate.detach(model)
        assert torch.equal(rest.sequences, through.sequences)
        for a, b in zip(half.scores + rest.scores, through.scores, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        for a, b in zip(cache_of(rest).layers, cache_of(through).layers, strict=True):
            torch.testing.assert_close(a.keys, b.keys, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("logits_to_keep", [0, 1, 3])
def test_however_many_logits_the_prefill_keeps(model, prompt, logits_to_keep):
    plain, ours = both(model, prompt(7), max_new_tokens=NEW_TOKENS, logits_to_keep=logits_to_keep)
    for text in ours:
        assert torch.equal(text, plain)


def test_one_eos_and_a_list_of_one(model, prompt):
    text = model.generate(prompt(7), max_new_tokens=NEW_TOKENS)
    eos = int(text[0, 12])
    texts = [both(model, prompt(7), max_new_tokens=NEW_TOKENS, eos_token_id=value)[1] for value in (eos, [eos])]
    for one, listed in zip(*texts, strict=True):
        assert torch.equal(one, listed)
        assert int(one[0, -1]) == eos


def test_eager_and_sdpa_agree(tiny_model, prompt):
    texts = []
    for attention in ("eager", "sdpa"):
        chosen = copy.deepcopy(tiny_model("qwen2", attention=attention))
        texts.append(both(chosen, prompt(7), max_new_tokens=NEW_TOKENS)[1])
    for eager, sdpa in zip(*texts, strict=True):
        assert torch.equal(eager, sdpa)


def test_stocks_warnings_about_lengths_are_still_there(model, prompt):
    hf_speculate.attach(model, "prompt_lookup")
    with pytest.warns(UserWarning, match="default `max_length`"):
        model.generate(prompt(7))
    with pytest.raises(ValueError, match=r"`max_length`"):
        model.generate(prompt(7), max_length=4, max_new_tokens=None)
    hf_speculate.detach(model)
