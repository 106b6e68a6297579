"""After rounds without drafts, which nobody told the drafter of, it drafts as if it had been told round by round."""

from __future__ import annotations

import pytest
import torch

from hf_speculate import Speculator, decoding
from hf_speculate.tree import PADDING_PARENT
from hf_speculate.tuning import NOTHING, UNLIMITED

from ..support.heads import DRAFTERS, target


class Script:
    """A tuner that drafts in every `every`-th round."""

    def __init__(self, every: int):
        self.every, self.count = every, 0

    def choose(self, rows, context):
        self.count += 1
        return UNLIMITED if self.count % self.every == 0 else NOTHING

    def record(self, *args, **kwargs):
        pass

    def leave(self, num_rows):
        pass


def trees_by_length(model, inputs, drafter, every, monkeypatch):
    """(token, parent) of every node drafted, by row and the number of tokens that the row had."""
    seen = {}
    ask = decoding.Decoding._draft

    def ask_and_note(run, max_depth):
        tree = ask(run, max_depth)
        for row, length in enumerate(run.sequences.num_emitted):
            nodes = zip(tree.host.token_ids[row], tree.host.parents[row], strict=True)
            seen[row, length] = [node for node in nodes if node[1] != PADDING_PARENT]
        return tree

    speculator = Speculator(drafter, adaptive=True)
    assert speculator.experience is not None
    with monkeypatch.context() as patch:
        patch.setattr(decoding.Decoding, "_draft", ask_and_note)
        patch.setattr(speculator.experience, "tuner", lambda *_, **__: Script(every))
        patch.setattr(speculator.experience, "learn", lambda *_, **__: None)
        text = model.generate(**inputs, max_new_tokens=64, pad_token_id=0, speculator=speculator)
    return text, seen


@pytest.mark.parametrize("ragged", [False, True], ids=["one row", "ragged batch"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_pause_costs_no_acceptance(tmp_path, monkeypatch, prompt, name, ragged):
    model = target("llama", dtype=torch.float64)
    drafter = DRAFTERS[name](model, tmp_path)
    inputs = {"input_ids": prompt(9), "attention_mask": torch.ones(1, 9, dtype=torch.long)}
    if ragged:
        inputs = {"input_ids": torch.cat([prompt(9), prompt(9, seed=1)]), "attention_mask": torch.ones(2, 9).long()}
        inputs["attention_mask"][1, :4] = 0
    text, always = trees_by_length(model, inputs, drafter, 1, monkeypatch)
    paused_text, paused = trees_by_length(model, inputs, drafter, 4, monkeypatch)
    assert torch.equal(text, paused_text)
    # Near the end the depth of a draft is limited by the row that has the most to go.
    common = {place for place in always.keys() & paused.keys() if place[1] < 56}
    assert len(common) >= 3
    for place in common:
        assert paused[place] == always[place], place
