"""After rounds without drafts, which nobody told the drafter of, it drafts as if it had been told round by round."""

from __future__ import annotations

import pytest
import torch

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.policy import NOTHING, UNLIMITED, DraftPolicy, PolicySession
from hf_speculate.tree import PADDING_PARENT

from ..support.heads import DRAFTERS, target
from ..support.tiers import quick


class EveryNth(DraftPolicy):
    """Drafts in every n-th round."""

    is_adaptive = True

    def __init__(self, every: int):
        self.every = every

    def start(self, request):
        return EveryNthSession(self.every)


class EveryNthSession(PolicySession):
    def __init__(self, every: int):
        self.every, self.count = every, 0

    def choose(self, situation):
        self.count += 1
        return UNLIMITED if self.count % self.every == 0 else NOTHING


def trees_by_length(model, inputs, drafter, every):
    """The text, and (token, parent) of every node drafted, by row and the number of tokens that the row had."""
    seen, emitted = {}, [0] * len(inputs["input_ids"])
    request = {**inputs, "max_new_tokens": 64, "pad_token_id": 0}
    for round in hf_speculate.rounds(model, **request, speculator=Speculator(drafter, policy=EveryNth(every))):
        tree = round.tree.host
        for slot, row in enumerate(round.tree.rows) if round.num_nodes else ():
            nodes = zip(tree.token_ids[slot], tree.parents[slot], strict=True)
            seen[row, emitted[row]] = [node for node in nodes if node[1] != PADDING_PARENT]
        emitted = [n + len(tokens) for n, tokens in zip(emitted, round.tokens, strict=True)]
    text = model.generate(**request, speculator=Speculator(drafter, policy=EveryNth(every)))
    return text, seen


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("ragged", quick([False, True], True), ids=["one row", "ragged batch"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_pause_costs_no_acceptance(tmp_path, prompt, name, ragged):
    model = target("llama", dtype=torch.float64)
    drafter = DRAFTERS[name](model, tmp_path)
    inputs = {"input_ids": prompt(9), "attention_mask": torch.ones(1, 9, dtype=torch.long)}
    if ragged:
        inputs = {"input_ids": torch.cat([prompt(9), prompt(9, seed=1)]), "attention_mask": torch.ones(2, 9).long()}
        inputs["attention_mask"][1, :4] = 0
    text, always = trees_by_length(model, inputs, drafter, 1)
    paused_text, paused = trees_by_length(model, inputs, drafter, 4)
    assert torch.equal(text, paused_text)
    # Near the end the depth of a draft is limited by the row that has the most to go.
    common = {place for place in always.keys() & paused.keys() if place[1] < 56}
    assert len(common) >= 3
    for place in common:
        assert paused[place] == always[place], place
