"""`cache_implementation="static"`: plain text, and memory for the whole of it from the start."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GenerationConfig, StaticCache

from hf_speculate import Speculator
from hf_speculate.cache import CACHE_NAME, as_cache, cache_of
from hf_speculate.cache.layers import MIN_CAPACITY, PreallocatedLayer
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.graphs.graph_runner import graphs_of
from hf_speculate.testing import ScriptedDrafter

from ..support.models import VOCAB_SIZE
from ..support.requests import BATCH, run
from ..support.versions import has_transformers


STATIC = {"cache_implementation": "static"}


def drafter_of(new):
    return ScriptedDrafter(new, (2, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE)


@pytest.fixture
def allocated(monkeypatch):
    """Numbers of entries of the buffers that were allocated."""
    found, allocate = [], PreallocatedLayer._allocate

    def note(self, name, like, num_entries):
        found.append(num_entries)
        return allocate(self, name, like, num_entries)

    monkeypatch.setattr(PreallocatedLayer, "_allocate", note)
    return found


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("is_batch", [False, True], ids=["one", "batch"])
def test_text_is_that_of_plain_generate(tiny_model, prompt, architecture, do_sample, is_batch):
    options = {"sliding_window": 8} if architecture == "mistral" else {}
    model = tiny_model(architecture, **options)
    request = {**(BATCH if is_batch else {"input_ids": prompt(12)}), "do_sample": do_sample}
    plain, state = run(model, **request)
    assert torch.equal(run(model, **request, **STATIC)[0], plain), "stock's own"
    speculator = Speculator(drafter_of(plain[:, request["input_ids"].shape[1] :]))
    found, after = run(model, speculator, **request, **STATIC)
    assert torch.equal(found, plain)
    assert torch.equal(after, state)
    assert speculator.stats.accepted_tokens > 8
    assert not [reason for reason in speculator.stats.fallbacks if "static" in reason]


def test_memory_is_reserved_once(tiny_model, prompt, allocated):
    model, request = tiny_model(), {"input_ids": prompt(12), "max_new_tokens": 200, "do_sample": False}
    plain, _ = run(model, **request)
    speculator = Speculator(drafter_of(plain[:, 12:]))
    run(model, speculator, **request)
    assert len(set(allocated)) > 1, "without it buffers grow"
    allocated.clear()
    assert torch.equal(run(model, speculator, **request, **STATIC)[0], plain)
    # Keys and values of two layers. The last token is never in the cache.
    assert allocated == [211 + MIN_CAPACITY] * 4
    allocated.clear()
    if not has_transformers("5.15"):
        return  # `max_cache_len` is no option yet
    longer = GenerationConfig(**STATIC, max_new_tokens=200, do_sample=False, max_cache_len=230, pad_token_id=0)
    model.generate(prompt(12), generation_config=longer, speculator=speculator)
    assert set(allocated) == {230 + MIN_CAPACITY}


def test_the_next_turn_continues_the_cache_with_and_without_a_speculator(tiny_model, prompt):
    model, ids, turns = copy.deepcopy(tiny_model()), prompt(12), []
    request = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    for first, second in ((None, None), ("prompt_lookup", None), ("prompt_lookup", "prompt_lookup")):
        output = model.generate(ids, **request, **(STATIC if first else {}), speculator=first)
        text = torch.cat([output.sequences, prompt(5, seed=3)], dim=1)
        output = model.generate(text, **request, **as_cache(cache_of(output)), speculator=second)
        assert cache_of(output).get_seq_length() == output.sequences.shape[1] - 1
        turns.append(output.sequences)
    assert torch.equal(turns[0], turns[1])
    assert torch.equal(turns[0], turns[2])


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_texts_have_one_capacity(tiny_model, prompt):
    model = copy.deepcopy(tiny_model(max_positions=2048))
    request = {"input_ids": prompt(500), "max_new_tokens": 40, "do_sample": False}
    plain, _ = run(model, **request)
    speculator = Speculator(drafter_of(plain[:, 500:]), compile="eager")
    assert torch.equal(run(model, speculator, **request, **STATIC)[0], plain)
    assert not speculator.stats.fallbacks
    # Without it, 512 and then 1024.
    assert {key[2] for _, key in graphs_of(model, "eager").by_key} == {1024}  # pyright: ignore[reportIndexIssue]


def test_generate_refuses_a_callers_static_cache(tiny_model, prompt):
    model = tiny_model()
    cache = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(UnsupportedRequestError, match=r"a StaticCache; .* cache_implementation='static' reserves"):
        model.generate(prompt(6), max_new_tokens=4, **{CACHE_NAME: cache}, speculator="prompt_lookup")
    assert cache.get_seq_length() == 0
