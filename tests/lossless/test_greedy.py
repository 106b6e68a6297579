"""Greedy text equals plain `generate` token for token (fp32, or a proven tie), whatever is drafted."""

from __future__ import annotations

import itertools
from functools import cache, partial

import pytest
import torch
from transformers import AutoTokenizer

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.cache import cache_of
from hf_speculate.testing import EmptyDrafter, RandomDrafter, ScriptedDrafter, check_lossless

from ..support.models import VOCAB_SIZE
from ..support.tiers import quick
from ..support.versions import skip_before


NEW_TOKENS = 24
SHAPES = {"chain5": (1,) * 5, "tree": (3, 2, 2, 1), "wide": (8, 4)}


def plain_continuation(model, prompt, num_tokens=NEW_TOKENS + 8):
    return _continuation(model, tuple(prompt[0].tolist()), num_tokens)


@cache
def _continuation(model, prompt, num_tokens):
    """The models are not changed by anybody."""
    return model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, speculator=None)[:, len(prompt) :]


def scripted(model, prompt, shape, accuracy, num_tokens=NEW_TOKENS + 8):
    script = plain_continuation(model, prompt, num_tokens)
    return ScriptedDrafter(script, SHAPES[shape], accuracy=accuracy, vocab_size=model.config.vocab_size)


DRAFTERS = {
    **{
        f"{name}-{shape}": partial(scripted, shape=shape, accuracy=accuracy)
        for (name, accuracy), shape in itertools.product(
            {"perfect": 1.0, "mixed": 0.6, "adversarial": 0.0}.items(), SHAPES
        )
    },
    "random": lambda model, prompt, **_: RandomDrafter(vocab_size=model.config.vocab_size),
    "empty": lambda model, prompt, **_: EmptyDrafter(),
    "prompt_lookup": lambda model, prompt, **_: AutoSpeculator.from_name("prompt_lookup", target=model).drafter,
}


MODELS = list(itertools.product(["llama", "qwen2"], ["untied", "tied"], ["eager", "sdpa"]))
# Each value of each is in one of them.
SOME_MODELS = (("llama", "untied", "sdpa"), ("qwen2", "tied", "eager"))


@pytest.mark.parametrize("kind", quick(MODELS, *SOME_MODELS), ids="-".join)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_the_targets_own(tiny_model, prompt, kind, drafter):
    architecture, tied, attention = kind
    model = tiny_model(architecture, tied=tied == "tied", attention=attention)
    for length in (1, 33):
        ids = prompt(length)
        speculator = Speculator(DRAFTERS[drafter](model, ids))
        report = check_lossless(model, speculator, [ids], max_new_tokens=NEW_TOKENS)
        assert report.num_identical == 1, report.ties


def test_a_perfect_drafter_is_accepted_to_its_full_depth(tiny_model, prompt):
    model, ids = tiny_model(), prompt(9)
    for branching in ((1,) * 4, (3, 2, 2, 2)):
        drafter = ScriptedDrafter(plain_continuation(model, ids, 48), branching, vocab_size=VOCAB_SIZE)
        output = model.generate(ids, max_new_tokens=41, speculator=Speculator(drafter), return_dict_in_generate=True)
        stats = output.speculation
        # One token from the prefill, then eight rounds of four drafts and a bonus token.
        assert stats.target_forwards == 8
        assert stats.mean_acceptance_length == 5
        assert dict(stats.accepted_histogram) == {4: 8}


