"""Replays and static trees against plain references: growing the narrow tree itself, and trying every tree."""

from __future__ import annotations

import math
import random
from itertools import combinations, product

import pytest

from hf_speculate.planning import DraftedRound, RankTable, best_first, dynamic_plans, replayed, static_plans


RATES = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.05], [0.4, 0.3, 0.1]]


def every_tree(max_depth, max_rank, max_nodes):
    """All sets of paths that hold their parents."""
    paths = [path for depth in range(1, max_depth + 1) for path in product(range(max_rank), repeat=depth)]
    for count in range(1, max_nodes + 1):
        for chosen in combinations(paths, count):
            if all(path[:-1] in chosen or len(path) == 1 for path in chosen):
                yield chosen


def expected_tokens(tree, rates):
    return 1 + sum(math.prod(rates[depth][rank] for depth, rank in enumerate(path)) for path in tree)


def test_best_first_is_the_best_of_all_trees_of_its_size():
    best = {}
    for tree in every_tree(2, 3, 6):
        best[len(tree)] = max(best.get(len(tree), 0.0), expected_tokens(tree, RATES))
    nodes = [path for path, _ in best_first(RATES[:2], 6)]
    for count in range(1, 7):
        assert expected_tokens(nodes[:count], RATES) == pytest.approx(best[count]), count
        assert all(path[:-1] in nodes[:count] or len(path) == 1 for path in nodes[:count])


@pytest.mark.parametrize("seed", range(8))
def test_the_plan_with_the_highest_rate_is_the_best_of_all_trees_under_the_cost_curve(seed):
    generator = random.Random(seed)
    rates = [sorted((generator.random() / 2 for _ in range(2)), reverse=generator.random() < 0.5) for _ in range(3)]
    steps = [generator.random() / 3 for _ in range(6)]

    def verify(nodes):
        return 1 + sum(steps[:nodes])

    def draft(depth, _):
        return 0.1 * seed * depth

    plans = static_plans(rates, verify, draft, max_nodes=6)
    found = max(plans, key=lambda plan: plan.rate)

    def rate(tree):
        return expected_tokens(tree, rates) / (verify(len(tree)) + draft(max(map(len, tree)), 0))

    assert found.rate == pytest.approx(max(map(rate, every_tree(3, 2, 6))))
    assert found.choices is not None
    assert expected_tokens(found.choices, rates) == pytest.approx(found.tokens)


def grown(value, width, depth, max_nodes):
    """EAGLE-2's rule, plainly: the paths of the tree, the best first."""
    pool, frontier = [], [()]
    for _ in range(depth):
        children = [(*path, rank) for path in frontier for rank in range(width)]
        pool += children
        frontier = sorted(children, key=value, reverse=True)[:width]
    return sorted(pool, key=value, reverse=True)[:max_nodes]


@pytest.mark.parametrize("seed", range(6))
def test_a_replay_is_what_the_smaller_tree_would_have_accepted(seed):
    def value(path):
        """Log-probability; of siblings the first is the best, as for ranks of a head."""
        total = 0.0
        for end in range(1, len(path) + 1):
            generator = random.Random(f"{seed} {path[: end - 1]}")
            total += math.log(sorted((generator.random() for _ in range(8)), reverse=True)[path[end - 1]]) - 1
        return total

    wide = grown(value, width=5, depth=5, max_nodes=120)
    index = {(): 0, **{path: node for node, path in enumerate(wide, start=1)}}
    parents = (-1, *(index[path[:-1]] for path in wide))
    generator, compared = random.Random(seed), 0
    for _ in range(20):
        path, truth = (), []
        while path in index:
            path = (*path, generator.choice([0, 0, 1, 2, 4]))
            truth.append(path)
        accepted = tuple(index[path] for path in truth if path in index)
        round_ = DraftedRound(parents, accepted)
        for width, depth, nodes in product((1, 2, 3), (1, 3, 5), (1, 4, 8, 16)):
            narrow = grown(value, width, depth, nodes)
            if not index.keys() >= set(narrow):
                continue  # the wide tree had better to do than to go on where the narrow one does
            compared += 1
            plain = sum(1 for end in range(len(truth)) if all(path in narrow for path in truth[: end + 1]))
            replay = replayed(round_, width, depth)
            assert replay.accepted(nodes) == plain, (width, depth, nodes)
            assert min(nodes, replay.level_sizes[-1]) == len(narrow)
    assert compared > 600


def test_rounds_without_a_draft_cost_a_plain_round_and_bring_one_token():
    rounds = [DraftedRound((-1,), ()), DraftedRound((-1, 0, 1, 2), (1, 2))]
    plans = dynamic_plans(
        rounds, verify=lambda nodes: 1.0 + nodes, draft=lambda depth, width: 0.5, widths=(2,), depths=(3,), sizes=(2, 8)
    )
    small, large = plans
    assert small.tokens == large.tokens == 2.0
    assert small.seconds == pytest.approx((1.5 + 3.5) / 2)
    assert large.seconds == pytest.approx((1.5 + 4.5) / 2)  # three nodes are all there were


def test_ranks_are_counted_where_they_were_on_trial():
    table = RankTable()
    # Two children of the root; the second has three, of which the first was right and has none.
    table.record(DraftedRound((-1, 0, 0, 2, 2, 2), (2, 3)))
    table.record(DraftedRound((-1, 0), ()))
    assert table.trials == [[2, 1], [1, 1, 1]]
    assert table.hits == [[0, 1], [1, 0, 0]]
    assert table.rates() == [[0.0, 1.0], [1.0, 0.0, 0.0]]


def test_padding_of_a_ragged_batch_is_no_node():
    round_ = DraftedRound.of_row([-1, 0, 1, -2, -2], [1])
    assert round_.parents == (-1, 0, 1)
    assert round_.depths == [0, 1, 2]
