"""The best tree of all, for drafters whose scores of deeper nodes cost next to nothing: a block of slots, or a bias.

Source: the tree of DDTree (liranringel/ddtree), which a heap finds node by node on the host. Here it is found level by
level on the device: no node is worth more than its parent, so of the best N nodes those at one depth are among the best
N of that depth, and their parents among the best N of the depth before. Every beginning of the result is the best
smaller tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_speculate.drafting import Warpers, rank_children
from hf_speculate.tree import ROOT_PARENT, DraftTree, TreeRow

from .dynamic import best_nodes, log_shares


Shares = Callable[[int, Int[Tensor, "B W"], Int[Tensor, "B W"]], tuple[Float[Tensor, "B W K"], Int[Tensor, "B W K"]]]
"""(depth, tokens of W nodes there, where each one's parent was among the nodes of the call before) -> log-probabilities
of K children of each, -inf for none, and their tokens."""


def best_tree(
    root_ids: Int[Tensor, " B"],
    shares_of: Shares,
    *,
    depth: int,
    max_nodes: int,
    limit: Int[Tensor, 1] | None = None,
) -> DraftTree:
    """The best `max_nodes` nodes down to `depth` (>= 1), the best first, and behind them what has the value -inf.

    Args:
        root_ids: node 0 of every row.
        shares_of: called once a depth, from 0 (the root) on.
        limit: deepest level that nodes may have, where `depth` is that of a compiled graph.
    """
    tokens, values = root_ids[:, None], torch.zeros(len(root_ids), 1, device=root_ids.device)
    in_pool, previous = torch.full_like(tokens, ROOT_PARENT), torch.zeros_like(tokens)
    pool: list[tuple[Tensor, Tensor, Tensor]] = []
    pool_size, best = 0, values[:, :0]
    on_host = limit is None and root_ids.device.type == "cpu"
    for level in range(depth):
        shares, child_tokens = shares_of(level, tokens, previous)
        if limit is not None:
            shares = shares.masked_fill(limit <= level, -torch.inf)
        width = shares.shape[-1]
        candidates, child_tokens = (values[..., None] + shares).flatten(1), child_tokens.flatten(1)
        pool.append((candidates, child_tokens, in_pool.repeat_interleave(width, dim=1)))
        if level == depth - 1:
            break
        values, chosen = candidates.topk(min(max_nodes, candidates.shape[1]), dim=-1)
        tokens, previous, in_pool = child_tokens.gather(1, chosen), chosen // width, pool_size + chosen
        pool_size += candidates.shape[1]
        if on_host:  # where looking costs nothing: nothing below this level is worth as much as what there is
            best = torch.cat([best, values], dim=1)
            best = best.topk(min(max_nodes, best.shape[1]), dim=-1).values
            if best.shape[1] == max_nodes and bool((values[:, 0] <= best[:, -1]).all()):
                depth = level + 1
                break
    values, tokens, parents = (torch.cat(parts, dim=1) for parts in zip(*pool, strict=True))
    return best_nodes(root_ids, values, tokens, parents, max_nodes, depth)


def trimmed(tree: DraftTree, active: Sequence[bool]) -> DraftTree:
    """`tree`, the best nodes first, without nodes of value -inf and what rows that have ended would draft."""
    host, rows = tree.host, []
    assert host.values is not None
    for token_ids, parents, values, is_active in zip(host.token_ids, host.parents, host.values, active, strict=True):
        count = sum(value > -math.inf for value in values) if is_active else 1
        rows.append(TreeRow(token_ids[:count], parents[:count], values[:count]))
    return DraftTree.from_rows(rows)


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


def slot_shares(scores: Float[Tensor, "B D C"], target_ids: Int[Tensor, " Vd"] | None, width: int) -> Shares:
    """`Shares` of slots that propose the same whatever a node's path is.

    Args:
        scores: see `slot_scores`.
        target_ids: target id of each column; None where they are the same.
        width: children of a node at the most.
    """
    shares, columns = log_shares(scores, min(width, scores.shape[-1]))
    return partial(_of_slot, shares, columns if target_ids is None else target_ids[columns])


def _of_slot(shares: Tensor, token_ids: Tensor, depth: int, tokens: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    form = -1, tokens.shape[1], -1
    return shares[:, depth, None].expand(*form), token_ids[:, depth, None].expand(*form)
