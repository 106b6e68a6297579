"""A round leaves no reference cycle: what it made goes at once, not when Python collects garbage in a later round."""

from __future__ import annotations

import gc

import pytest
import torch

from hf_speculate import Speculator
from hf_speculate.testing import EmptyDrafter, ScriptedDrafter

from ..support.models import VOCAB_SIZE


SHORT, LONG = 12, 60
# What a call as a whole may leave, whatever its length.
FEW = 50


def _drafters(text):
    return {"empty": EmptyDrafter(), "scripted": ScriptedDrafter(text, (4, 2, 1), accuracy=0.3, vocab_size=VOCAB_SIZE)}


@pytest.fixture(autouse=True)
def _only_new_objects():
    """What there was before is not looked at: collecting is quick then."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(("name", "num_rows", "do_sample"), [("empty", 1, False), ("scripted", 2, True)])
def test_rounds_leave_nothing_to_collect(tiny_model, prompt, name, do_sample, num_rows):
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
