"""Draft trees and their plans: structure properties that need no model."""

from __future__ import annotations

import gc
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_speculate.attention.ranges import ranges_of_trees
from hf_speculate.errors import DrafterError
from hf_speculate.tree import PADDING_PARENT, ROOT_PARENT, DraftTree, HostFacts, TreePlan, TreeRow


deterministic = settings(derandomize=True, deadline=None, max_examples=80, database=None)


@st.composite
def structures(draw, max_nodes: int = 20):
    """Parents of one row. Half of the nodes hang on their predecessor, so deep trees are common; some are padding."""
    parents, real = [ROOT_PARENT], [0]
    for node in range(1, draw(st.integers(1, max_nodes))):
        kind = draw(st.sampled_from(("deep", "deep", "any", "padding")))
        if kind == "padding":
            parents.append(PADDING_PARENT)
            continue
        parents.append(real[-1] if kind == "deep" else draw(st.sampled_from(real)))
        real.append(node)
    return tuple(parents)


@st.composite
def batches(draw):
    """1 to 3 rows of equal width."""
    rows = draw(st.lists(structures(), min_size=1, max_size=3))
    width = max(map(len, rows))
    return tuple(row + (PADDING_PARENT,) * (width - len(row)) for row in rows)


def lineage(parents, node):
    """A node and its ancestors, by following parents: the plain definition."""
    line = [node]
    while parents[line[-1]] >= 0:
        line.append(parents[line[-1]])
    return set(line)


class TestPlan:
    @deterministic
    @given(batches())
    def test_the_mask_is_the_ancestor_relation_and_depth_its_size(self, rows):
        plan = TreePlan.from_parents(rows)
        for row, parents in enumerate(rows):
            for node in range(len(parents)):
                attended = set(plan.ancestors[row, node].nonzero().flatten().tolist())
                assert attended == lineage(parents, node)
                assert plan.depths[row, node] == len(attended) - 1
        assert plan.max_depth == plan.depths.max()
        assert plan.num_nodes == len(rows[0])

    @deterministic
    @given(batches(), st.integers(0, 5))
    def test_a_plan_made_on_the_device_equals_the_one_made_on_the_host(self, rows, slack):
        host = TreePlan.from_parents(rows)
        device = TreePlan.from_tensor(torch.tensor(rows), max_depth=host.max_depth + slack)
        assert torch.equal(device.ancestors, host.ancestors)
        assert torch.equal(device.depths, host.depths)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_the_bias_is_zero_for_ancestors_and_the_lowest_number_elsewhere(self, dtype):
        plan = TreePlan.from_parents(((-1, 0, 0, 1),))
        bias = plan.bias(dtype, torch.device("cpu"))
        assert bias.dtype == dtype
        assert torch.equal(bias == 0, plan.ancestors)
        assert set(bias[~plan.ancestors].tolist()) == {torch.finfo(dtype).min}
        assert plan.bias(dtype, torch.device("cpu")) is bias


class TestShapes:
    def test_a_chain_is_a_tree_with_one_branch(self):
        tree = DraftTree.chain(torch.tensor([[4, 5, 6, 7]]))
        assert tree.host.parents == [[-1, 0, 1, 2]]
        assert tree.plan.depths.tolist() == [[0, 1, 2, 3]]
        assert tree.max_depth == 3

    def test_rows_of_different_width_are_padded(self):
        tree = DraftTree.from_rows([([4, 5, 6], [-1, 0, 0]), ([7], [-1])])
        assert tree.token_ids.tolist() == [[4, 5, 6], [7, 7, 7]]
        assert tree.host.parents == [[-1, 0, 0], [-1, -2, -2]]
        assert [tree.host.num_drafted(row) for row in range(2)] == [2, 0]
        assert [tree.host.depth(row) for row in range(2)] == [1, 0]

    @pytest.mark.parametrize("num_rows", [1, 2], ids=["shared", "a row each"])
    def test_a_device_tree_reads_back_as_the_same_host_tree(self, num_rows):
        tokens, parents = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([[-1, 0, 0, 2], [-1, 0, 1, 2]])
        tree = DraftTree(tokens, parents[:num_rows], max_depth=3)
        assert tree.host.token_ids == tokens.tolist()
        assert tree.host.parents == parents[:num_rows].expand(2, -1).tolist()

    def test_a_device_tree_needs_its_depth(self):
        with pytest.raises(DrafterError, match="max_depth"):
            DraftTree(torch.tensor([[1, 2]]), torch.tensor([[-1, 0]]))


class TestHostTree:
    @deterministic
    @given(structures(), st.randoms(use_true_random=False))
    def test_child_finds_exactly_the_child_with_that_token(self, parents, random):
        tokens = [random.randrange(4) for _ in parents]
        host = DraftTree(torch.tensor([tokens]), parents).host
        for node in range(len(parents)):
            for token in range(4):
                children = [i for i, p in enumerate(parents) if p == node and tokens[i] == token]
                assert host.child(0, node, token) == (children[0] if children else None)


