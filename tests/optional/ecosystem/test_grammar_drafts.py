"""Grammars of xgrammar and outlines, with all its backends: their state is that of the emitted text.

`make ecosystem` installs the packages.
"""

from __future__ import annotations

import json

import pytest
from transformers import LogitsProcessorList

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.testing import EmptyDrafter
from hf_speculate_plugins.grammar.guides import are_constrained, guides_of
from hf_speculate_plugins.grammar.words import Vocabulary

from ...support.inputs import character_tokenizer, random_prompt
from ...support.models import VOCAB_SIZE, build_tiny_model
from ...support.requests import BATCH, assert_same, run


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["left", "right"]}, "steps": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "steps"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = character_tokenizer(eos_token="<e>")
    assert len(tokenizer) == VOCAB_SIZE + 1
    return tokenizer


def of_xgrammar(tokenizer):
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=VOCAB_SIZE + 1)
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    return lambda: xgrammar.contrib.hf.LogitsProcessor(compiled)


def of_outlines(backend):
    def make(tokenizer):
        outlines = pytest.importorskip("outlines")
        pytest.importorskip(backend)
        from outlines.backends import get_json_schema_logits_processor

        model = outlines.from_transformers(build_tiny_model(vocab_size=VOCAB_SIZE + 1), tokenizer)
        return lambda: get_json_schema_logits_processor(backend, model, json.dumps(SCHEMA))

    return make


SOURCES = {
    "xgrammar": of_xgrammar,
    "outlines xgrammar": of_outlines("xgrammar"),
    "outlines llguidance": of_outlines("llguidance"),
    "outlines_core": of_outlines("outlines_core"),
}


@pytest.fixture(scope="module")
def model():
    return build_tiny_model(vocab_size=VOCAB_SIZE + 1)


@pytest.fixture(params=SOURCES)
def processor(request, tokenizer):
    """A function that makes a fresh processor."""
    return SOURCES[request.param](tokenizer)


def test_the_text_is_plain_and_mostly_drafted(processor, model):
    """Characters are tokens here: a key is six of them, and only one of two names is free."""
    request = {"input_ids": random_prompt(9), "max_new_tokens": 40}
    speculator = Speculator(EmptyDrafter())
    for sampling in ({}, {"do_sample": True}):
        plain = run(model, **request, **sampling, logits_processor=LogitsProcessorList([processor()]))
        ours = run(model, speculator, **request, **sampling, logits_processor=LogitsProcessorList([processor()]))
        assert_same(ours, plain)
    assert not speculator.stats.fallbacks
    assert speculator.stats.tokens_per_round > 2, speculator.stats.summary()


def test_grammar_drafts_give_plain_text_in_batches(processor, model):
    request = {**BATCH, "max_new_tokens": 30, "do_sample": True}
    speculator = AutoSpeculator.from_name("grammar", target=model)
    plain = run(model, **request, logits_processor=LogitsProcessorList([processor()]))
    assert_same(run(model, speculator, **request, logits_processor=LogitsProcessorList([processor()])), plain)
    assert speculator.stats.tokens_per_round > 1.3


def test_a_guide_goes_back_to_where_it_was(processor, tokenizer):
    made = processor()
    assert are_constrained([made])
    (guide,) = guides_of([made], [[1, 2, 3]], Vocabulary())
    text = [tokenizer.convert_tokens_to_ids(character) for character in '{"na']
    for number, token in enumerate(text):
        before = guide.possible()
        wrong = tokenizer.convert_tokens_to_ids("Z")
        assert not guide.accept(wrong)
        assert guide.accept(token)
        guide.back()
        assert guide.possible() == before, number
        assert guide.accept(token)
    assert list(guide.possible().tokens)[:1] == [tokenizer.convert_tokens_to_ids("m")]


def test_the_processor_is_not_touched(processor, model):
    """A draft moves a cursor of its own: the processor serves plain `generate` afterwards as if nothing had been."""
    made = processor()
    guides = guides_of([made], [[1, 2, 3]], Vocabulary())
    for guide in guides:
        while tokens := guide.possible().tokens:
            assert guide.accept(tokens[0])
    request = {"input_ids": random_prompt(9), "max_new_tokens": 12}
    plain = run(model, **request, logits_processor=LogitsProcessorList([processor()]))
    assert_same(run(model, **request, logits_processor=LogitsProcessorList([made])), plain)
