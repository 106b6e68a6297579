"""Dynamic trees equal a slow plain-Python reference of EAGLE-2's rule."""

from __future__ import annotations

import pytest
import torch

from hf_speculate.drafting import DraftChecks
from hf_speculate_plugins.trees import grow_tree


VOCAB_SIZE = 11
ROOTS = torch.tensor([3, 7])


def random_scores(path, vocab_size=VOCAB_SIZE):
    """Scores after a path, row first: a function of the path alone."""
    generator = torch.Generator().manual_seed(sum(token * 101**i for i, token in enumerate(path, 1)) % 2**31)
    return 2 * torch.randn(vocab_size, generator=generator)


def uniform(path):
    return torch.zeros(VOCAB_SIZE)


def certain(path):
    """One child of probability 1 in floating point: it is exactly as good as its parent."""
    scores = torch.full((VOCAB_SIZE,), -1e4)
    scores[sum(path) % VOCAB_SIZE] = 0
    return scores


def two_possible(path):
    """As after top-k sampling with k = 2: the others have probability 0."""
    scores = torch.full((VOCAB_SIZE,), -torch.inf)
    scores[[sum(path) % VOCAB_SIZE, (sum(path) + 4) % VOCAB_SIZE]] = torch.tensor([0.0, 1.0])
    return scores


SCORES = {"random": random_scores, "uniform": uniform, "certain": certain, "two possible": two_possible}


def reference(row, scores, *, depth, top_k, max_nodes, token_ids):
    """(tokens, parents) of one row without its root, parents as indices into the tree."""

    def children(path, value):
        values = torch.log_softmax(scores(path), dim=-1)
        best, columns = values.topk(min(top_k, len(values)))
        return [
            (value + child, (*path, int(column if token_ids is None else token_ids[column])))
            for child, column in zip(best, columns, strict=True)
        ]

    pool = frontier = children((row,), torch.tensor(0.0))
    for _ in range(1, depth):
        candidates = [child for value, path in frontier for child in children(path, value)]
        pool = pool + candidates
        best = torch.stack([value for value, _ in candidates]).topk(len(frontier)).indices
        frontier = [candidates[index] for index in best]
    order = sorted(range(len(pool)), key=lambda index: -pool[index][0].item())[:max_nodes]
    paths = [(row,), *(pool[index][1] for index in order)]
    return [path[-1] for path in paths[1:]], [paths.index(path[:-1]) for path in paths[1:]]


class Expand:
    """Answers with `scores` of every frontier node's path, and checks what it is given."""

    def __init__(self, scores, top_k):
        self.scores, self.top_k = scores, top_k
        self.calls = 0

    def __call__(self, frontier):
        self.calls += 1
        forest = frontier.forest
        assert frontier.depth == self.calls
        assert frontier.num_cached == (self.calls - 1) * self.top_k
        assert forest.num_nodes == self.calls * self.top_k
        host, rows = forest.host, []
        for row in range(forest.batch_size):
            paths = []
            for node, parent in enumerate(host.parents[row]):
                prefix = paths[parent] if parent >= 0 else (row,)
                paths.append((*prefix, host.token_ids[row][node]))
            for index, node in enumerate(range(frontier.num_cached, forest.num_nodes)):
                above = frontier.num_cached - self.top_k + int(frontier.previous_index[row, index])
                assert host.parents[row][node] == (above if self.calls > 1 else -1)
            rows.append(torch.stack([self.scores(path) for path in paths[frontier.num_cached :]]))
        return torch.stack(rows)


def grow(scores, *, depth, top_k, max_nodes, token_ids=None):
    expand = Expand(scores, top_k)
    root_scores = torch.stack([scores((row,)) for row in range(len(ROOTS))])
    tree = grow_tree(ROOTS, root_scores, expand, depth=depth, top_k=top_k, max_nodes=max_nodes, token_ids=token_ids)
    assert expand.calls == depth - 1
    return tree


@pytest.mark.parametrize(
    "token_ids", [None, torch.randperm(50, generator=torch.Generator().manual_seed(0))[:VOCAB_SIZE]]
)
@pytest.mark.parametrize(("depth", "top_k"), [(1, 1), (1, 4), (2, 3), (4, 2), (5, 3), (6, 4)])
@pytest.mark.parametrize("max_nodes", [1, 2, 7, 20, 1000])
def test_the_tree_is_the_references(depth, top_k, max_nodes, token_ids):
    tree = grow(random_scores, depth=depth, top_k=top_k, max_nodes=max_nodes, token_ids=token_ids)
    for row, root in enumerate(ROOTS.tolist()):
        tokens, parents = reference(
            row, random_scores, depth=depth, top_k=top_k, max_nodes=max_nodes, token_ids=token_ids
        )
        assert tree.host.token_ids[row] == [root, *tokens]
        assert tree.host.parents[row] == [-1, *parents]


@pytest.mark.parametrize("max_nodes", [1, 2, 7, 20])
def test_the_first_nodes_of_a_tree_are_the_tree_of_so_many_nodes(max_nodes):
    wide = grow(random_scores, depth=5, top_k=3, max_nodes=39).first(max_nodes).host
    small = grow(random_scores, depth=5, top_k=3, max_nodes=max_nodes).host
    assert (wide.token_ids, wide.parents) == (small.token_ids, small.parents)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("max_nodes", [1, 3, 8, 30])
def test_ties_and_impossible_tokens_still_give_a_tree(name, max_nodes):
    tree = grow(SCORES[name], depth=5, top_k=3, max_nodes=max_nodes)
    DraftChecks("test", VOCAB_SIZE).admit(tree, ROOTS.tolist())
    assert tree.num_nodes == 1 + min(max_nodes, 3 + 4 * 9)
    assert all(parent < node for row in tree.host.parents for node, parent in enumerate(row))
    assert tree.plan.depths.max() <= tree.max_depth == 5


def test_where_the_drafter_is_certain_the_tree_is_deep():
    tree = grow(certain, depth=5, top_k=3, max_nodes=5)
    assert [tree.host.depth(row) for row in range(2)] == [5, 5]


def test_a_vocabulary_smaller_than_the_frontier_is_used_up():
    tree = grow_tree(ROOTS, torch.zeros(2, 2), lambda frontier: torch.zeros(2, 2, 2), depth=3, top_k=5, max_nodes=100)
    DraftChecks("test", 8).admit(tree, ROOTS.tolist())
    assert [tree.host.num_drafted(row) for row in range(2)] == [2 + 4 + 4] * 2
