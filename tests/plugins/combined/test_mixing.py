"""Drafts of several drafters as one tree: nodes, their order, and their probabilities."""

from __future__ import annotations

import math
import random

import pytest

from hf_speculate.tree import TreeRow
from hf_speculate_plugins.combined.mixing import DraftedRow, Mixing


ROOT = 5
FIRST = DraftedRow(TreeRow([5, 1, 2, 3], [-1, 0, 1, 0]), [1.0, 0.5, 0.4, 0.1])  # 1, 1-2, 3
SECOND = DraftedRow(TreeRow([5, 1, 4, 9, 0], [-1, 0, 1, 2, -2]), [1.0, 0.6, 0.3, 0.2, 0.9])  # 1, 1-4, 1-4-9, padding


def chain(*tokens, share):
    probabilities = [share**depth for depth in range(len(tokens) + 1)]
    return DraftedRow(TreeRow([ROOT, *tokens], list(range(-1, len(tokens)))), probabilities)


def merged(*drafts, mixing=None, max_nodes=99):
    """Path -> probability, in the order of the tree."""
    row = (mixing or Mixing()).merged(ROOT, drafts, max_nodes)
    found = [()]
    for token, parent in zip(row.token_ids[1:], row.parents[1:], strict=True):
        found.append((*found[parent], token))
    assert row.token_ids[0] == ROOT
    return dict(zip(found[1:], map(math.exp, row.values[1:]), strict=True))


def test_equal_paths_become_one_node_and_drafts_that_differ_share_the_probability():
    found = merged(FIRST, SECOND)
    # 1: half of 0.5 and half of 0.6. 1-2: half of 0.8 of that; 1-4: half of 0.5. 1-4-9: the second's alone.
    expected = {(1,): 0.55, (1, 2): 0.22, (1, 4): 0.1375, (1, 4, 9): 0.0917, (3,): 0.05}
    assert list(found) == sorted(expected, key=lambda path: -expected[path])
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_single_draft_keeps_its_probabilities():
    assert merged(FIRST, None) == pytest.approx({(1,): 0.5, (1, 2): 0.4, (3,): 0.1})
    assert merged(None, FIRST) == merged(FIRST, None)


def test_the_most_probable_nodes_are_kept_with_their_parents():
    assert list(merged(SECOND, FIRST, max_nodes=3)) == [(1,), (1, 2), (1, 4)]


def test_of_equally_probable_nodes_the_parent_comes_first():
    assert list(merged(chain(1, 2, 3, share=1.0), max_nodes=2)) == [(1,), (1, 2)]


def test_no_draft_is_a_root():
    assert Mixing().merged(ROOT, [None, None], 4) == TreeRow([ROOT], [-1], [0.0])
    assert Mixing().merged(ROOT, [], 4) == TreeRow([ROOT], [-1], [0.0])


def test_the_drafter_that_is_right_is_trusted():
    mixing, right, wrong = Mixing(), chain(1, 2, share=0.7), chain(8, 9, share=0.7)
    for _ in range(50):
        mixing.learn([wrong, right], [1, 2, 3])
    found = merged(wrong, right, mixing=mixing)
    assert found[1,] > 0.9
    assert found[8,] < 0.1


def test_trust_depends_on_how_sure_drafters_are():
    """The first is right if it is sure, else the second."""
    mixing = Mixing()
    for _ in range(50):
        mixing.learn([chain(1, share=0.9), chain(2, share=0.5)], [1])
        mixing.learn([chain(1, share=0.4), chain(2, share=0.5)], [2])
    sure = merged(chain(1, share=0.9), chain(2, share=0.5), mixing=mixing)
    unsure = merged(chain(1, share=0.4), chain(2, share=0.5), mixing=mixing)
    assert sure[1,] > 0.85 > 0.15 > sure[2,]
    assert unsure[2,] > 0.85 > 0.15 > unsure[1,]


def test_agreement_is_worth_what_it_was_worth():
    """Both say 0.6. Where they agree they are right in nine of ten rounds, where they differ in half of them one is."""
    mixing, generator = Mixing(), random.Random(0)
    for _ in range(400):
        mixing.learn([chain(1, share=0.6), chain(1, share=0.6)], [1 if generator.random() < 0.9 else 7])
        mixing.learn([chain(1, share=0.6), chain(2, share=0.6)], [generator.choice([1, 2, 7, 7])])
    assert merged(chain(1, share=0.6), chain(1, share=0.6), mixing=mixing)[1,] == pytest.approx(0.9, abs=0.05)
    assert merged(chain(1, share=0.6), chain(2, share=0.6), mixing=mixing)[1,] == pytest.approx(0.25, abs=0.1)


def test_what_came_after_the_end_of_the_drafts_teaches_nothing():
    mixing = Mixing()
    mixing.learn([chain(1, share=0.6), None], [7, 1, 1, 1])
    before = merged(chain(1, share=0.6), chain(2, share=0.6), mixing=mixing)
    assert before == pytest.approx({(1,): 0.3, (2,): 0.3})
