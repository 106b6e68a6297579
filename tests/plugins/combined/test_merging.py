"""Trees of several drafters become one."""

from __future__ import annotations

import torch

from hf_speculate.tree import DraftTree
from hf_speculate_plugins.combined.history import AcceptanceHistory
from hf_speculate_plugins.combined.merging import merge_row


class Sure:
    """A session that is only sure."""

    def __init__(self, confidence=0):
        self.fixed = confidence

    def confidence(self, row):
        return self.fixed


def tree(tokens, parents):
    return DraftTree.from_rows([(tokens, parents)])


def paths(row):
    """Token paths of all nodes, in order."""
    found = [()]
    for token, parent in zip(row.tokens[1:], row.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]


def test_equal_paths_become_one_node_and_parents_come_first():
    first = tree([5, 1, 2, 3], [-1, 0, 1, 0])  # 1, 1-2, 3
    second = tree([5, 1, 4, 9], [-1, 0, 1, 2])  # 1, 1-4, 1-4-9
    merged = merge_row(0, 5, AcceptanceHistory(2), [(0, Sure(), first), (1, Sure(), second)], max_nodes=99)
    assert merged.tokens[0] == 5
    assert sorted(paths(merged)) == [(1,), (1, 2), (1, 4), (1, 4, 9), (3,)]
    assert all(parent < node for node, parent in enumerate(merged.parents))


def test_what_was_accepted_more_often_comes_first_and_is_kept():
    history, session = AcceptanceHistory(2), Sure()
    good, bad = tree([5, 1, 2], [-1, 0, 1]), tree([5, 7, 8], [-1, 0, 1])
    for _ in range(20):
        assert history.learn(0, 0, good, 0, [1, 2, 3]) == 2
        assert history.learn(1, 0, bad, 0, [1, 2, 3]) == 0
    drafts = [(1, session, bad), (0, session, good)]
    assert paths(merge_row(0, 5, history, drafts, max_nodes=4))[:2] == [(1,), (1, 2)]
    assert paths(merge_row(0, 5, history, drafts, max_nodes=2)) == [(1,), (1, 2)]
    best = merge_row(0, 5, history, [(0, session, good)], max_nodes=9).expected_length
    worst = merge_row(0, 5, history, [(1, session, bad)], max_nodes=9).expected_length
    assert best > 1.7
    assert worst < 0.3


def test_padding_is_no_draft():
    history, padded = AcceptanceHistory(1), DraftTree(torch.tensor([[5, 1, 0], [5, 2, 3]]), [[-1, 0, -2], [-1, 0, 1]])
    assert history.learn(0, 0, padded, 0, [1, 0]) == 1
    merged = merge_row(0, 5, history, [(0, Sure(), padded)], max_nodes=9)
    assert paths(merged) == [(1,)]
