"""Options by name: one that there is not is named with the nearest, and all that there are."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from hf_speculate import AutoSpeculator
from hf_speculate.errors import OptionError, SpeculateError
from hf_speculate.speculator import installed_drafters, load_drafter

from .support.heads import write_medusa_heads
from .support.tiny_heads import write_eagle_head


ENGINE = (
    "the engine takes acceptance, posterior_threshold, posterior_alpha, policy, adaptive, compile, ahead, exact, "
    "constraints."
)


def refusal(make):
    with pytest.raises(OptionError) as raised:
        make()
    assert isinstance(raised.value, SpeculateError)
    assert isinstance(raised.value, TypeError)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("drafter", "option", "nearest"),
    [
        ("prompt_lookup", "max_ngrams", "max_ngram"),
        ("prompt_lookup", "acceptence", "acceptance"),
        ("suffix", "corpora", "corpus"),
        ("draft_model", "topk", "top_k"),
        ("combined", "max_node", "max_nodes"),
    ],
)
def test_of_a_drafter_by_name(tiny_model, drafter, option, nearest):
    given = {"draft_model": {"model": tiny_model(seed=1)}, "combined": {"parts": ["prompt_lookup"] * 2}}
    message = refusal(lambda: AutoSpeculator.from_name(drafter, tiny_model(), **{option: 3}, **given.get(drafter, {})))
    assert message.startswith(
        f"unknown option {option!r} of the drafter {drafter!r}. Did you mean {nearest!r}? Possible: "
    )
    assert ENGINE in message  # unions add how to give options to a part


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompt_lookup:max_ngram=zero", "the option max_ngram is 'zero'; it takes a whole number."),
        ("suffix:depth=x", "the option depth is 'x'; it takes a whole number."),
        ("suffix:exact=yes", "the option exact is 'yes'; it takes true or false."),
        ("suffix:adaptive=no", "the option adaptive is 'no'; it takes true or false or none."),
    ],
)
def test_words_in_the_place_of_numbers(tiny_model, prompt, text, said):
    assert refusal(lambda: tiny_model().generate(prompt(5), max_new_tokens=4, speculator=text)) == said


@pytest.mark.parametrize("name", installed_drafters())
def test_sizes_of_drafts_are_positive(name):
    options = load_drafter(name).options_classes[0]
    sizes = {field.name for field in fields(options)} & {"depth", "max_nodes", "top_k", "max_ngram", "min_ngram"}
    assert sizes
    for size in sizes:
        with pytest.raises(ValueError, match=f"{name}: {size} must be at least 1, got 0"):
            options(**{size: 0})


def test_of_heads(tiny_model, tmp_path):
    eagle = write_eagle_head(tmp_path / "eagle", 32, 96)
    message = refusal(lambda: AutoSpeculator.from_pretrained(eagle, tiny_model(), featur_layers=(0, 1, 2)))
    assert "Did you mean 'feature_layers'?" in message
    assert re.search(r"'eagle' takes .*rope_theta, depth, top_k, max_nodes;", message)
    medusa = write_medusa_heads(tmp_path / "medusa")
    message = refusal(lambda: AutoSpeculator.from_pretrained(medusa, tiny_model(), xyz=1))
    assert message.startswith(
        "unknown option 'xyz' of the drafter 'medusa'. Possible: the drafter 'medusa' takes max_nodes"
    )
