"""Heads for every class of causal LMs that the project knows: they draft, or are refused before the first step."""

from __future__ import annotations

import os

import pytest

from tests.support.architectures import CASES, HEADS, NOTHING
from tests.support.class_outcomes import (
    METHODS,
    REFUSALS,
    WORKS,
    outcome,
    outcome_of_checkpoint,
    outcome_of_suffix,
)
from tests.support.mtp import FAMILIES
from tests.support.versions import has_transformers


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


INTRODUCTION = f"""{HEADS}
What becomes of heads for these classes (`tests/training/test_classes.py`, which also writes this part): a new head is
trained for two steps, saved, loaded and drafted with, in fp32, and the text is that of plain `generate`. What cannot
draft is refused before the first step.

- **suffix** drafts without a head, and so does every other drafter that needs none.
- **EAGLE-3**, **DSpark** and **Medusa** heads have layers of their own.
- A **new MTP layer** begins as the last decoder layer of the target: `hf-speculate train --method mtp`.
- **stored MTP layers** are those that published checkpoints hold, for families that publish some.

Every other entry stands for one sentence, with the names of the class and of what it lacks:

"""


def test_the_second_table_in_the_docs(request):
    if not has_transformers("5.24"):
        pytest.skip("the page is about newer versions of transformers")
    page = request.config.rootpath / "docs" / "architectures.md"
    text = page.read_text().partition(HEADS)[0] + document()
    if os.environ.get("HF_SPECULATE_WRITE_DOCS"):
        page.write_text(text)
    assert page.read_text() == text, "stale: run this test with HF_SPECULATE_WRITE_DOCS=1"


def document() -> str:
    found = {name: outcomes_of(name) for name in CASES}
    sentences = {key: [] for key in REFUSALS}
    for key, sentence in (each for row in found.values() for each in row if each[1]):
        sentences[key].append(sentence)
    legend = "".join(f"- *{key}*: {min(all_, key=len)}\n" for key, all_ in sentences.items() if all_)
    columns = ("`model_type`", "suffix", "EAGLE-3", "DSpark", "Medusa", "new MTP layer", "stored MTP layers")
    lines = [columns, ["---"] * len(columns)]
    lines += [[f"`{name}`", *(key for key, _ in row)] for name, row in found.items()]
    return INTRODUCTION + legend + "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def outcomes_of(name: str) -> list[tuple[str, str]]:
    """The row of a class."""
    return [outcome_of_suffix(name), *(outcome(name, method) for method in METHODS), outcome_of_checkpoint(name)]
