"""Heads for every class of causal LMs that the project knows: they draft, or are refused before the first step."""

from __future__ import annotations

import pytest

from tests.support.architectures import CASES, NOTHING
from tests.support.class_outcomes import METHODS, WORKS, outcome, outcome_of_checkpoint, outcome_of_suffix
from tests.support.mtp import FAMILIES


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_a_head_is_trained_saved_loaded_and_drafts_or_is_refused_before_the_first_step(name, method):
    found, sentence = outcome(name, method)
    assert (found == "takes no drafts") == (CASES[name].drafts == NOTHING), sentence
    assert method == "mtp" or found in (WORKS, "takes no drafts", "other logits"), sentence


@pytest.mark.parametrize("name", CASES)
def test_suffixes_are_drafted_for_every_class_that_takes_drafts(name):
    found, sentence = outcome_of_suffix(name)
    assert (found == WORKS) == (CASES[name].drafts != NOTHING), sentence


@pytest.mark.parametrize("name", [name for name in CASES if name in FAMILIES])
def test_draft_layers_of_a_checkpoint_draft(name):
    found, sentence = outcome_of_checkpoint(name)
    assert (found == WORKS) == (CASES[name].drafts != NOTHING), sentence
