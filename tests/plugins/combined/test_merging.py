"""Trees of several drafters become one."""

from __future__ import annotations

import math

import pytest

from hf_speculate.tree import TreeRow
from hf_speculate_plugins.combined import expected_length, merge_row


def paths(row):
    """Token paths of all nodes, in order."""
    found = [()]
    for token, parent in zip(row.token_ids[1:], row.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]


FIRST = TreeRow([5, 1, 2, 3], [-1, 0, 1, 0]), [1.0, 0.5, 0.4, 0.1]  # 1, 1-2, 3
SECOND = TreeRow([5, 1, 4, 9, 0], [-1, 0, 1, 2, -2]), [1.0, 0.6, 0.3, 0.2, 0.9]  # 1, 1-4, 1-4-9, padding


def test_equal_paths_become_one_node_and_the_most_probable_come_first():
    merged = merge_row(5, [FIRST, SECOND], max_nodes=99)
    assert paths(merged) == [(1,), (1, 2), (1, 4), (1, 4, 9), (3,)]
    assert [math.exp(value) for value in merged.values] == pytest.approx([1.0, 0.6, 0.4, 0.3, 0.2, 0.1])
    assert expected_length(merged) == pytest.approx(1.6)


def test_the_most_probable_nodes_are_kept_with_their_parents():
    assert paths(merge_row(5, [SECOND, FIRST], max_nodes=3)) == [(1,), (1, 2), (1, 4)]


def test_of_equally_probable_nodes_the_parent_comes_first():
    chain = TreeRow([5, 1, 2, 3], [-1, 0, 1, 2]), [1.0, 0.5, 0.5, 0.5]
    assert paths(merge_row(5, [chain], max_nodes=2)) == [(1,), (1, 2)]


def test_no_draft_is_a_root():
    assert merge_row(5, [], max_nodes=4) == TreeRow([5], [-1], [0.0])
