"""The drafter's side of a request: what it is told, when, and that nothing of it is left behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.drafting import RAW_LAST, Choices, Drafter, DraftRequest, DraftSession, DraftState
from hf_speculate.drafting.driver import Drafting
from hf_speculate.drafting.observations import Observation, Observations, joined
from hf_speculate.policy import Fixed
from hf_speculate.tree import DraftTree, Round


def a_round(paths, tokens):
    """Of two rows."""
    tree = DraftTree.root_only(torch.tensor([3, 4]))
    return Round(tree=tree, paths=paths, tokens=tokens, num_accepted=[0, 0], lengths=[9, 9], context=9)


class Listener(Drafter, DraftSession):
    """Drafts chains of the token after the root's; notes what it is told."""

    name = "listener"

    def __init__(self, feature_layers=(), carries_over=False, num_choices=0):
        self.feature_layers = feature_layers
        self.carries_over = carries_over
        self.num_choices = num_choices
        self.seen = []
        self.num_closed = 0

    @classmethod
    def for_target(cls, target, **options):
        return cls(**options)

    def start(self, request):
        return self

    def draft(self, state):
        return DraftTree.chain((state.root_ids[:, None] + torch.arange(3)) % 90)

    def observe(self, tokens, features, lengths):
        self.seen.append((tokens.tolist(), {layer: states.clone() for layer, states in features.items()}, lengths))

    def observe_choices(self, choices):
        self.seen.append(choices)

    def close(self):
        self.num_closed += 1


def state(root_ids):
    active = (True,) * len(root_ids)
    return DraftState(
        root_ids=torch.tensor(root_ids), active=active, max_depth=3, chains_only=False, num_emitted=(1,) * len(active)
    )


def drafting(model, listener):
    new = Drafting(listener, DraftRequest(target=model, input_ids=torch.zeros(2, 3, dtype=torch.long)))
    new.start()
    return new


def test_observations_of_rounds_without_a_draft_are_joined(tiny_model):
    listener = Listener(feature_layers=(1,))
    run, states = drafting(tiny_model(), listener), torch.arange(6.0).view(3, 2, 1, 1)
    for step, paths in enumerate(([[0], [0]], [[0], []], [[0], [0]])):
        tokens = [[10 * row + step] * len(path) for row, path in enumerate(paths)]
        run.observe(a_round(paths, tokens), (None, states[step]))
    assert not listener.seen
    run.draft(state([2, 12]))
    ((tokens, features, lengths),) = listener.seen
    assert lengths.tolist() == [3, 2]
    assert [row[:length] for row, length in zip(tokens, lengths, strict=True)] == [[0, 1, 2], [10, 12]]
    assert features[1][0, :, 0].tolist() == [0, 2, 4]
    assert features[1][1, :2, 0].tolist() == [1, 5]


def test_observations_of_one_row_equal_those_of_several():
    """What one row waits for is joined without padding."""
    rounds = [([[5, 6, 7]], 3), ([[8]], 1), ([[9, 1]], 2)]
    each = [(rows, {layer: torch.rand(1, width, 4) for layer in (-1, 2)}) for rows, width in rounds]
    waiting = Observations()
    for rows, features in each:
        waiting.add(rows, features)
    found, expected = waiting.take(), joined([Observation.from_rows(*one) for one in each])
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.lengths, expected.lengths)
    assert found.features.keys() == expected.features.keys()
    assert all(torch.equal(found.features[layer], expected.features[layer]) for layer in found.features)
    assert waiting.take() is None


def test_observe_prompt_waits_for_the_first_draft(tiny_model):
    for is_long in (False, True):
        listener = Listener(feature_layers=(1,), carries_over=True)
        run = drafting(tiny_model(), listener)
        tokens = torch.arange(4096 if is_long else 6).view(2, -1)
        run.observe_prompt(tokens, (None, tokens[..., None].float()))
        assert len(listener.seen) == is_long
        run.draft(state([2, 12]))
        run.draft(state([2, 12]))
        ((seen, features, lengths),) = listener.seen
        assert seen == tokens.tolist()
        assert features[1][..., 0].tolist() == tokens.tolist()
        assert lengths.tolist() == [tokens.shape[1]] * 2
    unasked = drafting(tiny_model(), Listener(feature_layers=(1,), carries_over=True))
    unasked.observe_prompt(tokens[:, :3], (None, tokens[:, :3, None].float()))
    unasked.observe(a_round([[0], [0]], [[5], [6]]), (None, torch.ones(2, 1, 1)))
    unasked.close()
    assert [seen for seen, _, _ in unasked.drafter.seen] == [tokens[:, :3].tolist(), [[5], [6]]]


