"""Processors of xgrammar and outlines, which keep a state: one call a token, in order, as stock makes them
(`make ecosystem`)."""

from __future__ import annotations

import re

import pytest
import torch

import hf_speculate


PROMPT = "numbers = "


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True}])
@pytest.mark.parametrize("grammar", ["json", "regex"])
def test_xgrammar_processor_gives_plain_text(model, tokenizer, attach_head, sampling, grammar):
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed: `make ecosystem` sets it up")
    from xgrammar.contrib.hf import LogitsProcessor

    tokenizer_info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    compiler = xgrammar.GrammarCompiler(tokenizer_info)
    compiled = (
        compiler.compile_builtin_json_grammar() if grammar == "json" else compiler.compile_regex(r"\[(\d{1,3}, ){6}0\]")
    )
    inputs = tokenizer([PROMPT] * 2, return_tensors="pt")

    def generated():
        torch.manual_seed(5)
        # A processor is for one call.
        return model.generate(**inputs, max_new_tokens=32, logits_processor=[LogitsProcessor(compiled)], **sampling)

    plain = generated()
    speculator = attach_head(model)
    assert torch.equal(generated(), plain)
    hf_speculate.detach(model)
    assert speculator.stats.accepted_tokens > 0
    assert list(speculator.stats.fallbacks) == [
        "rows in lock-step: a logits processor that is not known to be row-wise"
    ]


def test_outlines_processor_gives_plain_text(model, tokenizer, attach_head):
    outlines = pytest.importorskip("outlines", reason="outlines is not installed: `make ecosystem` sets it up")
    pattern = r"\[([0-9]{1,3}, ){6}0\]"
    generator = outlines.Generator(outlines.from_transformers(model, tokenizer), outlines.regex(pattern))

    def generated():
        return generator(PROMPT, max_new_tokens=60)

    plain = generated()
    speculator = attach_head(model)
    assert generated() == plain
    hf_speculate.detach(model)
    assert re.fullmatch(pattern, plain)
    assert speculator.stats.rounds
    assert not speculator.stats.fallbacks