class TestEnds:
    """Where generation stops: budget, context, EOS as root, inside the accepted path, as bonus token."""

    @pytest.mark.parametrize("drafter", ["perfect-tree", "mixed-chain5", "random", "prompt_lookup"])
    def test_the_context_is_filled_to_its_last_position(self, tiny_model, prompt, drafter):
        model = tiny_model(max_positions=32)
        for length in (20, 31):
            ids = prompt(length)
            speculator = Speculator(DRAFTERS[drafter](model, ids))
            report = check_lossless(model, speculator, [ids], max_new_tokens=32 - length)
            assert report.num_identical == 1
            assert report.num_tokens == 32 - length

    @pytest.mark.parametrize("place", range(12))
    def test_eos_ends_the_text_wherever_it_falls_in_a_round(self, tiny_model, prompt, place):
        # Drafts are four deep, so the 12 places are: root (the prefill's token), each depth, and bonus, twice over.
        model, ids = tiny_model(), prompt(8)
        script = plain_continuation(model, ids)
        eos = script[0, place].item()
        first = script[0].tolist().index(eos)
        plain = model.generate(ids, max_new_tokens=NEW_TOKENS, eos_token_id=eos)
        assert plain.shape[1] == ids.shape[1] + first + 1
        for branching in ((1,) * 4, (2, 2, 2, 2)):
            drafter = ScriptedDrafter(script, branching, vocab_size=VOCAB_SIZE)
            output = model.generate(
                ids,
                max_new_tokens=NEW_TOKENS,
                eos_token_id=eos,
                speculator=Speculator(drafter),
                return_dict_in_generate=True,
            )
            assert torch.equal(output.sequences, plain)
            assert cache_of(output).get_seq_length() == plain.shape[1] - 1


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}


@pytest.mark.parametrize("architecture", quick(["llama", "qwen2"]))
@pytest.mark.parametrize("rope", ROPES)
def test_rope_types_across_their_boundary(tiny_model, prompt, rope, architecture):
    if rope == "dynamic":
        skip_before("5.15", "stock keeps the frequencies of the last long text")
    model = tiny_model(architecture, max_positions=48, rope=tuple(ROPES[rope].items()))
    for length in (30, 46):
        ids = prompt(length)
        for drafter in ("perfect-tree", "mixed-chain5"):
            speculator = Speculator(DRAFTERS[drafter](model, ids))
            report = check_lossless(model, speculator, [ids], max_new_tokens=NEW_TOKENS)
            assert report.num_identical == 1, report.ties


def test_rope_that_looks_at_the_longest_position_in_a_batch(tiny_model, prompt):
    skip_before("5.15", "stock keeps the frequencies of the last long text")
    model = tiny_model(max_positions=48, rope=tuple(ROPES["dynamic"].items()))
    batch = torch.stack([torch.nn.functional.pad(prompt(n)[0], (44 - n, 0)) for n in (44, 12)])
    inputs = {"input_ids": batch, "attention_mask": (batch != 0).long()}
    plain = model.generate(**inputs, max_new_tokens=NEW_TOKENS)
    drafter = ScriptedDrafter(plain[:, 44:], (2, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE)
    assert torch.equal(model.generate(**inputs, max_new_tokens=NEW_TOKENS, speculator=Speculator(drafter)), plain)


@pytest.mark.parametrize("drafter", quick(["mixed-tree", "random"]))
def test_fp64_has_no_ties_at_all(tiny_model, prompt, drafter):
    model, ids = tiny_model("qwen2", dtype=torch.float64), prompt(15)
    report = check_lossless(model, Speculator(DRAFTERS[drafter](model, ids)), [ids], max_new_tokens=100)
    assert report.num_identical == 1


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bf16_differences_are_proven_ties(tiny_model, prompt, attention):
    model = tiny_model("llama", dtype=torch.bfloat16, attention=attention)
    for length in (4, 9, 15, 22):
        ids = prompt(length)
        check_lossless(model, Speculator(scripted(model, ids, "tree", 0.8)), [ids], max_new_tokens=NEW_TOKENS)


@pytest.mark.rest
@pytest.mark.parametrize("drafter", ["mixed-wide", "prompt_lookup"])
def test_a_real_model_long_text(real_llama, shared_root, drafter):
    tokenizer = AutoTokenizer.from_pretrained(shared_root / "models" / "stories260k")
    for text in ("Once upon a time", "Lily and Tom", "The big dog"):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        speculator = Speculator(DRAFTERS[drafter](real_llama, ids, num_tokens=158))
        check_lossless(real_llama, speculator, [ids], max_new_tokens=150)
