"""The public checks take what users have: a speculator, and texts with a tokenizer."""

from __future__ import annotations

import pytest
import torch

from hf_speculate import AutoSpeculator
from hf_speculate.testing import EmptyDrafter, check_drafter, check_lossless

from ..support.inputs import character_tokenizer


TEXTS = ["abcabcabc", "def f(x):"]


@pytest.fixture
def tokenizer():
    return character_tokenizer(pad_token="<pad>", bos_token="<s>")


@pytest.fixture
def target(tiny_model, tokenizer):
    return tiny_model(vocab_size=len(tokenizer))


def test_lossless_of_texts(target, tokenizer):
    speculator = AutoSpeculator.from_name("prompt_lookup", target=target, min_ngram=1)
    report = check_lossless(target, speculator, TEXTS, tokenizer=tokenizer, max_new_tokens=8)
    ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in TEXTS]
    assert check_lossless(target, speculator, ids, max_new_tokens=8) == report
    assert report.num_cases == 2


def test_a_drafter_by_its_speculator(target, tokenizer):
    speculator = AutoSpeculator.from_name("prompt_lookup", target=target, min_ngram=1)
    check_drafter(speculator, target, TEXTS, max_new_tokens=8, tokenizer=tokenizer)


def test_a_drafter_that_never_drafts_is_warned_of(target, monkeypatch):
    warned = []
    monkeypatch.setattr("hf_speculate.testing.conformance.logger.warning", warned.append)
    report = check_drafter(EmptyDrafter(), target, [torch.tensor([3, 4, 5]), torch.tensor([6, 7])], max_new_tokens=8)
    assert (report.num_drafts, report.tokens_a_round) == (0, None)
    assert report.num_asked > 0
    assert "made none. Does it find its place in the text?" in warned[0]


def test_what_cannot_be_checked_is_said(target, tokenizer):
    speculator = AutoSpeculator.from_name("prompt_lookup", target=target)
    with pytest.raises(TypeError, match="no tokenizer was given"):
        check_lossless(target, speculator, TEXTS)
    with pytest.raises(TypeError, match="prompts must be a list of texts or token ids, got one str"):
        check_lossless(target, speculator, TEXTS[0], tokenizer=tokenizer)
    with pytest.raises(TypeError, match=r"takes a Speculator, got EmptyDrafter: Speculator\(drafter\)"):
        check_lossless(target, EmptyDrafter(), TEXTS, tokenizer=tokenizer)
    with pytest.raises(TypeError, match="takes a Drafter or a Speculator, got str"):
        check_drafter("prompt_lookup", target, TEXTS, tokenizer=tokenizer)
