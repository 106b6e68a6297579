"""Static trees level by level."""

from __future__ import annotations

import itertools

from hf_speculate_plugins.trees import StaticTree
from hf_speculate_plugins.trees.static import levels_of


def test_every_node_is_a_child_once():
    # All paths whose ranks, counted from 1, add up to at most 5: the 1 + 2 + 4 + 8 + 16 compositions of 1 … 5.
    paths = (path for depth in range(1, 6) for path in itertools.product(range(5), repeat=depth))
    tree = StaticTree.of([path for path in paths if sum(path) + len(path) <= 5], "any")
    assert len(tree.choices) == 31
    assert sorted(child for level in levels_of(tree) for child in level.children) == list(range(1, 32))
    assert tree.cut(2).max_depth == 2
    assert sum(len(level.children) for level in levels_of(tree.cut(2))) == sum(len(path) < 3 for path in tree.choices)
