"""Options of EAGLE drafting."""

from __future__ import annotations

import pytest

import hf_speculate
from hf_speculate import Speculator
from hf_speculate_plugins.eagle import EagleDrafter, EagleOptions

from ...support.heads import target
from ...support.inputs import random_prompt
from ...support.tiny_heads import random_eagle


def test_more_ranks_than_tokens(head):
    with pytest.raises(ValueError, match="60 children"):
        EagleDrafter.from_folder(head(), target(), tree=[(59,)])


def test_sizes_are_positive():
    with pytest.raises(ValueError, match="depth must be at least 1"):
        EagleOptions(depth=0)
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        EagleOptions(top_k=0)


@pytest.mark.parametrize(("top_k", "do_sample", "expected"), [(None, False, 4), (None, True, 8), (3, True, 3)])
def test_children_of_a_node(tiny_model, top_k, do_sample, expected):
    """A random head finds all tokens about equally probable: the root has as many children as it may."""
    model = tiny_model()
    drafter = random_eagle(3, top_k, 24, model, False)
    request = {"max_new_tokens": 8, "do_sample": do_sample, "speculator": Speculator(drafter, adaptive=False)}
    rounds = hf_speculate.rounds(model, random_prompt(9), **request)
    parents = [round.tree.host.parents[0] for round in rounds if round.tree.num_nodes > 1]
    assert parents[0].count(0) == expected