class TestPruned:
    @deterministic
    @given(batches(), st.lists(st.integers(0, 6), min_size=3, max_size=3))
    def test_exactly_the_nodes_within_the_limit_stay_in_order(self, rows, limits):
        tokens = torch.arange(len(rows) * len(rows[0])).view(len(rows), -1)  # all different: tokens name nodes
        tree = DraftTree(tokens, rows)
        pruned = tree.pruned(limits[: len(rows)])
        for row, parents in enumerate(rows):
            depths = tree.plan.depths[row].tolist()
            stays = [n for n, p in enumerate(parents) if p != PADDING_PARENT and depths[n] <= limits[row]]
            kept = pruned.host.parents[row]
            real = [n for n, p in enumerate(kept) if p != PADDING_PARENT]
            assert [pruned.host.token_ids[row][n] for n in real] == tokens[row, stays].tolist()
            for new, old in zip(real[1:], stays[1:], strict=True):
                assert pruned.host.token_ids[row][kept[new]] == tokens[row, parents[old]]


def test_a_plan_extended_level_by_level_is_the_plan_of_the_whole():
    parents = [[-1, -1, -1], [2, 0, 2], [3, 5, 4], [7, 7, 6]]
    plan = TreePlan.of_siblings(2, 3, torch.device("cpu"))
    for level in parents[1:]:
        plan = plan.extended(torch.tensor([level, level[::-1]]))
    rows = [[each for level in parents for each in level], [each for level in parents for each in level[::-1]]]
    expected = TreePlan.from_tensor(torch.tensor(rows), max_depth=3)
    assert torch.equal(plan.ancestors, expected.ancestors)
    assert torch.equal(plan.depths, expected.depths)
    assert plan.max_depth == 3


class TestSelections:
    def test_a_selection_is_as_wide_as_its_rows_need(self):
        rows = [([5], [-1]), ([6, 7, 8, 9], [-1, 0, 0, 2]), ([1, 2], [-1, 0])]
        tree = DraftTree.from_rows(rows)
        assert tree.select([0, 1, 2]) is tree
        assert (list(tree.rows), tree.slot(2)) == ([0, 1, 2], 2)
        selected = tree.select([0, 2])
        assert selected.token_ids.tolist() == [[5, 5], [1, 2]]
        assert (list(selected.rows), selected.slot(2), selected.max_depth) == ([0, 2], 1, 1)
        assert selected.host.child(selected.slot(2), 0, 2) == 1

    def test_shared_structures_and_those_on_the_device_stay(self):
        tokens, parents = torch.arange(9).view(3, 3), [-1, 0, 0]
        for structure in (parents, torch.tensor([parents]), torch.tensor([parents] * 3)):
            tree = DraftTree(tokens, structure, max_depth=1).select([1, 2])
            assert tree.token_ids.tolist() == [[3, 4, 5], [6, 7, 8]]
            assert tree.host.parents == [parents, parents]


class TestValues:
    """Values go with their nodes, through everything that makes a tree of another."""

    TREE = DraftTree.from_rows(
        [TreeRow([5, 1, 2, 3], [-1, 0, 0, 1], [0.0, -0.5, -3.0, -0.75]), TreeRow([6, 4], [-1, 0], [0.0, -0.25])]
    )

    def test_parts_of_a_tree_keep_the_values_of_their_nodes(self):
        tree = self.TREE
        assert tree.first(1).host.values == [[0.0, -0.5], [0.0, -0.25]]
        assert tree.select([1]).host.values == [[0.0, -0.25]]
        assert tree.gather([1, 0]).host.values == [[0.0, -0.25, 0.0, 0.0], [0.0, -0.5, -3.0, -0.75]]
        assert tree.pruned([1, 1]).host.values == [[0.0, -0.5, -3.0], [0.0, -0.25, 0.0]]
        for part in (tree.first(1), tree.gather([1, 0]), tree.select([0])):
            assert part.values.tolist() == part.host.values

    def test_values_are_read_with_parents_and_tokens_in_one_transfer(self):
        tree = self.TREE
        on_device = DraftTree(tree.token_ids, torch.tensor(tree.host.parents), max_depth=2, values=tree.values)
        assert on_device.host_copy.read_with(torch.tensor([[9], [8]])) == [[9], [8]]
        assert on_device.host == tree.host

    def test_the_best_nodes_of_each_row(self):
        assert self.TREE.best(2).host.token_ids == [[5, 1, 3], [6, 4, 6]]
        assert self.TREE.best(2).host.parents == [[-1, 0, 1], [-1, 0, -2]]
        assert self.TREE.best(2).host.values == [[0.0, -0.5, -0.75], [0.0, -0.25, 0.0]]

    def test_best_takes_the_first_nodes_without_values(self):
        tree = DraftTree.from_rows([([5, 1, 2, 3], [-1, 0, 0, 1])])
        assert tree.best(2).host.token_ids == [[5, 1, 2]]

    def test_a_node_is_worth_no_more_than_its_parent(self):
        """Values of a drafter that is wrong: the trees stay trees."""
        row = TreeRow([5, 1, 2, 3], [-1, 0, 1, 0], [0.0, math.nan, -0.1, -2.0])
        assert row.best(3)[:2] == ([5, 3, 1, 2], [-1, 0, 0, 2])
        generator = random.Random(0)
        for _ in range(200):
            parents = [-1, *(generator.randrange(node) for node in range(1, 12))]
            values = [generator.choice([math.nan, -math.inf, math.inf, generator.random()]) for _ in parents]
            best = TreeRow(range(12), parents, values).best(generator.randrange(12))
            assert all(parent < node for node, parent in enumerate(best.parents))