def test_observe_choices_skips_rounds_without_a_draft(tiny_model):
    listener = Listener(num_choices=3)
    run = drafting(tiny_model(), listener)
    sampler = SimpleNamespace(warpers=())
    round, logits = a_round([[0], [0]], [[5], [6]]), torch.rand(2, 1, 99)
    run.observe_choices(round, logits, sampler)
    assert not listener.seen
    run.draft(state([2, 12]))
    run.observe_choices(round, logits, sampler)
    run.observe_choices(round, logits, sampler)
    assert [type(each) for each in listener.seen] == [Choices]


def test_states_of_a_tree_are_those_of_the_path(tiny_model):
    listener = Listener(feature_layers=(1,))
    run = drafting(tiny_model(), listener)
    run.observe(a_round([[0, 2], [0]], [[5, 6], [7]]), (None, torch.arange(6.0).view(2, 3, 1)))
    run.draft(state([6, 7]))
    assert listener.seen[0][1][1][..., 0].tolist() == [[0, 2], [3, 3]]


@pytest.mark.parametrize("do_sample", [False, True])
def test_observe_choices_comes_before_the_observation_of_a_round(tiny_model, prompt, do_sample):
    """The choices are the target's: its distribution after the nodes' text, as the request warps it."""
    model, ids, listener = tiny_model(), prompt(9), Listener(num_choices=3)
    request = {
        "max_new_tokens": 8,
        "do_sample": do_sample,
        "temperature": 0.5 if do_sample else None,
        "pad_token_id": 0,
    }
    text = model.generate(ids, speculator=Speculator(listener, policy=Fixed()), **request)
    kinds = [isinstance(each, Choices) for each in listener.seen]
    assert kinds[:5] == [False, True, False, True, False]  # the prompt's, then one of each per round
    choices = listener.seen[1]
    assert choices.tree.token_ids[0][0] == text[0, ids.shape[1]]
    path = torch.tensor([choices.tree.token_ids[0]])
    logits = model(torch.cat([ids, path], dim=1)).logits[0, -path.shape[1] :]
    expected = (logits / (0.5 if do_sample else 1.0)).topk(3)
    assert torch.equal(choices.token_ids[0], expected.indices)
    assert torch.allclose(choices.probs[0], expected.values.softmax(-1), atol=1e-5)
    assert torch.allclose(choices.first(2).probs[0].sum(-1), torch.ones(path.shape[1]))


def test_a_consumer_may_change_the_lists_that_it_gets(tiny_model, prompt):
    model, ids, seen = tiny_model(), prompt(9), []
    for changes_them in (False, True):
        listener = Listener()
        for rows in hf_speculate.stream(model, ids, speculator=Speculator(listener), max_new_tokens=12):
            if changes_them:
                rows[0].clear()
        seen.append([(tokens, lengths.tolist()) for tokens, _, lengths in listener.seen])
    assert len(seen[0]) > 3
    assert seen[1] == seen[0]


def test_only_a_session_that_carries_over_is_told_of_the_last_rounds(tiny_model):
    for carries_over in (False, True):
        listener = Listener(carries_over=carries_over)
        run = drafting(tiny_model(), listener)
        run.observe(a_round([[0], [0]], [[5], [6]]), None)
        run.close()
        run.close()
        assert len(listener.seen) == carries_over
        assert listener.num_closed == 1


def test_the_hook_on_the_last_layer_is_there_from_the_first_forward_to_the_end(tiny_model):
    model = tiny_model()
    hooks = model.model.layers[-1]._forward_hooks
    before = len(hooks)
    run = drafting(model, Listener(feature_layers=(RAW_LAST,)))
    assert len(hooks) == before
    for _ in range(2):
        with run.listening():
            model(torch.tensor([[1, 2], [3, 4]]))
        assert len(hooks) == before + 1
    run.observe(a_round([[0], [0]], [[5], [6]]), None)
    run.close()
    assert len(hooks) == before


def test_the_policy_learns_how_deep_was_drafted_not_how_deep_was_scored(tiny_model, prompt):
    """Levels that are cut off took time, and a path that ends where they began did not find them."""
    speculator = Speculator(Listener(), policy=Fixed(max_nodes=1))
    request = {"max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
    prefill, *rounds = hf_speculate.rounds(tiny_model(), prompt(6), speculator=speculator, **request)
    assert prefill.is_prefill
    assert (rounds[0].num_nodes, rounds[0].depth) == (1, 2)
    assert {round.depth for round in rounds[:-2]} == {2}
