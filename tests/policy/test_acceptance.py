"""What trees and levels are worth, by what was accepted."""

from __future__ import annotations

import math
import random

import pytest
import torch

from hf_speculate.drafting import Calibration
from hf_speculate.policy import Acceptance
from hf_speculate.policy.early_stopping import WhilePaying
from hf_speculate.tree import HostTree, TreeRow


TREE = TreeRow([5, 1, 2, 3, 0], [-1, 0, 0, 1, -2], [0.0, math.log(0.6), math.log(0.2), math.log(0.3), 0.0])


def test_acceptance_of_a_node_is_that_of_its_path():
    calibration = Calibration()
    found = Acceptance(calibration).probabilities(TREE)
    first, second, below = (calibration.share(math.log(p)) for p in (0.6, 0.2, 0.5))
    assert found == pytest.approx([1.0, first, second, first * below, 0.0])


def test_acceptance_counts_children_of_accepted_nodes_only():
    counted = []

    class Watched(Calibration):
        def count(self, value, is_hit):
            counted.append((round(math.exp(value), 2), is_hit))

    acceptance = Acceptance(Watched())
    acceptance.count(TREE, [0, 1], [1, 9])
    assert counted == [(0.6, True), (0.2, False), (0.5, False)]
    counted.clear()
    acceptance.count(TREE, [0], [8])
    assert counted == [(0.6, False), (0.2, False)]
    counted.clear()
    acceptance.count(TREE, [0, 1], [1])  # the text ended there: whether node 3 was right is unknown
    assert counted == [(0.6, True), (0.2, False)]


def test_acceptance_without_values_is_learnt_by_rank():
    """The first child is right half the time, the second one never."""
    acceptance, tree = Acceptance(Calibration()), TreeRow([5, 1, 2, 3, 4], [-1, 0, 0, 1, 1])
    generator = random.Random(0)
    for _ in range(300):
        hit = generator.random() < 0.5
        acceptance.count(tree, [0, 1] if hit else [0], [1, 9] if hit else [9])
        acceptance.fade()
    found = acceptance.probabilities(tree)
    assert found[1] == pytest.approx(0.35, abs=0.2)  # with those below, which are never right
    assert found[2] < 0.1
    assert found[3] == pytest.approx(found[1] ** 2)


def test_levels_are_worth_the_acceptance_of_their_nodes():
    acceptance = Acceptance(Calibration())
    for _ in range(300):
        acceptance.fade()
        found = [[1.0, 0.6, 0.05, 0.3]]
        acceptance.note_levels(HostTree([[5, 1, 2, 3]], [[-1, 0, 0, 1]]), [0], found, price=0.1)
        acceptance.note_nodes(found)
    assert acceptance.levels()[:2] == pytest.approx([0.5, 0.2], abs=0.02)
    assert acceptance.next_level(1) == pytest.approx(0.2 / 0.65, abs=0.02)
    assert acceptance.nodes()[:3] == pytest.approx([0.6, 0.05, 0.3], abs=0.03)


class TestEarlyStopping:
    def test_while_paying_stops_at_unlikely_parents(self):
        asked = WhilePaying(Acceptance(Calibration()), [0], price=0.4)
        assert not asked.is_asked
        assert asked(torch.tensor([[math.log(0.9), math.log(0.05)]]))
        assert asked(torch.tensor([[math.log(0.72), math.log(0.01)]]), torch.tensor([[0, 0]]))
        assert not asked(torch.tensor([[math.log(0.2), math.log(0.1)]]), torch.tensor([[0, 0]]))
        assert (asked.is_asked, asked.levels) == (True, 3)

    def test_while_paying_ignores_ended_rows(self):
        values = torch.tensor([[-0.01], [-7.0]])
        acceptance = Acceptance(Calibration())
        assert WhilePaying(acceptance, [0], price=0.5)(values)
        assert not WhilePaying(acceptance, [1], price=0.5)(values)
        assert WhilePaying(acceptance, [7], price=0.5)(values[:1])  # the drafter has left out all others
