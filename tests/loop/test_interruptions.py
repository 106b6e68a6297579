"""After every round, and however generation ends, the cache is that of a fresh prefill of the delivered tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StoppingCriteriaList

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.cache import CACHE_NAME, as_cache
from hf_speculate.errors import DrafterError
from hf_speculate.testing import RaisingDrafter, RandomDrafter, ScriptedDrafter
from hf_speculate_plugins.draft_model import DraftModelDrafter

from ..support.interruptions import RaisingCriterion, assert_cache_is_fresh, assert_usable, perfect
from ..support.models import VOCAB_SIZE


# Eager attention computes its soft-max in fp32, whatever the model's dtype.
TOLERANCE = {"sdpa": 1e-10, "eager": 2e-5}


@pytest.mark.parametrize("attention", TOLERANCE)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_after_every_round_the_cache_is_a_fresh_prefill(tiny_model, prompt, attention, architecture):
    model = tiny_model(architecture, attention=attention, dtype=torch.float64)
    ids, num_checked = prompt(9), 0
    for drafter in (perfect(model, ids), RandomDrafter(vocab_size=VOCAB_SIZE)):
        text, cache = ids, DynamicCache(config=model.config)
        request = {"max_new_tokens": 30, CACHE_NAME: cache, "speculator": Speculator(drafter)}
        for round in hf_speculate.rounds(model, ids, **request):
            text = torch.cat([text, torch.tensor(round.tokens)], dim=1)
            assert_cache_is_fresh(model, cache, text[:, :-1], TOLERANCE[attention])
            num_checked += 1
    assert num_checked > 20


def test_after_every_round_each_row_of_a_batch_is_a_fresh_prefill(tiny_model, prompt):
    model = tiny_model(dtype=torch.float64)
    batch = torch.cat([prompt(9, seed=1), prompt(9, seed=2), prompt(9, seed=3)])
    script = model.generate(batch, max_new_tokens=48)[:, 9:]
    drafter = ScriptedDrafter(script, (3, 2, 2), accuracy=0.7, vocab_size=VOCAB_SIZE)
    cache, texts, was_ragged = DynamicCache(config=model.config), batch.tolist(), False
    request = {"max_new_tokens": 30, CACHE_NAME: cache, "speculator": Speculator(drafter)}
    for round in hf_speculate.rounds(model, batch, **request):
        texts = [text + list(tokens) for text, tokens in zip(texts, round.tokens, strict=True)]
        was_ragged |= len(set(map(len, texts))) > 1
        for slot, row in enumerate(round.tree.rows):
            text, fresh = torch.tensor([texts[row][:-1]]), DynamicCache(config=model.config)
            length = text.shape[1]
            model(text, **as_cache(fresh))
            for ours, plain in zip(cache.layers, fresh.layers, strict=True):
                torch.testing.assert_close(ours.keys[slot : slot + 1, :, :length], plain.keys, atol=1e-10, rtol=0)
                torch.testing.assert_close(ours.values[slot : slot + 1, :, :length], plain.values, atol=1e-10, rtol=0)
    assert was_ragged, "the rows never went apart: the test shows nothing"


class Boom(Exception):
    pass


class Streamer:
    """Collects tokens; raises when it is handed token number `fail_at` (from 0)."""

    def __init__(self, fail_at=None, error=None):
        self.tokens, self.fail_at, self.error, self.ended = [], fail_at, error, False
        self.saw_prompt = False

    def put(self, value):
        if not self.saw_prompt:
            self.saw_prompt = True
            return
        self.tokens.append(value.item())
        if len(self.tokens) - 1 == self.fail_at:
            raise self.error

    def end(self):
        self.ended = True


@pytest.fixture
def setting(tiny_model, prompt):
    model = tiny_model(dtype=torch.float64)
    ids = prompt(9)
    return model, ids, model.generate(ids, max_new_tokens=48)


@pytest.mark.parametrize("error", [Boom("stop"), KeyboardInterrupt()], ids=["exception", "ctrl-c"])
@pytest.mark.parametrize("fail_at", [0, 1, 4, 11])
def test_cache_stays_usable_after_a_streamer_raises(setting, error, fail_at):
    model, ids, text = setting
    cache, streamer = DynamicCache(config=model.config), Streamer(fail_at, error)
    with pytest.raises(type(error)):
        model.generate(
            ids, max_new_tokens=30, streamer=streamer, **as_cache(cache), speculator=Speculator(perfect(model, ids))
        )
    assert streamer.tokens == text[0, 9 : 9 + fail_at + 1].tolist()
    # As in stock: everything but the token that was being delivered.
    assert cache.get_seq_length() == 9 + fail_at
    assert_usable(model, ids, text, cache)


@pytest.mark.parametrize("error", [Boom("stop"), KeyboardInterrupt()], ids=["exception", "ctrl-c"])
@pytest.mark.parametrize("length", [10, 11, 15, 22])
def test_cache_stays_usable_after_a_criterion_raises(setting, error, length):
    model, ids, text = setting
    cache = DynamicCache(config=model.config)
    criteria = StoppingCriteriaList([RaisingCriterion(length, error)])
    with pytest.raises(type(error)):
        model.generate(
            ids,
            max_new_tokens=30,
            stopping_criteria=criteria,
            **as_cache(cache),
            speculator=Speculator(perfect(model, ids)),
        )
    assert 9 <= cache.get_seq_length() < length
    assert_usable(model, ids, text, cache)


@pytest.mark.parametrize(("where", "after"), [("start", 0), ("draft", 0), ("draft", 3), ("observe", 0), ("observe", 3)])
def test_a_drafter_that_raises_is_named_and_leaves_everything_usable(setting, where, after):
    model, ids, text = setting
    cache, streamer = DynamicCache(config=model.config), Streamer()
    speculator = Speculator(RaisingDrafter(where=where, after=after))
    with pytest.raises(DrafterError, match=r"drafter 'raising' raised RuntimeError: scripted failure"):
        model.generate(ids, max_new_tokens=30, streamer=streamer, **as_cache(cache), speculator=speculator)
    assert streamer.tokens == text[0, 9 : 9 + len(streamer.tokens)].tolist()
    if cache.get_seq_length():
        assert_usable(model, ids, text, cache)
    assert torch.equal(model.generate(ids, max_new_tokens=48), text)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("forward", [1, 4], ids=["prefill", "round"])
def test_cache_stays_usable_after_ctrl_c_in_a_target_forward(setting, layer, forward):
    model, ids, text = setting
    cache, calls, speculator = DynamicCache(config=model.config), 0, Speculator(perfect(model, ids))

    def interrupt(module, args):
        nonlocal calls
        calls += 1
        if calls == forward:
            raise KeyboardInterrupt

    hook = model.model.layers[layer].mlp.register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, max_new_tokens=30, **as_cache(cache), speculator=speculator)
    finally:
        hook.remove()
    assert len({layer.get_seq_length() for layer in cache.layers}) == 1
    if forward > 1:
        assert_usable(model, ids, text, cache)
    else:
        ours = model.generate(ids, max_new_tokens=8, **as_cache(cache), speculator=speculator)
        assert torch.equal(ours, text[:, :17])


def test_cache_stays_usable_after_ctrl_c_in_the_draft_model(setting, tiny_model):
    model, ids, text = setting
    draft, calls = tiny_model(seed=4, dtype=torch.float64), 0

    def interrupt(module, args):
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt

    hook = draft.model.layers[0].register_forward_pre_hook(interrupt)
    cache = DynamicCache(config=model.config)
    speculator = Speculator(DraftModelDrafter(draft))
    try:
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, max_new_tokens=30, **as_cache(cache), speculator=speculator)
    finally:
        hook.remove()
    assert_usable(model, ids, text, cache)
    assert torch.equal(model.generate(ids, max_new_tokens=48, speculator=speculator), text)


def test_an_interrupted_sample_leaves_the_rng_where_stock_does(setting):
    model, ids, _ = setting
    states = []
    for speculator in (None, Speculator(RandomDrafter(vocab_size=VOCAB_SIZE))):
        torch.manual_seed(3)
        with pytest.raises(Boom):
            model.generate(ids, do_sample=True, max_new_tokens=30, streamer=Streamer(7, Boom()), speculator=speculator)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
