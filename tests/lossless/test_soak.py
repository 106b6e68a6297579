"""Many calls with mixed options in one process: nothing grows, nothing stays behind, nothing is left changed."""

from __future__ import annotations

import copy
import gc
import os
import random
import threading
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.cache import as_cache
from hf_speculate.drafting import RAW_LAST
from hf_speculate.errors import SpeculateError
from hf_speculate.testing import EmptyDrafter, RaisingDrafter, RandomDrafter, ScriptedDrafter
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions
from hf_speculate_plugins.prompt_lookup import PromptLookupDrafter

from ..support.models import VOCAB_SIZE


class Tapping(RandomDrafter):
    feature_layers = (1, RAW_LAST)


class Boom(Exception):
    pass


class BreaksOff:
    """A streamer that raises in the middle."""

    num_puts = 0

    def put(self, value):
        self.num_puts += 1
        if self.num_puts == 4:
            raise Boom

    def end(self):
        raise AssertionError("the stream was broken off")


def one_call(choose: random.Random, model, speculators, ids, cache) -> str:
    """A call of a random kind; returns what kind."""
    ids = torch.cat([ids] * choose.choice([1, 1, 2, 3]))
    request = {"max_new_tokens": choose.randint(1, 12), "do_sample": choose.random() < 0.5}
    request |= choose.choice([{}, {"eos_token_id": list(range(3, 20))}, {"repetition_penalty": 1.3}, {"top_k": 5}])
    request |= choose.choice([{}, {}, {"return_dict_in_generate": True, "output_scores": True}])
    speculator = choose.choice(speculators)
    kind = choose.choice(
        ["plain", "generate", "generate", "stream", "closed", "refused", "drafter", "streamer", "cache"]
    )
    if kind == "plain":
        model.generate(ids, **request, speculator=None)
    elif kind == "generate":
        model.generate(ids, **request, speculator=speculator)
    elif kind in ("stream", "closed"):
        rounds = hf_speculate.stream(model, ids, **request, speculator=speculator)
        for _ in rounds:
            if kind == "closed":
                rounds.close()
                break
    elif kind == "refused":
        with pytest.raises(SpeculateError):
            model.generate(ids, num_beams=2, speculator=speculator)
    elif kind == "drafter":
        broken = Speculator(RaisingDrafter(where=choose.choice(["start", "draft"])))
        request |= {"max_new_tokens": 5, "eos_token_id": None}
        with pytest.raises(SpeculateError):
            model.generate(ids, **request, speculator=broken)
    elif kind == "streamer":
        request |= {"max_new_tokens": 8, "eos_token_id": None}
        with pytest.raises(Boom):
            model.generate(ids[:1], **request, streamer=BreaksOff(), speculator=speculator)
    else:
        text = model.generate(ids[:1], **as_cache(cache), max_new_tokens=4, speculator=speculator)
        model.generate(text, **as_cache(cache), max_new_tokens=4, speculator=speculator)
    return kind


def hooks(model) -> Counter:
    counts: Counter = Counter()
    for name, module in model.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            counts[name, kind] = len(getattr(module, kind))
    return counts


def resident_kib() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


