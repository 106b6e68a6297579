"""Static trees and options of Medusa."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_speculate import AutoSpeculator
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaOptions, computed_choices, measured_accuracies
from hf_speculate_plugins.medusa.options import DEFAULT_ACCURACIES, column_index
from hf_speculate_plugins.trees import StaticTree

from ...support.heads import MEDUSA_CHOICES, random_heads, write_medusa_heads


def test_computed_choices_are_the_best_tree():
    accuracies = ((0.6, 0.2), (0.5, 0.1))
    # Values: 0 .6, 00 .3, 1 .2, 10 .1, 01 .06, 11 .02
    assert computed_choices(accuracies, 3) == ((0,), (1,), (0, 0))
    assert computed_choices(accuracies, 5) == ((0,), (1,), (0, 0), (0, 1), (1, 0))
    assert len(computed_choices(accuracies, 100)) == 6
    assert computed_choices(((0.0, 0.4),), 5) == ((1,),)  # a rank that is never right has no place


def test_the_default_tree_has_the_shape_of_the_papers():
    """mc_sim_7b_63 has 10, 28, 23 and 2 nodes at depths 1 to 4."""
    choices = computed_choices(DEFAULT_ACCURACIES, 63)
    by_depth = [sum(len(choice) == depth for choice in choices) for depth in range(1, 5)]
    assert len(choices) == 63
    assert all(abs(ours - theirs) <= 6 for ours, theirs in zip(by_depth, (10, 28, 23, 2), strict=True))


def test_accuracies_are_measured_at_the_right_offset():
    text = torch.arange(10)
    logits = torch.zeros(2, 10, 20)
    for position in range(10):
        logits[0, position, position + 2] = 1.0  # head 0: right with rank 0
        logits[1, position, position + 3] = 1.0  # head 1: right with rank 1
        logits[1, position, 0] = 2.0
    assert measured_accuracies(logits, text, max_ranks=3) == ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))
    token_ids = torch.arange(19, -1, -1)
    mapped = measured_accuracies(logits.flip(-1), text, max_ranks=2, draft_token_ids=token_ids)
    assert mapped == ((1.0, 0.0), (0.0, 1.0))


def test_trees_are_cut_to_the_heads_and_the_budget(tiny_model):
    drafter = MedusaDrafter(random_heads(2), tiny_model(), MedusaOptions(choices=MEDUSA_CHOICES))
    assert drafter.tree.max_depth == 2
    assert drafter.tree.widths == (3, 2)
    assert drafter.tree.cut(1).choices == MEDUSA_CHOICES[:3]
    assert drafter.tree.cut(0).parents == (-1,)
    assert column_index(StaticTree(MEDUSA_CHOICES), torch.device("cpu")).tolist() == [0, 1, 2, 3, 4, 3, 5, 6]
    assert MedusaDrafter(random_heads(2), tiny_model(), MedusaOptions(max_nodes=5)).tree.parents.count(0) < 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"choices": [(0,)], "max_nodes": 4}, "whole tree"),
        ({"max_nodes": 0}, "at least 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MedusaOptions(**options)


def test_a_rank_beyond_the_vocabulary_is_refused(tiny_model):
    with pytest.raises(ValueError, match="rank 40"):
        MedusaDrafter(random_heads(truncated=40), tiny_model(), MedusaOptions(choices=[(40,)]))


def test_options_reach_the_drafter_and_unknown_ones_raise(tmp_path, tiny_model):
    folder = write_medusa_heads(tmp_path)
    speculator = AutoSpeculator.from_name("medusa", target=tiny_model(), heads=folder, max_nodes=7)
    assert len(speculator.drafter.tree.choices) == 7
    assert "7 nodes" in repr(speculator)
    with pytest.raises(TypeError, match="unknown"):
        AutoSpeculator.from_pretrained(folder, target=tiny_model(), unknown=1)
    with pytest.raises(TypeError, match="needs its heads"):
        AutoSpeculator.from_name("medusa", target=tiny_model())
    with pytest.raises(AttributeError):
        replace(MedusaOptions(), max_nodes=3).max_nodes = 4
