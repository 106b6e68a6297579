"""Requests beside plain `generate`: the same text, or a clear refusal."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.cache import TreeCache, as_cache
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.forward import Scorer
from hf_speculate.testing import RandomDrafter, ScriptedDrafter

from .inputs import padded_batch, random_prompt
from .models import VOCAB_SIZE


SEED = 6
BATCH = padded_batch(random_prompt, (9, 5, 7))


def prefilled(model, texts, shape="tree"):
    """A scorer behind texts that are left padded to one width, and the position of each row's next token."""
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    is_padded = not mask.all()
    cache = TreeCache(DynamicCache(), len(texts))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    model(ids, attention_mask=mask if is_padded else None, position_ids=positions, **as_cache(cache.cache))
    cache.commit_appended()
    return Scorer(model, cache, mask if is_padded else None, shape), list(map(len, texts))


def run(model, speculator=None, **request):
    torch.manual_seed(SEED)
    return model.generate(**{"max_new_tokens": 24, **request}, speculator=speculator), torch.get_rng_state()


def assert_same(ours, plain):
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)


def assert_as_plain(model, accuracy=0.8, branching=(2, 2, 1), **request):
    plain = run(model, **request)
    new = plain[0][:, request["input_ids"].shape[1] :]
    drafter = ScriptedDrafter(new, branching, accuracy=accuracy, vocab_size=VOCAB_SIZE)
    speculator = Speculator(drafter)
    assert_same(run(model, speculator, **request), plain)
    return speculator.stats


def assert_steps_aside(model, reason, request):
    """Only if attached."""
    plain, speculator = run(model, **request()), Speculator(RandomDrafter(vocab_size=VOCAB_SIZE))
    with pytest.raises(UnsupportedRequestError, match=reason):
        run(model, speculator, **request())
    hf_speculate.attach(model, speculator)
    torch.manual_seed(SEED)
    assert torch.equal(model.generate(**{"max_new_tokens": 24, **request()}), plain[0])
    hf_speculate.detach(model)
    assert len(speculator.stats.fallbacks) == 1
