"""Drafts after a pause, and on the cache of an earlier turn, are those of a drafter that has read the whole text."""

from __future__ import annotations

import gc

import pytest
import torch

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.cache import CACHE_NAME, as_cache, cache_of
from hf_speculate.drafting import conversations
from hf_speculate.policy import NOTHING, UNLIMITED, DraftPolicy, PolicySession
from hf_speculate.tree import PADDING_PARENT

from ..support.heads import DRAFTERS, target
from ..support.interruptions import RaisingCriterion
from ..support.tiers import quick


pytestmark = pytest.mark.usefixtures("unchecked_shapes")
REMEMBERING = ("draft_model", "eagle1", "eagle3", "dspark", "dflash2")


def trees(model, speculator, **inputs):
    """The text, the cache, and (token, parent) of every drafted node by the length of the whole text."""
    seen, output = {}, None

    def rounds():
        nonlocal output
        request = {**inputs, "pad_token_id": 0, "return_dict_in_generate": True}
        output = yield from hf_speculate.rounds(model, **request, speculator=speculator)

    for round in rounds():
        if round.num_nodes:
            nodes = zip(round.tree.host.token_ids[0], round.tree.host.parents[0], strict=True)
            seen[round.lengths[0]] = [node for node in nodes if node[1] != PADDING_PARENT]
    return output.sequences, cache_of(output), seen


class Conversation:
    """A first turn of 20 tokens, and what follows it."""

    def __init__(self, name, tmp_path, prompt):
        self.model = target("llama", dtype=torch.float64)
        self.drafter = DRAFTERS[name](self.model, tmp_path)
        self.speculator = Speculator(self.drafter, adaptive=False)
        first, self.cache, _ = self.run(self.speculator, input_ids=prompt(9), max_new_tokens=20)
        self.first = first
        self.text = torch.cat([first, prompt(5, seed=7)], dim=1)

    def run(self, speculator, **inputs):
        return trees(self.model, speculator, **inputs)

    def expected(self, text=None):
        fresh = Speculator(self.drafter, adaptive=False)
        return self.run(fresh, input_ids=self.text if text is None else text, max_new_tokens=16)

    def only_new(self):
        length = self.cache.get_seq_length()
        return {"input_ids": self.text[:, length:], "attention_mask": torch.ones(1, self.text.shape[1]).long()}


@pytest.fixture(params=DRAFTERS)
def conversation(request, tmp_path, prompt):
    return Conversation(request.param, tmp_path, prompt)


@pytest.fixture(params=REMEMBERING)
def remembered(request, tmp_path, prompt):
    return Conversation(request.param, tmp_path, prompt)


@pytest.mark.parametrize("form", ["whole text", "new tokens"])
def test_the_second_turn_drafts_as_if_it_had_read_everything(conversation, form):
    plain, _, wanted = conversation.expected()
    inputs = {"input_ids": conversation.text} if form == "whole text" else conversation.only_new()
    text, cache, seen = conversation.run(
        conversation.speculator, **inputs, **as_cache(conversation.cache), max_new_tokens=16
    )
    assert torch.equal(text[0, -16:], plain[0, -16:])
    assert cache is conversation.cache
    assert len(seen) > 3
    assert seen == wanted


def count_forwards(monkeypatch, module):
    sizes, forward = [], type(module).forward

    def counted(self, *args, **kwargs):
        if self is module:
            sizes.append((args[0] if args else kwargs["input_ids"]).shape[1])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(module), "forward", counted)
    return sizes


def test_only_what_is_new_is_read(remembered, monkeypatch):
    module = getattr(remembered.drafter, "head", None) or remembered.drafter.model
    sizes = count_forwards(monkeypatch, module)
    inputs = {CACHE_NAME: remembered.cache, "max_new_tokens": 8}
    remembered.run(remembered.speculator, input_ids=remembered.text, **inputs)
    assert max(sizes) < 12  # the text has 34 tokens


