"""Forwards of an EAGLE session over one cache: read entries, run a level, grow a tree.

Forwards append entries; the session selects which of them stay. `eagle_tree` grows the trees of eager and of captured
drafts. The kernel's drafts (`native`) are compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from hf_speculate.drafting import DraftState
from hf_speculate.tree import DraftTree, TreePlan

from ..heads import CachedAttention, FeedingHead, HeadCache, LoadedHead
from ..trees import Frontier, ShouldContinue, grow_tree
from .spec import TreeSize


Pending = tuple[Tensor, Sequence[Tensor], list[int]]
"""Committed entries that are yet to be read: tokens [B, J], the target's features [B, J, Ht], lengths."""

Native = Callable[[Tensor, Tensor, Tensor, Cache, Sequence[Tensor | None]], Tensor | None]
"""`NativeForward`: runs entries (token ids, states, positions, cache, masks); None if the modules must run them."""

RunLevel = Callable[[Tensor, Tensor, TreePlan], tuple[Tensor, Tensor]]
"""`PlainSteps.level`."""

Rank = Callable[[Tensor, int], Tensor]
"""(logits [B, F, Vd], depth of the nodes) -> scores of their children (`DraftState.child_scores`)."""

# Entries of a prompt that are run at once: a mask of the whole prompt would be quadratic in its length.
_CHUNK = 1024


class PlainSteps:
    """Forwards of the modules as they are; the reference."""

    def __init__(self, loaded: LoadedHead[Any], head_cache: HeadCache, native: Native | None = None):
        self._loaded, self._head_cache, self._native = loaded, head_cache, native

    @torch.no_grad()
    def entries(self, token_ids: Int[Tensor, "B J"], states: Float[Tensor, "B J Hd"]) -> Float[Tensor, "B J Hd"]:
        """Runs the entries of a round, with the states of its features; returns states before the final norm."""
        positions, masks = self._head_cache.next_place(token_ids.shape[1])
        return self._run(token_ids, states, positions, masks)

    @torch.no_grad()
    def level(
        self, token_ids: Int[Tensor, "B F"], states: Float[Tensor, "B F Hd"], plan: TreePlan
    ) -> tuple[Float[Tensor, "B F Vd"], Float[Tensor, "B F Hd"]]:
        """Runs the last F nodes of a forest whose earlier nodes were run since the last `HeadCache.drop`.

        Returns:
            `EagleHead.read` of these nodes.
        """
        positions, masks = self._head_cache.node_place(plan, token_ids.shape[1])
        return self._loaded.head.read(self._run(token_ids, states, positions, masks))

    def tree(self, root: Float[Tensor, "B Hd"], state: DraftState, size: TreeSize) -> DraftTree:
        """A dynamic tree after the entry committed last, whose states are `root`."""
        return drafted_tree(self._loaded, self.level, root, state, size)

    def tree_after(
        self, pending: Pending, state: DraftState, size: TreeSize, root: Tensor | None = None
    ) -> tuple[DraftTree, Tensor] | None:
        """Commits pending entries and drafts a dynamic tree after them, in one call.

        Args:
            root: states of the entry committed last, for rows without pending entries.
        Returns:
            The tree, and the states of the last entry of every row. None, and nothing was changed, if these forwards
            cannot do both in one call.
        """
        return None

    def _run(self, token_ids: Tensor, states: Tensor, positions: Tensor, masks: list[Tensor | None]) -> Tensor:
        cache = self._head_cache.tree_cache.cache
        if self._native is not None:
            hidden = self._native(token_ids, states, positions, cache, masks)
            if hidden is not None:
                return hidden
        return self._loaded.head(token_ids, states, positions, CachedAttention(cache, masks))


@torch.no_grad()
def read_prompt(
    head: FeedingHead[Any],
    head_cache: HeadCache,
    token_ids: Int[Tensor, "B J"],
    states: Float[Tensor, "B J Hd"],
    native: Native | None = None,
    embeddings: Float[Tensor, "B J Hd"] | None = None,
) -> Float[Tensor, "B Hd"]:
    """Commits the prompt's entries, padding included; returns the states of the last one. Never compiled: prompts have
    many lengths.

    Args:
        embeddings: embeddings of the tokens, if the head takes them from the target (`FeedingHead.prompt_embeddings`).
    """
    hidden = states
    for start in range(0, token_ids.shape[1], _CHUNK):
        part = slice(start, min(start + _CHUNK, token_ids.shape[1]))
        positions, masks = head_cache.prompt_place(part)
        entries = token_ids[:, part], states[:, part], positions
        outputs = None
        if native is not None and masks is None:
            outputs = native(*entries, head_cache.tree_cache.cache, [None] * len(head.layers))
        if outputs is None:
            is_causal = masks is None and part.stop - start > 1
            attend = CachedAttention(head_cache.tree_cache.cache, masks, is_causal=is_causal)
            outputs = head(*entries, attend, *([] if embeddings is None else [embeddings[:, part]]))
        hidden = outputs
        head_cache.keep_all()
    return hidden[:, -1]


def drafted_tree(
    loaded: LoadedHead[Any], level: RunLevel, root: Tensor, state: DraftState, size: TreeSize
) -> DraftTree:
    """`eagle_tree` for a round; for the other arguments see `PlainSteps.tree`."""

    def rank(logits: Tensor, depth: int) -> Tensor:
        return state.child_scores(logits, depth, loaded.target_ids)

    return eagle_tree(
        loaded.head, level, rank, root, state.root_ids, size, loaded.target_ids, should_continue=state.should_continue
    )


def eagle_tree(
    head: FeedingHead[Any],
    level: RunLevel,
    rank: Rank,
    root: Float[Tensor, "B Hd"],
    root_ids: Int[Tensor, " B"],
    size: TreeSize,
    target_ids: Int[Tensor, " Vd"] | None,
    limit: Int[Tensor, 1] | None = None,
    should_continue: ShouldContinue | None = None,
) -> DraftTree:
    """Grows a dynamic tree level by level, eagerly or in a captured draft.

    Args:
        level: function that runs a level of the forest.
        rank: function that scores children.
        root: states of the entry committed last, which rank the root's children.
        root_ids: token of each row's root.
        target_ids: target id of each draft id; None where they are the same.
        limit, should_continue: see `grow_tree`.
    """
    levels = _Levels(head, level, rank, root)
    return grow_tree(
        root_ids,
        levels.root_scores,
        levels.expand,
        depth=size.depth,
        top_k=size.width,
        max_nodes=size.max_nodes,
        token_ids=target_ids,
        limit=limit,
        should_continue=should_continue,
    )


class _Levels:
    """The levels of `eagle_tree`, which has the same arguments; it keeps the states that the next level takes."""

    def __init__(self, head: FeedingHead[Any], level: RunLevel, rank: Rank, root: Tensor):
        self._level, self._rank = level, rank
        logits, self._fed_back = head.read(root[:, None])
        self.root_scores = rank(logits, 0)[:, 0]

    def expand(self, frontier: Frontier) -> Tensor:
        forest = frontier.forest
        states = parent_states(self._fed_back, frontier.previous_index)
        logits, self._fed_back = self._level(forest.token_ids[:, frontier.num_cached :], states, forest.plan)
        return self._rank(logits, frontier.depth)


def parent_states(states: Float[Tensor, "B P Hd"], index: Int[Tensor, "B F"]) -> Float[Tensor, "B F Hd"]:
    """`states[b, index[b, f]]`."""
    return states.gather(1, index.to(states.device)[..., None].expand(-1, -1, states.shape[-1]))