def run(num_calls: int, tiny_model, prompt) -> None:
    model = copy.deepcopy(tiny_model())
    probe, forward = prompt(9), model.forward
    hf_speculate.uninstall()
    torch.manual_seed(7)
    stock = [model.generate(probe, max_new_tokens=20, do_sample=s, return_dict_in_generate=True, output_logits=True)
             for s in (False, True)]  # fmt: skip
    stock_rng = torch.get_rng_state()
    hf_speculate.install()
    speculators = [
        Speculator(RandomDrafter(vocab_size=VOCAB_SIZE)),
        Speculator(ScriptedDrafter(stock[0].sequences[:, 9:], (2, 2), vocab_size=VOCAB_SIZE)),
        Speculator(PromptLookupDrafter.for_target(model, min_ngram=1)),
        Speculator(DraftModelDrafter(tiny_model(seed=1), DraftModelOptions(depth=3, top_k=2))),
        Speculator(Tapping(vocab_size=VOCAB_SIZE)),
        Speculator(EmptyDrafter()),
        Speculator(DraftModelDrafter(tiny_model(seed=1), DraftModelOptions(depth=2)), ahead=True),
    ]
    threads = threading.enumerate()
    choose, kinds = random.Random(0), Counter()

    def calls(count: int) -> None:
        for _ in range(count):
            ids = prompt(choose.randint(1, 12), seed=choose.randrange(50))
            kinds[one_call(choose, model, speculators, ids, DynamicCache(config=model.config))] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.generate(probe, max_new_tokens=2, speculator=speculators[4])  # transformers' own capture hooks stay
        calls(num_calls // 4)  # caches of plans and the allocator reach their size
        state = hooks(model), model.config.to_dict(), model.generation_config.to_dict(), num_tensors(), resident_kib()
        attributes = {name: set(vars(module)) for name, module in model.named_modules()}
        calls(num_calls - num_calls // 4)
    assert len(kinds) == 8, kinds
    assert hooks(model) == state[0]
    assert model.config.to_dict() == state[1]
    assert model.generation_config.to_dict() == state[2]
    assert model.forward == forward
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    # Plans are cached by structure (at most 256 of a few tensors each); nothing grows with the calls.
    assert threading.enumerate() == threads
    growth = num_tensors() - state[3]
    assert growth < 3 * 256, f"{growth} tensors more after {num_calls} calls"
    assert resident_kib() - state[4] < 32 * 1024, f"{resident_kib() - state[4]} KiB more after {num_calls} calls"
    torch.manual_seed(7)
    for plain, do_sample in zip(stock, (False, True), strict=True):
        ours = model.generate(
            probe,
            max_new_tokens=20,
            do_sample=do_sample,
            return_dict_in_generate=True,
            output_logits=True,
            speculator=None,
        )
        assert torch.equal(ours.sequences, plain.sequences)
        assert all(torch.equal(a, b) for a, b in zip(ours.logits, plain.logits, strict=True)), "not bit-equal"
    assert torch.equal(torch.get_rng_state(), stock_rng)


def test_hundred_calls_leave_nothing_behind(tiny_model, prompt):
    run(100, tiny_model, prompt)


@pytest.mark.slow
def test_two_thousand_calls_leave_nothing_behind(tiny_model, prompt):
    run(2000, tiny_model, prompt)


SHORT, LONG = 12, 60
# What a call as a whole may leave, whatever its length.
FEW = 50


def _drafters(text):
    return {"empty": EmptyDrafter(), "scripted": ScriptedDrafter(text, (4, 2, 1), accuracy=0.3, vocab_size=VOCAB_SIZE)}


@pytest.fixture
def _only_new_objects():
    """What there was before is not looked at: collecting is quick then."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_only_new_objects")
@pytest.mark.parametrize(("name", "num_rows", "do_sample"), [("empty", 1, False), ("scripted", 2, True)])
def test_rounds_leave_no_reference_cycle(tiny_model, prompt, name, do_sample, num_rows):
    """What a round made goes at once, not when Python collects garbage in a later round."""
    model, ids = tiny_model(), prompt(8).expand(num_rows, -1)
    request = {"input_ids": ids, "do_sample": do_sample}
    torch.manual_seed(0)
    text = model.generate(**request, max_new_tokens=LONG)[:, ids.shape[1] :]
    speculator = Speculator(_drafters(text)[name], adaptive=False)

    def num_left(num_tokens):
        torch.manual_seed(0)
        gc.collect()
        gc.disable()
        try:
            model.generate(**request, max_new_tokens=num_tokens, speculator=speculator)
            return gc.collect()
        finally:
            gc.enable()

    num_left(SHORT)  # what a first call makes for later ones
    assert num_left(LONG) <= num_left(SHORT) <= FEW
    assert speculator.stats.emitted_tokens > LONG