def test_cached_plans_are_no_inference_tensors():
    """Made in inference mode, they would be of no use to somebody who wants gradients."""
    with torch.inference_mode():
        plan = TreePlan.from_parents([[-1, 0, 0, 1, 3, 3, 2, 6, 7]])
        bias = plan.bias(torch.float32, torch.device("cpu"))
    assert not plan.ancestors.is_inference()
    assert not plan.depths.is_inference()
    assert not bias.is_inference()


@pytest.mark.parametrize("kind", ["plans", "ranges"])
def test_caches_by_structure_stop_growing(kind):
    """A long session drafts ever new trees."""

    def keep(numbers: range) -> int:
        for number in numbers:
            parents = [-1, 0, *(node - 1 if number >> (node - 2) & 1 else 0 for node in range(2, 12))]
            if kind == "plans":
                TreePlan.from_parents([parents]).bias(torch.float32, torch.device("cpu"))
            else:
                ranges_of_trees([parents], [0], [5], 5)
        gc.collect()
        return sum(issubclass(type(kept), torch.Tensor) for kept in gc.get_objects())

    before = keep(range(300))
    assert keep(range(300, 800)) <= before  # what other tests have left may go meanwhile


class TestRows:
    # root 9: 1 (of 3 and 4), 2; 3 has 5
    ROW = TreeRow([9, 1, 2, 3, 4, 5], [ROOT_PARENT, 0, 0, 1, 1, 3], [0.0, -0.5, -1.0, -2.0, -0.75, -2.25])

    def test_below_returns_the_subtree_of_a_node(self):
        assert self.ROW.below(1) == TreeRow([1, 3, 4, 5], [ROOT_PARENT, 0, 0, 1], [0.0, -1.5, -0.25, -1.75])
        assert self.ROW.below(5) == TreeRow([5], [ROOT_PARENT], [0.0])
        assert self.ROW._replace(values=None).below(3) == TreeRow([3, 5], [ROOT_PARENT, 0])
        padded = TreeRow([9, 1, 0, 2], [ROOT_PARENT, 0, PADDING_PARENT, 1])
        assert padded.below(1) == TreeRow([1, 2], [ROOT_PARENT, 0])

    def test_best_path_follows_the_most_probable_children(self):
        assert self.ROW.best_path() == [0, 1, 4]
        assert self.ROW._replace(values=None).best_path() == [0, 1, 3, 5], "the first child without values"
        assert TreeRow([9], [ROOT_PARENT]).best_path() == [0]
        assert TreeRow([9, 0], [ROOT_PARENT, PADDING_PARENT]).best_path() == [0]


class TestUnread:
    """Trees whose tensors may hold anything."""

    @pytest.fixture
    def tree(self):
        tokens, parents = torch.tensor([[9, 5, -4, 99], [9, 1, 2, 3]]), torch.tensor([[-1, 0, 7, -9], [-1, 0, 1, 1]])
        tree = DraftTree(tokens, parents, max_depth=2)
        tree.unread = HostFacts([3, 4], vocab_size=10)
        return tree

    def test_values_that_a_kernel_could_fail_on_are_clamped(self, tree):
        assert tree.clamped.token_ids.tolist() == [[3, 5, 0, 9], [4, 1, 2, 3]]
        assert tree.clamped.parents.tolist() == [[-1, 0, 1, -2], [-1, 0, 1, 1]]
        assert tree.clamped is tree.clamped
        assert tree.clamped.clamped is tree.clamped

    def test_parts_of_an_unread_tree_are_unread(self, tree):
        assert tree.first(1).unread == ([3, 4], 10)
        assert tree.select([1]).clamped.token_ids.tolist() == [[4, 1, 2, 3]]

    @pytest.mark.parametrize("count", [3, 4])
    def test_lists_from_another_transfer_are_taken_as_they_were_read(self, tree, count):
        """They may be those of a part of the tree, and padding that is no tree may follow."""
        cut = tree.first(count - 1)
        padded = [[[*row[:count], *[-1] * 5] for row in each.tolist()] for each in (tree.token_ids, tree.parents)]
        cut.host_copy.supply([*padded, [[0.0] * (count + 5)] * 2], count)
        assert cut.host.token_ids == tree.token_ids[:, :count].tolist()
        assert cut.host.parents == tree.parents[:, :count].tolist()
        assert ("host" in vars(tree.host_copy)) == (count == 4)
        assert tree.host.token_ids == tree.token_ids.tolist()
