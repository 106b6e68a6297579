"""Captured drafts of Medusa heads: those of the plain heads, round by round."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from hf_speculate import Speculator
from hf_speculate.drafting import DraftRequest, DraftState
from hf_speculate.graphs import GraphRunner
from hf_speculate.stats import RunnerRecord
from hf_speculate_plugins.medusa import MedusaDrafter, StaticTree
from hf_speculate_plugins.medusa.drafter import MedusaSession
from hf_speculate_plugins.medusa.steps import CapturedSteps, PlainSteps

from ...support.captured_drafts import assert_alike, drafts_of, place_of
from ...support.heads import HIDDEN, MEDUSA_CHOICES, PLAIN, random_heads, target
from ...support.inputs import padded_batch
from ...support.replays import stand_in
from ...support.tiers import quick


pytestmark = pytest.mark.usefixtures("unchecked_shapes")

HEADS = {
    "own outputs": {},
    "one output": {"outputs": 1, "num_layers": 2, "seed": 1},
    "the target's output": {"outputs": 0},
    "a truncated vocabulary": {"truncated": 40},
}
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 3.0, "top_k": 40}
REQUEST = {**PLAIN, "max_new_tokens": 32}


def medusa(model, heads, tree=None):
    return MedusaDrafter(heads, model, tree=StaticTree.of(tree or MEDUSA_CHOICES))


@pytest.fixture(params=quick(["cpu", "pretended device"], "pretended device"))
def place(request, monkeypatch):
    with place_of(request.param, monkeypatch) as place:
        yield place


@pytest.mark.parametrize("sampling", quick([GREEDY, SAMPLED], SAMPLED), ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", quick([(12,), (9, 4, 13)], (9, 4, 13)), ids=["1 row", "3 rows left padded"])
@pytest.mark.parametrize("kind", quick(HEADS, "own outputs", "a truncated vocabulary"))
def test_drafts_are_plains_in_every_round(place, prompt, kind, lengths, sampling):
    batch, request = padded_batch(prompt, lengths), {**REQUEST, **sampling}
    heads = random_heads(**HEADS[kind])
    expected = drafts_of(MedusaSession, target(), medusa(target(), heads), batch, request, compile=False)
    model, placed = place.put(target()), place.put(heads)
    found = drafts_of(MedusaSession, model, medusa(model, placed), batch, request)
    assert_alike(found, expected)
    assert place.replays.names.count("medusa_draft") == 1, "trees that are cut at the end are parts of it"
    assert place.replays.num_replayed > len(found.rounds)


def test_recorded_drafts_are_plain_after_rows_end(place, prompt):
    batch, model = padded_batch(prompt, (9, 4, 13)), place.put(target())
    request = {**REQUEST, **GREEDY}
    end = target().generate(**batch, **request)[0, -20].item()
    request["eos_token_id"] = end
    expected = drafts_of(MedusaSession, target(), medusa(target(), random_heads()), batch, request, compile=False)
    found = drafts_of(MedusaSession, model, medusa(model, place.put(random_heads())), batch, request)
    assert_alike(found, expected)
    assert {len(rows) for rows in found.rounds} == {1, 2, 3}


def test_later_requests_replay_what_earlier_ones_recorded(monkeypatch, prompt):
    replays, model = stand_in(monkeypatch), copy.deepcopy(target())
    drafter = medusa(model, random_heads())
    for seed in range(3):
        drafts_of(MedusaSession, model, drafter, {"input_ids": prompt(9 + seed, seed=seed)}, {**REQUEST, **GREEDY})
    assert replays.names == ["medusa_draft", "tree_forward"]


def drafts_after(model, heads, states, runner=None, **fields):
    """The drafts of four rounds for two rows, with and without a compiler, from random states."""
    request = DraftRequest(target=model, input_ids=torch.zeros(2, 1, dtype=torch.long), graph_runner=runner)
    session, trees = medusa(model, heads).start(request), []
    for max_depth in (9, 9, 2, 9):
        session.observe(torch.zeros(2, 3), {7: states}, torch.tensor([3, 1]))
        state = DraftState(
            root_ids=torch.tensor([5, 6]), active=(True, True), max_depth=max_depth, num_emitted=(1, 1), **fields
        )
        trees.append(session.draft(state))
    session.close()
    return [(tree.token_ids.tolist(), tree.host.parents, tree.max_depth) for tree in trees]


@pytest.mark.parametrize("chains_only", [True, False])
def test_chains_and_trees_that_are_cut(monkeypatch, chains_only):
    replays, states = stand_in(monkeypatch), torch.randn(2, 3, HIDDEN)
    expected = drafts_after(target(), random_heads(), states, chains_only=chains_only)
    found = drafts_after(target(), random_heads(), states, GraphRunner(None, Counter()), chains_only=chains_only)
    assert found == expected
    assert [depth for *_, depth in found] == [3, 3, 2, 3]
    assert replays.names == ["medusa_draft"]


@pytest.mark.parametrize("compile", [False, None], ids=["plain", "recorded"])
def test_values_are_numbers_where_the_request_cuts_tokens(monkeypatch, prompt, compile):
    """A tree uses more ranks than top-k leaves tokens."""
    stand_in(monkeypatch)
    trees, original = [], MedusaSession.draft
    monkeypatch.setattr(MedusaSession, "draft", lambda self, state: trees.append(original(self, state)) or trees[-1])
    request = {**REQUEST, "do_sample": True, "top_k": 2}
    speculator = Speculator(medusa(target(), random_heads()), adaptive=False, compile=compile)
    target().generate(prompt(9), **request, speculator=speculator)
    for tree in trees:
        values = tree.host.values[0]
        assert all(value <= 0 for value in values), "no NaN"
        assert all(value <= values[parent] for value, parent in zip(values[1:], tree.host.parents[0][1:], strict=True))
        assert sum(value > -1e3 for value, parent in zip(values, tree.host.parents[0], strict=True) if parent == 0) == 2


def test_an_output_layer_that_is_elsewhere_is_not_recorded():
    """Accelerate fetches an offloaded one at each call."""
    model, fallbacks = copy.deepcopy(target()), Counter()
    model.lm_head.to("meta")
    runner, record = GraphRunner(None, fallbacks), RunnerRecord(fallbacks=fallbacks, subject="draft ")
    request = DraftRequest(target=model, input_ids=torch.zeros(1, 1).long(), graph_runner=runner, record=record)
    for heads, kind in ((random_heads(outputs=0), PlainSteps), (random_heads(), CapturedSteps)):
        assert type(medusa(target(), heads).start(request)._steps) is kind
    assert fallbacks == {"draft not recorded: Medusa heads and the target's output layer on different devices": 1}
