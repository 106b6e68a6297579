"""Captured drafts of one-pass heads: those of the plain heads, round by round."""

from __future__ import annotations

import copy
import random
from collections import Counter

import pytest
import torch

from hf_speculate import Speculator, transfers
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.drafting import DraftRequest, DraftState
from hf_speculate.graphs import GraphRunner
from hf_speculate_plugins.block.drafter import BlockSession

from ...support.block_heads import HIDDEN, KINDS, random_block
from ...support.captured_drafts import assert_alike, assert_same_nodes, drafts_of, nodes_of, place_of
from ...support.heads import PLAIN, target
from ...support.inputs import padded_batch
from ...support.pretended_device import TYPE, PretendedDevice
from ...support.replays import stand_in
from ...support.tiers import quick


pytestmark = pytest.mark.usefixtures("unchecked_shapes")

GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 3.0, "top_k": 40}
REQUEST = {**PLAIN, "max_new_tokens": 22}
LARGE = {"top_k": 12, "max_nodes": 30}  # so large that random heads are right now and then


@pytest.fixture(params=quick(["cpu", "pretended device"], "pretended device"))
def place(request, monkeypatch):
    with place_of(request.param, monkeypatch) as place:
        yield place


@pytest.mark.parametrize("sampling", quick([GREEDY, SAMPLED], SAMPLED), ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", quick([(12,), (9, 4, 13)], (9, 4, 13)), ids=["1 row", "3 rows left padded"])
@pytest.mark.parametrize("kind", quick(KINDS, "windows", "dflash2", "lilicorr"))
def test_drafts_are_plains_in_every_round(place, prompt, kind, lengths, sampling):
    batch, request = padded_batch(prompt, lengths), {**REQUEST, **sampling}
    expected = drafts_of(BlockSession, target(), random_block(kind, target(), **LARGE), batch, request, compile=False)
    model = place.put(target())
    found = drafts_of(BlockSession, model, random_block(kind, model, **LARGE), batch, request)
    assert_alike(found, expected)
    assert place.replays.names.count("block_draft") == 1, "trees that are cut at the end are parts of it"
    assert place.replays.num_replayed > len(found.rounds)


@pytest.mark.parametrize("kind", ["dspark", "windows"])
def test_plain_drafts_stay_on_the_device(monkeypatch, prompt, kind):
    batch, request = padded_batch(prompt, (9, 4, 13)), {**PLAIN, **SAMPLED, "max_new_tokens": 10}
    expected = drafts_of(BlockSession, target(), random_block(kind, target()), batch, request, compile=False)
    monkeypatch.setattr(transfers, "STAGED", transfers.STAGED | {TYPE})
    with PretendedDevice() as device:
        draft, waits = BlockSession.draft, []

        def watched(self, state):
            device.forget()
            tree = draft(self, state)
            waits.append(len(device.waits))
            return tree

        monkeypatch.setattr(BlockSession, "draft", watched)
        model = device.place(target())
        assert_alike(drafts_of(BlockSession, model, random_block(kind, model), batch, request, compile=False), expected)
    assert set(waits) == {0}


@pytest.mark.parametrize("options", quick([{"depth": 2}, {"top_k": 1}, {"top_k": 9, "max_nodes": 4}]), ids=str)
def test_recorded_drafts_follow_the_options(place, prompt, options):
    batch, request = padded_batch(prompt, (9, 4, 13)), {**REQUEST, **SAMPLED, "max_new_tokens": 16}
    expected = drafts_of(
        BlockSession, target(), random_block("dflash2", target(), **options), batch, request, compile=False
    )
    model = place.put(target())
    assert_alike(drafts_of(BlockSession, model, random_block("dflash2", model, **options), batch, request), expected)


def test_recorded_drafts_are_plain_after_rows_end(place, prompt):
    batch, request = padded_batch(prompt, (9, 4, 13)), {**REQUEST, **SAMPLED}
    torch.manual_seed(5)
    request["eos_token_id"] = target().generate(**batch, **request)[0, -12].item()
    expected = drafts_of(BlockSession, target(), random_block("dspark", target()), batch, request, compile=False)
    model = place.put(target())
    found = drafts_of(BlockSession, model, random_block("dspark", model), batch, request)
    assert_alike(found, expected)
    assert len({len(rows) for rows in found.rounds}) > 1


def test_the_next_turn_goes_on_where_a_recorded_one_ended(monkeypatch, prompt):
    """What waits for a draft when a turn ends is read for the next one."""
    stand_in(monkeypatch)
    turns, request = [], {**PLAIN, **GREEDY, "max_new_tokens": 14}
    for compile in (False, None):
        model = copy.deepcopy(target())
        drafter = random_block("windows", model)
        speculator = Speculator(drafter, compile=compile, adaptive=False)
        first = model.generate(prompt(12), speculator=speculator, return_dict_in_generate=True, **request)
        text = torch.cat([first.sequences, prompt(5, seed=1)], dim=1)
        batch = {"input_ids": text, **as_cache(cache_of(first))}
        turns.append(drafts_of(BlockSession, model, drafter, batch, request, compile=compile))
    assert_same_nodes(turns[1].rounds, turns[0].rounds)
    assert turns[0].text == turns[1].text


def features_of(generator, batch_size, count):
    return {layer: torch.randn(batch_size, count, HIDDEN, generator=generator) for layer in (0, 2)}


def session_of(kind, num_tokens, padding, runner=None):
    """A session that has read a prompt of 3 rows, of which the second begins with padding."""
    ids, mask = torch.zeros(3, num_tokens, dtype=torch.long), torch.ones(3, num_tokens, dtype=torch.long)
    mask[1, :padding] = 0
    request = DraftRequest(target=target(), input_ids=ids, attention_mask=mask, graph_runner=runner)
    session = random_block(kind, target()).start(request)
    features = features_of(torch.Generator().manual_seed(1), 3, num_tokens)
    session.observe(ids, features, torch.full((3,), num_tokens))
    return session


@pytest.mark.parametrize("num_tokens", [9, 490], ids=["short", "into larger buffers"])
@pytest.mark.parametrize("kind", quick(KINDS, "windows", "jetspec", "rnn", "xpress", "lilicorr"))
def test_captured_drafts_are_plain_at_any_length_and_depth(monkeypatch, kind, num_tokens):
    """Rows advance by 0 to 5 tokens, or by more than a graph reads, with a draft after each round or not."""
    replays, choose, generator = stand_in(monkeypatch), random.Random(3), torch.Generator().manual_seed(2)
    runner = GraphRunner(None, Counter())
    sessions = [session_of(kind, num_tokens, 4, each) for each in (runner, None)]
    for _ in range(12):
        roots = torch.tensor([choose.randrange(90) for _ in range(3)])
        fields = {"max_depth": choose.choice([1, 3, 9]), "chains_only": choose.random() < 0.2}
        state = DraftState(root_ids=roots, active=(True, True, True), num_emitted=(1, 1, 1), **fields)
        ours, plain = (session.draft(state) for session in sessions)
        assert ours.max_depth == plain.max_depth
        assert_same_nodes([[nodes_of(ours, row) for row in range(3)]], [[nodes_of(plain, row) for row in range(3)]])
        for _ in range(choose.choice([0, 1, 1, 1, 2])):
            lengths = [choose.randrange(choose.choice([2, 6, 12])) for _ in range(3)]
            features = features_of(generator, 3, max(lengths) or 1)
            tokens = torch.randint(90, (3, max(lengths) or 1), generator=generator)
            for session in sessions:
                session.observe(tokens, features, torch.tensor(lengths))
    assert {*replays.names} == {"block_draft"}
    assert replays.num_replayed > 3
