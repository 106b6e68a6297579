"""The best tree that the scores of a block have: nodes in the order of their values, found one by one.

Source: DDTree (liranringel/ddtree): a heap of nodes that could be next; taking the best one puts its next sibling and
its first child there. As no node is worth more than its parent, the nodes taken are the best ones there are, and every
beginning of the list is the best smaller tree. The rule does not mind whether children depend on their parent.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hf_speculate.tree import ROOT_PARENT, TreeRow


class Children(NamedTuple):
    """What may follow a node, the best first.

    Attributes:
        shares: log-probability of each, below its parent.
        token_ids: of the target's vocabulary.
        places: by which the children of each are asked for.
    """

    shares: Sequence[float]
    token_ids: Sequence[int]
    places: Sequence[Any]


def best_tree(root_id: int, children: Callable[[int, Any], Children], max_nodes: int, max_depth: int) -> TreeRow:
    """The `max_nodes` best draft nodes down to `max_depth`, the root first.

    Args:
        children: of a node at a depth (0: the root) and a place (of the root: 0).
    """
    token_ids, parents, values = [root_id], [ROOT_PARENT], [0.0]
    order = itertools.count()  # of equals the one that was reached first
    within_reach: list[tuple[float, int, int, int, int, Children]] = []

    def reach(parent: int, depth: int, rank: int, found: Children) -> None:
        if rank < len(found.shares) and found.shares[rank] > -math.inf:
            value = values[parent] + found.shares[rank]
            heapq.heappush(within_reach, (-value, next(order), parent, depth, rank, found))

    if max_depth > 0:
        reach(0, 0, 0, children(0, 0))
    while within_reach and len(token_ids) <= max_nodes:
        negative, _, parent, depth, rank, found = heapq.heappop(within_reach)
        node = len(token_ids)
        token_ids.append(found.token_ids[rank])
        parents.append(parent)
        values.append(-negative)
        reach(parent, depth, rank + 1, found)
        if depth + 1 < max_depth:
            reach(node, depth + 1, 0, children(depth + 1, found.places[rank]))
    return TreeRow(token_ids, parents, values)