def test_an_edited_text_is_the_targets_all_the_same(conversation):
    """The caller crops the cache and goes on differently."""
    text = torch.cat([conversation.first[:, :17], conversation.text[:, -5:]], dim=1)
    conversation.cache.crop(17 - conversation.cache.get_seq_length())
    plain = conversation.model.generate(text, max_new_tokens=16, pad_token_id=0)
    again, _, _ = conversation.run(
        conversation.speculator, input_ids=text, **as_cache(conversation.cache), max_new_tokens=16
    )
    assert torch.equal(again, plain)


def test_text_stays_plain_after_a_turn_of_plain_generate(conversation):
    model, cache = conversation.model, conversation.cache
    between = model.generate(conversation.text, **as_cache(cache), max_new_tokens=6, pad_token_id=0)
    text = torch.cat([between, conversation.text[:, :4]], dim=1)
    plain, _, _ = conversation.expected(text)
    for speculator in (conversation.speculator, Speculator(conversation.drafter, adaptive=False)):
        again, _, _ = conversation.run(speculator, input_ids=text, **as_cache(cache), max_new_tokens=16)
        assert torch.equal(again, plain)
        cache.crop(between.shape[1] - 1 - cache.get_seq_length())


def test_drafts_are_unchanged_after_an_interrupted_turn(remembered):
    """A criterion that raises in the second turn: the third drafts as ever."""
    inputs = {CACHE_NAME: remembered.cache, "max_new_tokens": 16, "pad_token_id": 0}
    criteria = [RaisingCriterion(remembered.text.shape[1] + 5, KeyboardInterrupt())]
    with pytest.raises(KeyboardInterrupt):
        remembered.model.generate(
            remembered.text, **inputs, speculator=remembered.speculator, stopping_criteria=criteria
        )
    plain, _, wanted = remembered.expected()
    text = plain[:, : remembered.cache.get_seq_length() + 1]
    inputs = {CACHE_NAME: remembered.cache, "max_new_tokens": plain.shape[1] - text.shape[1]}
    again, _, seen = remembered.run(remembered.speculator, input_ids=text, **inputs)
    assert torch.equal(again, plain)
    common = wanted.keys() & seen.keys()
    assert common
    assert all(seen[length] == wanted[length] for length in common if length < plain.shape[1] - 6)


def test_nothing_outlives_the_callers_cache(remembered):
    states = remembered.drafter.conversations._states
    assert len(states) == 1
    assert remembered.cache in conversations._texts
    remembered.cache = None
    gc.collect()
    assert len(states) == 0


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
    """The rows' texts, and (token, parent) of every node drafted, by row and the number of tokens that the row had."""
    seen, texts = {}, [[] for _ in inputs["input_ids"]]
    request = {**inputs, "max_new_tokens": 64, "pad_token_id": 0}
    for round in hf_speculate.rounds(model, **request, speculator=Speculator(drafter, policy=EveryNth(every))):
        tree = round.tree.host
        for slot, row in enumerate(round.tree.rows) if round.num_nodes else ():
            nodes = zip(tree.token_ids[slot], tree.parents[slot], strict=True)
            seen[row, len(texts[row])] = [node for node in nodes if node[1] != PADDING_PARENT]
        for text, tokens in zip(texts, round.tokens, strict=True):
            text += tokens
    return texts, seen


@pytest.mark.parametrize("ragged", quick([False, True], True), ids=["one row", "ragged batch"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_unchanged_after_rounds_without_a_draft(tmp_path, prompt, name, ragged):
    model = target("llama", dtype=torch.float64)
    drafter = DRAFTERS[name](model, tmp_path)
    inputs = {"input_ids": prompt(9), "attention_mask": torch.ones(1, 9, dtype=torch.long)}
    if ragged:
        inputs = {"input_ids": torch.cat([prompt(9), prompt(9, seed=1)]), "attention_mask": torch.ones(2, 9).long()}
        inputs["attention_mask"][1, :4] = 0
    text, always = trees_by_length(model, inputs, drafter, 1)
    paused_text, paused = trees_by_length(model, inputs, drafter, 4)
    assert text == paused_text
    # Near the end the depth of a draft is limited by the row that has the most to go.
    common = {place for place in always.keys() & paused.keys() if place[1] < 56}
    assert len(common) >= 3
    for place in common:
        assert paused[place] == always[place], place
