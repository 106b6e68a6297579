"""The smoothed automaton beside its definition, written with scans of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_speculate_plugins.suffix.automaton import Automaton, Mixture, draft_tree
from hf_speculate_plugins.suffix.contexts import ContextCounts, Followers


deterministic = settings(derandomize=True, deadline=None, max_examples=60, database=None)
ORDERS = (1, 2, 3)
TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=24)


def counted(*texts, orders=ORDERS):
    counts = ContextCounts(orders)
    for text in texts:
        counts.extend([], text)
    return counts


def scan(text, context):
    """What followed the context in a text."""
    size = len(context)
    return [text[i + size] for i in range(len(text) - size) if tuple(text[i : i + size]) == context]


def interpolate(sources, weights, tail, token):
    """P(token | tail), and the posterior of every component, from the shortest context to the longest."""
    probability, posteriors = 1e-5, {}
    for order in ORDERS:
        for source, text in sources.items():
            found = scan(text, tuple(tail[-order:])) if order <= len(tail) else []
            if found:
                component = (source, order, min(len(found), 3))
                own = weights.get(component, 0.5) * found.count(token) / len(found)
                probability = (1 - weights.get(component, 0.5)) * probability + own
                posteriors[component] = own / probability
    return probability, posteriors


@deterministic
@given(TEXT, TEXT)
def test_probabilities_and_weights_are_those_of_the_definition(store_text, text):
    local, cursor = ContextCounts(ORDERS), []
    automaton = Automaton({"store": counted(store_text), "local": local}, ORDERS, Mixture())
    weights, trials = {}, {}
    for end, token in enumerate(text):
        sources = {"store": store_text, "local": text[:end]}
        for candidate, found in automaton.probabilities(tuple(cursor)).items():
            expected, _ = interpolate(sources, weights, text[:end], candidate)
            assert found == pytest.approx(expected, abs=2e-5)
        for component, posterior in interpolate(sources, weights, text[:end], token)[1].items():
            trials[component] = trials.get(component, 4) + 1
            before = weights.get(component, 0.5)
            weights[component] = before + (posterior - before) / trials[component]
        automaton.learn(tuple(cursor), token)
        local.extend(cursor, [token])
        assert automaton.mixture.weights == pytest.approx(weights)


def test_mixture_halves_old_trials():
    mixture, component = Mixture(), ("local", 1, 3)
    for _ in range(596):
        mixture.learn(component, 1.0)
    assert mixture.trials[component] == 300
    before = mixture.weight(component)
    mixture.learn(component, 0.0)
    assert mixture.weight(component) == pytest.approx(before * 300 / 301)


def test_weights_follow_what_explains_the_text():
    mixture = Mixture()
    automaton = Automaton({"right": counted([1, 2]), "wrong": counted([1, 3])}, ORDERS, mixture)
    for _ in range(50):
        automaton.learn((1,), 2)
    assert mixture.weight(("wrong", 1, 1)) < 0.05 < 0.9 < mixture.weight(("right", 1, 1))


@deterministic
@given(st.lists(TEXT, min_size=2, max_size=4))
def test_remove_undoes_the_counts_of_a_text(texts):
    counts = counted(*texts)
    counts.remove(texts[0])
    left = counted(*texts[1:])
    assert {k: (v.counts, v.total) for k, v in counts.followers.items()} == {
        k: (v.counts, v.total) for k, v in left.followers.items()
    }


@deterministic
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=40, max_size=120))
def test_leading_followers_are_the_most_frequent(changes):
    followers = Followers()
    for token, is_added in changes:
        if is_added:
            followers.add(token)
        elif token in followers.counts:
            followers.remove(token)
        ranked = sorted(followers.counts, key=lambda token: (-followers.counts[token], token))
        assert sorted(dict(followers.leading())) == sorted(ranked[: Followers.MAX_LEADING])


class TestTree:
    def draft(self, text, max_depth=50, chain=False, max_nodes=16):
        automaton = Automaton({"local": counted(text)}, ORDERS, Mixture())
        return draft_tree(automaton, text[-3:], max_nodes=max_nodes, max_depth=max_depth, chain=chain)

    def test_draft_continues_past_the_end_of_its_occurrence(self):
        draft = self.draft([1, 2, 3, 1, 2, 3], chain=True, max_nodes=12)
        assert draft.tokens[:8] == [1, 2, 3, 1, 2, 3, 1, 2]

    def test_nodes_come_best_first_and_parents_before_children(self):
        draft = self.draft([1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1, 2], max_nodes=30)
        assert len({*zip(draft.parents, draft.tokens, strict=True)}) == len(draft.tokens) > 5
        assert all(parent < node for node, parent in enumerate(draft.parents))
        assert draft.probs == sorted(draft.probs, reverse=True)

    def test_every_limit_is_kept(self):
        text = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2]
        assert len(self.draft(text, max_nodes=5).tokens) == 5
        assert self.draft(text, max_depth=0).tokens == []
        assert set(self.draft(text, max_depth=1).parents) == {-1}

    def test_a_chain_has_no_siblings(self):
        draft = self.draft([1, 2, 3, 1, 2, 4, 1, 2], chain=True)
        assert draft.parents == list(range(-1, len(draft.tokens) - 1))
