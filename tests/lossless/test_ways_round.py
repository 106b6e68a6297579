"""What `docs/equal-to-plain.md` says cannot be seen from here, and the ways round it."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from hf_speculate import Speculator
from hf_speculate.cache import CACHE_NAME, as_cache
from hf_speculate.testing import EmptyDrafter, ScriptedDrafter


VOCAB_SIZE, WIDTH = 96, 9
VECTOR = 2 * torch.randn(32, generator=torch.Generator().manual_seed(1))


def last_position(module, args, output):
    output = output.clone()
    output[:, -1] += VECTOR
    return output


def while_decoding(module, args, output):
    return output + VECTOR if output.shape[1] == 1 else output


def everywhere(module, args, output):
    return output + VECTOR


class WhileDecoding:
    """Tells the prompt by the cache, not by the number of tokens."""

    def __init__(self):
        self.is_prompt = True

    def look(self, module, args, kwargs):
        self.is_prompt = kwargs[CACHE_NAME].get_seq_length() == 0

    def __call__(self, module, args, output):
        return output if self.is_prompt else output + VECTOR


@pytest.fixture
def model(tiny_model):
    return copy.deepcopy(tiny_model())


def texts(model, ids, *speculators):
    return [model.generate(ids, max_new_tokens=24, speculator=speculator) for speculator in speculators]


def scripted(text):
    return Speculator(ScriptedDrafter(text[:, WIDTH:], (2, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE))


@pytest.mark.parametrize("hook", [last_position, while_decoding, everywhere])
def test_a_drafter_that_drafts_nothing_shows_hooks_what_stock_shows_them(model, prompt, hook):
    model.model.layers[0].register_forward_hook(hook)
    plain, ours = texts(model, prompt(WIDTH), None, Speculator(EmptyDrafter()))
    assert torch.equal(ours, plain)


def test_steering_hook_can_tell_decoding_from_the_prompt(model, prompt):
    steering = WhileDecoding()
    model.model.layers[0].register_forward_hook(steering)
    model.model.register_forward_pre_hook(steering.look, with_kwargs=True)
    (plain,) = texts(model, prompt(WIDTH), None)
    (ours,) = texts(model, prompt(WIDTH), scripted(plain))
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("keep", ["copy", "clones"])
def test_copied_cache_continues_its_own_branch(model, prompt, keep):
    (text,) = texts(model, prompt(WIDTH), None)
    goes_on = []
    for speculator in (None, scripted(text)):
        cache = DynamicCache(config=model.config)
        out = model.generate(prompt(WIDTH), **as_cache(cache), max_new_tokens=24, speculator=speculator)
        kept = copy.deepcopy(cache)
        if keep == "clones":
            kept = DynamicCache([(layer.keys.clone(), layer.values.clone()) for layer in cache.layers])
        cache.crop(12 - cache.get_seq_length())
        other = torch.cat([out[:, :12], prompt(5, seed=3)], dim=1)
        model.generate(other, **as_cache(cache), max_new_tokens=15, speculator=speculator)
        again = torch.cat([out, prompt(2, seed=4)], dim=1)
        goes_on.append(model.generate(again, **as_cache(kept), max_new_tokens=15))
    assert torch.equal(*goes_on)
