"""What is known of each drafter's trees."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from hf_speculate.tree import DraftTree
from hf_speculate_plugins.combined.history import AcceptanceHistory, falling


def tree(tokens, parents):
    return DraftTree.from_rows([(tokens, parents)])


def test_confidences_are_kept_apart():
    history, chain = AcceptanceHistory(1), tree([5, 1], [-1, 0])
    for _ in range(20):
        history.learn(0, 5, chain, 0, [1])
        history.learn(0, 2, chain, 0, [4])
    assert history.values(0, 5, [-1, 0])[1] > 0.9
    assert history.values(0, 2, [-1, 0])[1] < 0.1


def test_a_new_text_unlearns_sooner_than_the_old_one_would():
    old, chain = AcceptanceHistory(1), tree([5, 1], [-1, 0])
    for _ in range(60):
        old.learn(0, 0, chain, 0, [1])
    new = old.carried()
    before = new.values(0, 0, [-1, 0])[1]
    assert before > 0.9
    for history in (old, new):
        for _ in range(10):
            history.learn(0, 0, chain, 0, [4])
    assert new.values(0, 0, [-1, 0])[1] < old.values(0, 0, [-1, 0])[1] - 0.1


def test_values_never_rise_towards_the_leaves():
    history = AcceptanceHistory(1)
    for _ in range(9):  # node 2 is a hit whenever it is known; its parent is seen to miss later
        history.learn(0, 0, tree([5, 1, 2], [-1, 0, 1]), 0, [1, 2])
    for _ in range(9):
        history.learn(0, 0, tree([5, 1], [-1, 0]), 0, [3])
    values = history.values(0, 0, [-1, 0, 1])
    assert values[0] >= values[1] >= values[2]


def test_nodes_below_the_last_known_token_say_nothing_yet():
    history, chain = AcceptanceHistory(1), tree([5, 1, 2, 3], [-1, 0, 1, 2])
    before = history.values(0, 0, [-1, 0, 1, 2])
    assert history.learn(0, 0, chain, 0, [1]) == 1
    after = history.values(0, 0, [-1, 0, 1, 2])
    assert after[1] > before[1]
    assert after[2:] == before[2:]


def test_gains_count_what_cheaper_drafts_did_not_have():
    history = AcceptanceHistory(2)
    before = history.expected_gains(1, (), 4)
    assert before[0] > 0.5  # untried parts get a try
    assert before == sorted(before)
    for _ in range(60):
        history.learn_gain(1, (), reached=3, drafted=4, before=2)
    gains = history.expected_gains(1, (), 4)
    assert gains == pytest.approx([0, 0, 1, 1], abs=0.2)
    assert history.expected_gains(1, ((0, 2),), 4) == before


def test_a_draft_that_was_too_short_says_nothing_of_deeper_levels():
    history = AcceptanceHistory(1)
    for _ in range(20):
        history.learn_gain(0, (), reached=2, drafted=2, before=0)
    first, second, third = history.expected_gains(0, (), 3)
    assert third - second > 0.5 * first


def test_falling_pools_what_rises():
    assert falling([0.9, 0.2, 0.4, 0.3, 0.1], [1, 1, 1, 2, 1]) == pytest.approx([0.9, 0.3, 0.3, 0.3, 0.1])
    assert falling([0.1, 0.2, 0.6], [1, 1, 1]) == pytest.approx([0.3] * 3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        values = torch.rand(9, generator=generator).tolist()
        weights = (torch.rand(9, generator=generator) + 0.1).tolist()
        found = falling(values, weights)
        assert all(after <= before for before, after in pairwise(found))
        # Least squares over sequences that fall: no better one has the mean of any other split (min-max formula).
        for i in range(9):
            tails = [min(weighted(values, weights, low, high) for low in range(i + 1)) for high in range(i + 1, 10)]
            assert found[i] == pytest.approx(max(tails))


def weighted(values, weights, low, high):
    return sum(v * w for v, w in zip(values[low:high], weights[low:high], strict=True)) / sum(weights[low:high])
