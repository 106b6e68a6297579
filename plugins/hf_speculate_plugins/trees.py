"""Dynamic draft trees: the nodes that a drafter finds most probable.

`grow_tree` is the algorithm of EAGLE-2 (Li et al., 2024, arXiv:2406.16858). Every level expands the `top_k` candidates
with the highest cumulative log-probability, and each of them proposes `top_k` children. In the end the `max_nodes` best
candidates of all levels are kept.

`best_tree` finds the tree of DDTree (liranringel/ddtree), for drafters that score deeper nodes at almost no cost (a
block of slots, or a bias). DDTree finds its nodes one by one, with a heap on the host. Here they are found level by
level on the device. That is possible because no node has a higher value than its parent: of the best N nodes, those at
one depth are among the best N of that depth, and their parents are among the best N of the depth above. The first n
nodes of the result are the best tree of n nodes.

The value of a node is its parent's plus the `log_softmax` of its score (`DraftState.child_scores`), so that a sampled
request grows its tree along the noise that the target will use. Everything stays on the device of the scores, without
host synchronisation; a tree on a CPU may end early (`DraftState.should_continue`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_speculate.drafting import Warpers, rank_children
from hf_speculate.transfers import to_device
from hf_speculate.tree import ROOT_PARENT, DraftTree, TreePlan, TreeRow

from .top_log_probs import takes, top_log_probs


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The nodes of one level to expand: run them, and return the scores of their children.

    Attributes:
        forest: all nodes expanded so far, this level last: the trees below the root, which itself is committed. Its
            nodes of depth 0 are children of the root.
        num_cached: nodes of `forest` that were run at earlier levels; the others are this level's F nodes.
        previous_index: int64 [B, F], index of each node's parent among the previous level's frontier (zeros at the
            first level, whose parent is the root).
        depth: depth of this level's nodes in the draft tree (>= 1).
    """

    forest: DraftTree
    num_cached: int
    previous_index: Int[Tensor, "B F"]
    depth: int


Expand = Callable[[Frontier], Float[Tensor, "B F W"]]
ShouldContinue = Callable[[Float[Tensor, "B F"], Int[Tensor, "B F"]], bool]


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
    should_continue: ShouldContinue | None = None,
) -> DraftTree:
    """Grows a dynamic tree.

    Args:
        root_ids: node 0 of every row.
        root_scores: scores of the root's children.
        expand: function that runs a frontier; called `depth - 1` times.
        depth: deepest level (>= 1).
        top_k: frontier width, and children per expanded node.
        max_nodes: draft nodes that are kept, the root not counted.
        token_ids: target vocabulary id of each score column (None: the column itself).
        limit: deepest level whose nodes are kept, for a compiled graph that always runs `depth` levels. The tree is
            then the first `num_candidates(limit, width)` draft nodes.
        should_continue: function that decides before each level but the first whether to draft it; None drafts all.
    Returns:
        A tree of at most `max_nodes` + 1 nodes per row, the best first.
    """
    device, batch_size = root_scores.device, root_scores.shape[0]
    width = min(top_k, root_scores.shape[-1])
    values, columns = best_log_probs(root_scores, width)  # [B, K]
    pool_values, pool_tokens = [values], [_to_tokens(columns, token_ids)]
    pool_parents = [torch.full_like(columns, ROOT_PARENT)]  # index into the pool
    frontier_tokens, frontier_values = pool_tokens[0], values
    frontier_in_pool = torch.arange(width, device=device, dtype=torch.long).expand(batch_size, -1)
    previous = torch.zeros_like(columns)
    forest_tokens, forest_parents = frontier_tokens, torch.full_like(columns, ROOT_PARENT)
    plan = TreePlan.of_siblings(batch_size, width, device)
    num_cached, pool_size = 0, width

    for level in range(1, depth):
        if should_continue is not None and not should_continue(frontier_values, previous):
            depth = level
            break
        forest = DraftTree(forest_tokens, forest_parents, max_depth=level - 1, plan=plan)
        scores = expand(Frontier(forest=forest, num_cached=num_cached, previous_index=previous, depth=level))
        child_values, columns = best_log_probs(scores, width)  # [B, F, K]
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


def best_log_probs(scores: Float[Tensor, "... W"], count: int) -> tuple[Float[Tensor, "... K"], Int[Tensor, "... K"]]:
    """`log_softmax` of the best `count` columns, and these columns, best first."""
    if takes(scores, count):
        return top_log_probs(scores, count)
    if scores.is_cuda:  # one kernel instead of eight
        return torch.log_softmax(scores, dim=-1, dtype=torch.float32).topk(count, dim=-1)
    best, columns = scores.float().topk(count, dim=-1)
    return best - scores.float().logsumexp(dim=-1, keepdim=True), columns


def _to_tokens(columns: Tensor, token_ids: Tensor | None) -> Tensor:
    return columns if token_ids is None else token_ids.to(columns.device)[columns]


def num_candidates(depth: int, width: int) -> int:
    """Number of candidates in a tree of `depth` levels, each of this width."""
    return width + (depth - 1) * width * width


