"""Dynamic draft trees: grown level by level where the drafter is sure, then cut to the best nodes.

Source: EAGLE-2 (Li et al., 2024, arXiv:2406.16858). Every level expands the `top_k` candidates of highest cumulative
log-value; each of them proposes `top_k` children; in the end the `max_nodes` best candidates of all levels are kept.
The value of a node is its parent's and `log_softmax` of its score (`DraftState.child_scores`), so that a sampled
request grows its tree along the noise that the target will use. Everything stays on the device of the scores: no host
synchronisation; a tree on a CPU may be asked to end early (`DraftState.goes_on`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_speculate.transfers import to_device
from hf_speculate.tree import ROOT_PARENT, DraftTree, TreePlan


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The nodes of one level that are to be expanded: run them, and return the scores of their children.

    Attributes:
        forest: all nodes expanded so far, this level last: the trees below the root, which itself is committed. Its
            nodes of depth 0 are children of the root.
        num_cached: nodes of `forest` that were run at earlier levels; the others are this level's F nodes.
        previous_index: int64 [B, F], index of each node's parent among the previous level's frontier (zeros at the
            first level, where all hang on the root).
        depth: depth of this level's nodes in the draft tree (>= 1).
    """

    forest: DraftTree
    num_cached: int
    previous_index: Int[Tensor, "B F"]
    depth: int


Expand = Callable[[Frontier], Float[Tensor, "B F W"]]
GoesOn = Callable[[Float[Tensor, "B F"], Int[Tensor, "B F"]], bool]


def grow_tree(
    root_ids: Int[Tensor, " B"],
    root_scores: Float[Tensor, "B W"],
    expand: Expand,
    *,
    depth: int,
    top_k: int,
    max_nodes: int,
    token_ids: Int[Tensor, " W"] | None = None,
    limit: Int[Tensor, 1] | None = None,
    goes_on: GoesOn | None = None,
) -> DraftTree:
    """Grows a dynamic tree.

    Args:
        root_ids: node 0 of every row.
        root_scores: scores of the root's children.
        expand: runs a frontier; called `depth - 1` times.
        depth: deepest level (>= 1).
        top_k: frontier width, and children per expanded node.
        max_nodes: draft nodes that are kept, the root not counted.
        token_ids: target vocabulary id of each score column (None: the column itself).
        limit: deepest level of which nodes are kept, where `depth` is that of a compiled graph: the first
            `num_candidates(limit, width)` draft nodes are then the tree.
        goes_on: says before each level but the first whether it pays.
    Returns:
        A tree of at most `max_nodes` + 1 nodes a row, the best first.
    """
    device, batch_size = root_scores.device, root_scores.shape[0]
    width = min(top_k, root_scores.shape[-1])
    values, columns = log_shares(root_scores, width)  # [B, K]
    pool_values, pool_tokens = [values], [_to_tokens(columns, token_ids)]
    pool_parents = [torch.full_like(columns, ROOT_PARENT)]  # index into the pool
    frontier_tokens, frontier_values = pool_tokens[0], values
    frontier_in_pool = torch.arange(width, device=device).expand(batch_size, -1)
    previous = torch.zeros_like(columns)
    forest_tokens, forest_parents = frontier_tokens, torch.full_like(columns, ROOT_PARENT)
    plan = TreePlan.of_siblings(batch_size, width, device)
    num_cached, pool_size = 0, width

    for level in range(1, depth):
        if goes_on is not None and not goes_on(frontier_values, previous):
            depth = level
            break
        forest = DraftTree(forest_tokens, forest_parents, max_depth=level - 1, plan=plan)
        scores = expand(Frontier(forest=forest, num_cached=num_cached, previous_index=previous, depth=level))
        child_values, columns = log_shares(scores, width)  # [B, F, K]
        candidates = (frontier_values[..., None] + child_values).flatten(1)  # [B, F * K]
        if limit is not None:
            candidates = candidates.masked_fill(limit < level + 1, -torch.inf)
        tokens = _to_tokens(columns, token_ids).flatten(1)
        pool_values.append(candidates)
        pool_tokens.append(tokens)
        pool_parents.append(frontier_in_pool.repeat_interleave(width, dim=1))
        if level == depth - 1:
            break
        frontier_values, chosen = candidates.topk(width, dim=-1)
        frontier_tokens = tokens.gather(1, chosen)
        frontier_in_pool = pool_size + chosen
        previous = chosen // width
        num_cached = forest.num_nodes
        parents = num_cached - width + previous
        plan = plan.extended(parents)
        forest_parents = torch.cat([forest_parents, parents], dim=1)
        forest_tokens = torch.cat([forest_tokens, frontier_tokens], dim=1)
        pool_size += candidates.shape[1]

    return best_nodes(
        to_device(root_ids, device),
        torch.cat(pool_values, dim=1),
        torch.cat(pool_tokens, dim=1),
        torch.cat(pool_parents, dim=1),
        max_nodes,
        depth,
    )


def log_shares(scores: Float[Tensor, "... W"], count: int) -> tuple[Float[Tensor, "... K"], Int[Tensor, "... K"]]:
    """`log_softmax` of the best `count` columns, and these columns, best first."""
    best, columns = scores.float().topk(count, dim=-1)
    return best - scores.float().logsumexp(dim=-1, keepdim=True), columns


def _to_tokens(columns: Tensor, token_ids: Tensor | None) -> Tensor:
    return columns if token_ids is None else token_ids.to(columns.device)[columns]


def num_candidates(depth: int, width: int) -> int:
    """Nodes that a tree of so many levels chooses from."""
    return width + (depth - 1) * width * width


def best_nodes(
    root_ids: Tensor, values: Tensor, tokens: Tensor, parents: Tensor, max_nodes: int, depth: int
) -> DraftTree:
    """The `max_nodes` best of a pool of nodes, the best first.

    Args:
        values, tokens, parents: [B, P] of the pool; parents are indices into it, negative for the root's children.

    A child is never better than its parent, and the sort is stable, so that with equal values the parent, which comes
    first in the pool, is first: every beginning is a tree.
    """
    count = min(max_nodes, values.shape[1])
    kept_values, kept = (each[:, :count] for each in torch.sort(values, dim=1, descending=True, stable=True))
    ranks = torch.zeros_like(parents).scatter_(1, kept, torch.arange(1, count + 1, device=kept.device).expand_as(kept))
    kept_parents = parents.gather(1, kept)
    new_parents = torch.where(kept_parents < 0, 0, ranks.gather(1, kept_parents.clamp(min=0)))
    root_parent = torch.full_like(root_ids[:, None], ROOT_PARENT)
    return DraftTree(
        torch.cat([root_ids[:, None], tokens.gather(1, kept)], dim=1),
        torch.cat([root_parent, new_parents], dim=1),
        max_depth=depth,
        values=torch.cat([torch.zeros_like(kept_values[:, :1]), kept_values], dim=1),
    )
