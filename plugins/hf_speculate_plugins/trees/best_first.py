"""The best tree that tables of scores have: nodes in the order of their values, found one by one.

For drafters that score all depths at once (a slot each), whether or not children depend on their parent.

Source: DDTree (liranringel/ddtree): a heap of nodes that could be next; taking the best one puts its next sibling and
its first child there. As no node is worth more than its parent, the nodes taken are the best ones there are, and every
beginning of the list is the best smaller tree.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_speculate.drafting import DraftState, Warpers, rank_children
from hf_speculate.tree import ROOT_PARENT, DraftTree, TreeRow

from .dynamic import log_shares


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


ChildrenOf = Callable[[int, int, Any], Children]
"""(row, depth, place) -> the children of a node at this depth (0: the root) and place (of the root: 0)."""


def best_trees(state: DraftState, children: ChildrenOf, max_nodes: int, max_depth: int) -> DraftTree:
    """`best_tree` of every row of a request; rows that have ended draft nothing."""
    rows = []
    for row, root in enumerate(state.root_ids.tolist()):
        if state.active[row]:
            rows.append(best_tree(root, partial(children, row), max_nodes, max_depth))
        else:
            rows.append(TreeRow([root], [ROOT_PARENT], [0.0]))
    return DraftTree.from_rows(rows)


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


class SlotTable:
    """`ChildrenOf` that depend on no more than their parent's place, on the host.

    Args:
        shares: float [B, D, P, K], log-probabilities of the children of P places at each depth, the best first.
        token_ids: of the target's vocabulary, likewise.
        places: by which the children of each are asked for, likewise.
    """

    def __init__(
        self,
        shares: Float[Tensor, "B D P K"],
        token_ids: Int[Tensor, "B D P K"],
        places: Int[Tensor, "B D P K"],
    ):
        self._tables = [table.cpu().numpy() for table in (shares.float(), token_ids, places)]

    def __call__(self, row: int, depth: int, place: int) -> Children:
        return Children(*(table[row, depth, place].tolist() for table in self._tables))


def slot_children(
    scores: Float[Tensor, "B D C"], target_ids: Int[Tensor, " Vd"] | None, width: int
) -> tuple[Float[Tensor, "B D 1 K"], Int[Tensor, "B D 1 K"], Int[Tensor, "B D 1 K"]]:
    """The arguments of a `SlotTable` of children that slots propose whatever their parent is.

    Args:
        scores: see `slot_scores`.
        width: children of a node at the most.
    """
    shares, columns = log_shares(scores[:, :, None], min(width, scores.shape[-1]))
    return shares, columns if target_ids is None else target_ids[columns], torch.zeros_like(columns)


def slot_scores(
    logits: Float[Tensor, "B D Vd"], log_noise: Float[Tensor, "B D C"] | None, warpers: Warpers
) -> Float[Tensor, "B D C"]:
    """`DraftState.child_scores` of all depths at once.

    Args:
        logits: of the slots of a draft, the one that proposes the root's children first.
        log_noise: of their steps, see `DraftState.log_noise`.
        warpers: of the request.
    """
    noise = None if log_noise is None else log_noise.to(logits.device).flatten(0, 1)
    scores = rank_children(logits.flatten(0, 1)[:, None], noise, warpers)
    return scores[:, 0].unflatten(0, logits.shape[:2])
