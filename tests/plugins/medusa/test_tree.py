"""Static trees and options of Medusa."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_speculate import AutoSpeculator
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaOptions, StaticTree
from hf_speculate_plugins.medusa.tree import ACCURACIES, best_static_tree, tree_tensors

from ...support.heads import MEDUSA_CHOICES, random_heads, write_medusa_heads


def test_computed_trees_are_the_best_tree():
    accuracies = ((0.6, 0.2), (0.5, 0.1))
    # Values: 0 .6, 00 .3, 1 .2, 10 .1, 01 .06, 11 .02
    assert best_static_tree(accuracies, 3).paths == ((0,), (1,), (0, 0))
    assert best_static_tree(accuracies, 5).paths == ((0,), (1,), (0, 0), (0, 1), (1, 0))
    assert len(best_static_tree(accuracies, 100).paths) == 6
    assert best_static_tree(((0.0, 0.4),), 5).paths == ((1,),)  # a rank that is never right has no place


def test_the_default_tree_has_the_shape_of_the_papers():
    """mc_sim_7b_63 has 10, 28, 23 and 2 nodes at depths 1 to 4."""
    choices = best_static_tree(ACCURACIES, 63).paths
    by_depth = [sum(len(choice) == depth for choice in choices) for depth in range(1, 5)]
    assert len(choices) == 63
    assert all(abs(ours - theirs) <= 6 for ours, theirs in zip(by_depth, (10, 28, 23, 2), strict=True))


def test_trees_are_cut_to_the_heads_and_the_budget(tiny_model):
    drafter = MedusaDrafter(random_heads(2), tiny_model(), tree=StaticTree.of(MEDUSA_CHOICES))
    assert drafter.tree.max_depth == 2
    assert drafter.tree.widths == (3, 2)
    assert drafter.tree.cut(1).paths == MEDUSA_CHOICES[:3]
    assert drafter.tree.cut(0).parents == (-1,)
    assert tree_tensors(StaticTree(MEDUSA_CHOICES), torch.device("cpu")).columns.tolist() == [0, 1, 2, 3, 4, 3, 6, 9]
    assert MedusaDrafter(random_heads(2), tiny_model(), MedusaOptions(max_nodes=5)).tree.parents.count(0) < 6
    few = MedusaDrafter(random_heads(truncated=4), tiny_model(), MedusaOptions(max_nodes=99))
    assert max(few.tree.widths) == 4


def test_options_reach_the_drafter_and_unknown_ones_raise(tmp_path, tiny_model):
    folder = write_medusa_heads(tmp_path)
    speculator = AutoSpeculator.from_name("medusa", target=tiny_model(), heads=folder, max_nodes=7)
    assert len(speculator.drafter.tree.paths) == 7
    assert "7 nodes" in repr(speculator)
    with pytest.raises(TypeError, match="unknown"):
        AutoSpeculator.from_pretrained(folder, target=tiny_model(), unknown=1)
    with pytest.raises(TypeError, match="needs its heads"):
        AutoSpeculator.from_name("medusa", target=tiny_model())
    with pytest.raises(AttributeError):
        replace(MedusaOptions(), max_nodes=3).max_nodes = 4