def best_nodes(
    root_ids: Tensor, values: Tensor, tokens: Tensor, parents: Tensor, max_nodes: int, depth: int
) -> DraftTree:
    """The `max_nodes` best of a pool of nodes [B, P], the best first. A negative parent is the root.

    A child is never better than its parent. The sort is stable, and parents come first in the pool. So every parent
    comes before its children, and the first n nodes are a tree.
    """
    count = min(max_nodes, values.shape[1])
    kept_values, kept = (part[:, :count] for part in torch.sort(values, dim=1, descending=True, stable=True))
    ranks = torch.zeros_like(parents).scatter_(
        1, kept, torch.arange(1, count + 1, device=kept.device, dtype=torch.long).expand_as(kept)
    )
    kept_parents = parents.gather(1, kept)
    new_parents = torch.where(kept_parents < 0, 0, ranks.gather(1, kept_parents.clamp(min=0)))
    root_parent = torch.full_like(root_ids[:, None], ROOT_PARENT)
    return DraftTree(
        torch.cat([root_ids[:, None], tokens.gather(1, kept)], dim=1),
        torch.cat([root_parent, new_parents], dim=1),
        max_depth=depth,
        values=torch.cat([torch.zeros_like(kept_values[:, :1]), kept_values], dim=1),
    )


ChildLogProbs = Callable[
    [int, Int[Tensor, "B W"], Int[Tensor, "B W"]], tuple[Float[Tensor, "B W K"], Int[Tensor, "B W K"]]
]
"""(depth, tokens of W nodes there, index of each one's parent in the previous call) -> log-probabilities of K children
of each node, -inf for none, and their tokens."""


def best_tree(
    root_ids: Int[Tensor, " B"],
    log_probs_of: ChildLogProbs,
    *,
    depth: int,
    max_nodes: int,
    limit: Int[Tensor, 1] | None = None,
) -> DraftTree:
    """The best `max_nodes` nodes down to `depth` (>= 1), the best first. Impossible nodes, of value -inf, come last.

    Args:
        root_ids: node 0 of every row.
        log_probs_of: function that scores children, called once per depth, from 0 (the root) on.
        limit: deepest level that nodes may have, for a compiled graph that always runs `depth` levels.
    """
    tokens, values = root_ids[:, None], torch.zeros(len(root_ids), 1, device=root_ids.device, dtype=torch.float32)
    in_pool, previous = torch.full_like(tokens, ROOT_PARENT), torch.zeros_like(tokens)
    pool: list[tuple[Tensor, Tensor, Tensor]] = []
    pool_size, best = 0, values[:, :0]
    on_host = limit is None and root_ids.device.type == "cpu"
    for level in range(depth):
        log_probs, child_tokens = log_probs_of(level, tokens, previous)
        if limit is not None:
            log_probs = log_probs.masked_fill(limit <= level, -torch.inf)
        width = log_probs.shape[-1]
        candidates, child_tokens = (values[..., None] + log_probs).flatten(1), child_tokens.flatten(1)
        pool.append((candidates, child_tokens, in_pool.repeat_interleave(width, dim=1)))
        if level == depth - 1:
            break
        values, chosen = candidates.topk(min(max_nodes, candidates.shape[1]), dim=-1)
        tokens, previous, in_pool = child_tokens.gather(1, chosen), chosen // width, pool_size + chosen
        pool_size += candidates.shape[1]
        if on_host:  # reading values needs no wait here: end if no deeper node can be among the best
            best = torch.cat([best, values], dim=1)
            best = best.topk(min(max_nodes, best.shape[1]), dim=-1).values
            if best.shape[1] == max_nodes and bool((values[:, 0] <= best[:, -1]).all()):
                depth = level + 1
                break
    values, tokens, parents = (torch.cat(parts, dim=1) for parts in zip(*pool, strict=True))
    return best_nodes(root_ids, values, tokens, parents, max_nodes, depth)


def trimmed(tree: DraftTree, active: Sequence[bool]) -> DraftTree:
    """`tree`, the best nodes first, without nodes of value -inf and without drafts of rows that have ended."""
    host, rows = tree.host, []
    assert host.values is not None
    for token_ids, parents, values, is_active in zip(host.token_ids, host.parents, host.values, active, strict=True):
        count = sum(value > -math.inf for value in values) if is_active else 1
        rows.append(TreeRow(token_ids[:count], parents[:count], values[:count]))
    return DraftTree.from_rows(rows)


def slot_scores(
    logits: Float[Tensor, "B D Vd"], log_noise: Float[Tensor, "B D C"] | None, warpers: Warpers
) -> Float[Tensor, "B D C"]:
    """`DraftState.child_scores` of all depths at once."""
    noise = None if log_noise is None else log_noise.to(logits.device).flatten(0, 1)
    scores = rank_children(logits.flatten(0, 1)[:, None], noise, warpers)
    return scores[:, 0].unflatten(0, logits.shape[:2])


def slot_log_probs(scores: Float[Tensor, "B D C"], target_ids: Int[Tensor, " Vd"] | None, width: int) -> ChildLogProbs:
    """`ChildLogProbs` of slots whose proposals do not depend on the path."""
    log_probs, columns = best_log_probs(scores, min(width, scores.shape[-1]))
    return partial(_of_slot, log_probs, columns if target_ids is None else target_ids[columns])


def _of_slot(
    log_probs: Tensor, token_ids: Tensor, depth: int, tokens: Tensor, previous: Tensor
) -> tuple[Tensor, Tensor]:
    form = -1, tokens.shape[1], -1
    return log_probs[:, depth, None].expand(*form), token_ids[:, depth, None].expand(*form)
