"""One set of rules for static trees, whichever method takes them."""

from __future__ import annotations

import itertools

import pytest

from hf_speculate_plugins.eagle import EagleOptions
from hf_speculate_plugins.medusa import MedusaOptions
from hf_speculate_plugins.trees import StaticTree, levels_of


MAKERS = {"eagle": lambda choices: EagleOptions(tree=choices), "medusa": lambda choices: MedusaOptions(choices=choices)}


@pytest.mark.parametrize("method", MAKERS)
@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "at least one choice"),
        ([()], r"\(\) is not a choice"),
        ([(-1,)], r"\(-1,\) is not a choice"),
        ([(0,), (1,), (0,)], r"has the choice \(0,\) twice"),
        ([(0, 0)], r"has the choice \(0, 0\) but not its parent \(0,\)"),
        ([(0,), (0, 1, 2)], r"not its parent \(0, 1\)"),
    ],
)
def test_every_method_refuses_the_same_with_the_same_words(method, choices, message):
    with pytest.raises(ValueError, match=f"^{method}: .*{message}"):
        MAKERS[method](choices)


@pytest.mark.parametrize("choices", [[(0.5,)], [0, 1], ["ab"]])
def test_what_is_no_list_of_choices(choices):
    with pytest.raises(ValueError, match=r"eagle: a static tree is a list of choices such as \(0, 1\)"):
        StaticTree.of(choices, "eagle")


def test_every_method_brings_choices_into_one_order():
    shuffled = [[1], [0, 1], [0], [0, 1, 0], [0, 0]]
    expected = ((0,), (1,), (0, 0), (0, 1), (0, 1, 0))
    assert StaticTree.of(shuffled, "any").choices == expected
    assert MedusaOptions(choices=shuffled).choices == expected
    assert EagleOptions(tree=shuffled).static_tree.choices == expected


def test_parents_and_widths():
    tree = StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 1, 0)))
    assert tree.parents == (-1, 0, 0, 1, 1, 4)
    assert tree.widths == (2, 2, 1)
    assert tree.cut(2).parents == (-1, 0, 0, 1, 1)
    assert tree.cut(0).parents == (-1,)


def test_every_node_is_a_child_once():
    # All paths whose ranks, counted from 1, add up to at most 5: the 1 + 2 + 4 + 8 + 16 compositions of 1 … 5.
    paths = (path for depth in range(1, 6) for path in itertools.product(range(5), repeat=depth))
    tree = StaticTree.of([path for path in paths if sum(path) + len(path) <= 5], "any")
    assert len(tree.choices) == 31
    assert sorted(child for level in levels_of(tree) for child in level.children) == list(range(1, 32))
    assert tree.cut(2).max_depth == 2
    assert sum(len(level.children) for level in levels_of(tree.cut(2))) == sum(len(path) < 3 for path in tree.choices)
