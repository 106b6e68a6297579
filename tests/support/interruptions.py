"""What has to hold after a request was broken off, and what breaks one off."""

from __future__ import annotations

import torch
from transformers import DynamicCache, StoppingCriteria

from hf_speculate import Speculator
from hf_speculate.cache import as_cache
from hf_speculate.testing import ScriptedDrafter

from .models import VOCAB_SIZE


def assert_cache_is_fresh(model, cache, ids, atol):
    """Compares the entries of `cache` with a prefill of `ids` [1, T]."""
    fresh = DynamicCache(config=model.config)
    model(ids, **as_cache(fresh), use_cache=True)
    for ours, plain in zip(cache.layers, fresh.layers, strict=True):
        assert ours.get_seq_length() == ids.shape[1]
        torch.testing.assert_close(ours.keys, plain.keys, atol=atol, rtol=0)
        torch.testing.assert_close(ours.values, plain.values, atol=atol, rtol=0)


def perfect(model, ids, branching=(2, 2, 2)):
    script = model.generate(ids, max_new_tokens=48)[:, ids.shape[1] :]
    return ScriptedDrafter(script, branching, accuracy=0.8, vocab_size=VOCAB_SIZE)


def assert_usable(model, ids, text, cache):
    """The cache holds a prefix of the right text, and generation goes on from it, plain and speculative."""
    length = cache.get_seq_length()
    assert_cache_is_fresh(model, cache, text[:, :length], 1e-10)
    go_on = text[:, : length + 1]
    for speculator in (Speculator(perfect(model, go_on)), None):
        output = model.generate(go_on, **as_cache(cache), max_new_tokens=5, speculator=speculator)
        assert torch.equal(output, text[:, : length + 6])
        cache.crop(length - cache.get_seq_length())


class RaisingCriterion(StoppingCriteria):
    def __init__(self, length, error):
        self.length, self.error = length, error

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == self.length:
            raise self.error
        return torch.zeros(len(input_ids), dtype=torch.bool)
