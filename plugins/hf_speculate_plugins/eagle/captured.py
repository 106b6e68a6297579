"""Forwards of an EAGLE session with static shapes, so that they can be captured or compiled.

A dynamic tree is one graph, together with the entries that are read before it. Every level of a small head is some
hundred tiny kernels, and the host takes longer between them than they do. The depth of a graph is one of few; for a
tree that is to be less deep, it computes the other levels for nothing. The plain reference is `PlainSteps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hf_speculate.attention import CapturedMetadata
from hf_speculate.drafting import DraftState, Warpers, rank_children
from hf_speculate.forward import AcceptedPath
from hf_speculate.graphs import Buffers, Stacks, capacity_for, static_cache
from hf_speculate.transfers import copy_to_device, to_device
from hf_speculate.tree import DraftTree, TreePlan

from ..heads import (
    Attend,
    CachedAttention,
    CapturedForwards,
    FeedingHead,
    PlacedAttention,
    form_of,
    log_noise_of,
    request_inputs,
)
from ..trees import Frontier, grow_tree, num_candidates
from .spec import EagleOptions, TreeSize
from .steps import Pending, PlainSteps, parent_states, tree_of_levels


# Levels of compiled trees; the compiler unrolls them.
_DEPTHS = (2, 4, 8)


def eagle_entries(
    head: FeedingHead[Any],
    stacks: Stacks,
    slots: Tensor,
    states: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    masks: Sequence[Tensor],
) -> Tensor:
    return head(token_ids, states, positions, CachedAttention(static_cache(stacks, slots), masks))


def eagle_level(
    head: FeedingHead[Any],
    stacks: Stacks,
    slots: Tensor,
    states: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    masks: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    return head.read(eagle_entries(head, stacks, slots, states, token_ids, positions, masks))


# Columns of a draft's plan: entries of the head's text, position of the next one, number of entries to read, root id,
# depth of the tree; then the tokens of the entries.
_LENGTH, _POSITION, _COUNT, _ROOT, _LIMIT, _TOKENS = range(6)


def eagle_draft(
    head: FeedingHead[Any],
    stacks: Stacks,
    inputs: dict[str, Any],
    warpers: Warpers,
    depth: int,
    top_k: int,
    max_nodes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reads the entries of a round, and grows a dynamic tree after the last one: tokens, parents and values [B, n].

    Args:
        inputs: `plan` [B, 5 + J]; `prompt` [B, M], False for padding of the prompt; `starts`
            (`CapturedForwards.starts`); `root` [B, Hd], states that rank the root's children, written where a row has
            entries to read. `features`, one [B, J, Ht] for each that the head takes, if any are read; `request_inputs`.
    """
    plan, root = inputs["plan"], inputs["root"]
    lengths, positions = plan[:, _LENGTH], plan[:, _POSITION]
    if inputs["features"]:
        states = _read_entries(head, stacks, inputs)
        counts = plan[:, _COUNT]
        last = states[torch.arange(len(plan), device=plan.device, dtype=torch.long), (counts - 1).clamp(min=0)]
        root.copy_(torch.where(counts[:, None] > 0, last, root))
        lengths, positions = lengths + counts, positions + counts
    levels = _Levels(head, stacks, inputs, warpers, lengths, positions)
    tree = grow_tree(
        plan[:, _ROOT],
        levels.scores(root[:, None], 0)[:, 0],
        levels.expand,
        depth=depth,
        top_k=top_k,
        max_nodes=max_nodes,
        token_ids=inputs.get("target_ids"),
        limit=plan[:1, _LIMIT],
    )
    levels.clear()
    assert isinstance(tree.parents, Tensor)
    assert tree.values is not None
    return tree.token_ids, tree.parents, tree.values


def _read_entries(head: FeedingHead[Any], stacks: Stacks, inputs: dict[str, Any]) -> Float[Tensor, "B J Hd"]:
    """Appends the entries of a round, in each row at the end of its text; returns their states."""
    plan = inputs["plan"]
    lengths, tokens = plan[:, _LENGTH], plan[:, _TOKENS:]
    steps = torch.arange(tokens.shape[1], device=plan.device, dtype=torch.long)
    slots = lengths.max() + steps
    attend = _attention(stacks, slots, slots, inputs, lengths, (steps[:, None] >= steps)[None])
    hidden = head(tokens, head.fuse(inputs["features"]), plan[:, _POSITION, None] + steps, attend)
    if len(plan) > 1:  # one row has them at their place already
        along = AcceptedPath(steps.expand_as(tokens), plan[:, _COUNT])
        along.move(stacks, slots[0], lengths)
    return hidden


def _attention(
    stacks: Stacks, slots: Tensor, seen_slots: Tensor, inputs: dict[str, Any], lengths: Tensor, seen: Tensor
) -> Attend:
    """Attention of new entries to the text, and to those after it that they see.

    Args:
        slots: index of each new entry in the buffers, [N].
        seen_slots: indices of the entries that `seen` is about, one after the other, [S].
        lengths: entries of each row's text, [B].
        seen: bool [B or 1, N, S].
    """
    cache = static_cache(stacks, slots)
    metadata = CapturedMetadata(inputs["prompt"], lengths, seen_slots, seen, inputs.get("starts"))
    if metadata.starts is not None:
        return PlacedAttention(cache, metadata.device_tree())
    return CachedAttention(cache, [metadata.additive(stacks[0].dtype)] * len(stacks[0]))


class _Levels:
    """The levels of the tree of `eagle_draft`, which has the same arguments.

    Args:
        lengths: entries of each row's text, [B].
        positions: position of the next one, [B].
    """

    def __init__(
        self,
        head: FeedingHead[Any],
        stacks: Stacks,
        inputs: dict[str, Any],
        warpers: Warpers,
        lengths: Tensor,
        positions: Tensor,
    ):
        self._head, self._stacks, self._warpers = head, stacks, warpers
        self._inputs, self._lengths, self._positions = inputs, lengths, positions
        self._first = lengths.max()
        self._slots: Tensor | None = None
        self._log_noise = log_noise_of(inputs, head.spec.draft_vocab_size)

    def scores(self, hidden: Tensor, depth: int) -> Tensor:
        """Scores of the children of nodes at `depth` [B, N, C]; keeps the states that these take."""
        logits, self._fed_back = self._head.read(hidden)
        return rank_children(logits, None if self._log_noise is None else self._log_noise[depth], self._warpers)

    def expand(self, frontier: Frontier) -> Tensor:
        first, forest = frontier.num_cached, frontier.forest
        tokens = forest.token_ids[:, first:]
        self._slots = slots = self._first + torch.arange(forest.num_nodes, device=tokens.device, dtype=torch.long)
        seen = forest.plan.ancestors[:, first:]
        attend = _attention(self._stacks, slots[first:], slots, self._inputs, self._lengths, seen)
        positions = (self._positions[:, None] + frontier.depth - 1).expand(tokens.shape)
        states = parent_states(self._fed_back, frontier.previous_index)
        return self.scores(self._head(tokens, states, positions, attend), frontier.depth)

    def clear(self) -> None:
        """Clears the entries of the tree. Later drafts do not see them, but 0 x NaN would be NaN."""
        if self._slots is not None:
            for stack in self._stacks:
                stack.index_fill_(3, self._slots, 0)


class CapturedSteps(CapturedForwards):
    """The same forwards with fixed shapes, compiled; they have the options' depth and width, or the next bucket."""

    _plain: PlainSteps
    _options: EagleOptions

    def entries(self, token_ids: Tensor, states: Tensor) -> Tensor:
        count = token_ids.shape[1]
        positions, masks = self._head_cache.next_place(count)
        plain = partial(self._plain.entries, token_ids, states)
        inputs, width = (states, token_ids, positions), self._options.depth + 1
        return self.append(eagle_entries, width, inputs, masks, plain)[:, :count]

    def level(self, token_ids: Tensor, states: Tensor, plan: TreePlan) -> tuple[Tensor, Tensor]:
        count = token_ids.shape[1]
        positions, masks = self._head_cache.node_place(plan, count)
        plain = partial(self._plain.level, token_ids, states, plan)
        inputs = states, token_ids, positions
        width = self._options.depth - 1 if self._head.spec.parallel else self._options.width(samples=True)
        logits, fed_back = self.append(eagle_level, width, inputs, masks, plain)
        return logits[:, :count], fed_back[:, :count]

    def tree(self, root: Tensor, state: DraftState, size: TreeSize) -> DraftTree:
        """A dynamic tree in one graph; for heads with windows, one graph a level."""
        if self._head_cache.has_windows:
            return tree_of_levels(self._loaded, self.level, root, state, size)
        return self._drawn(None, root, state, size) or self._plain.tree(root, state, size)

    def tree_after(
        self, pending: Pending, state: DraftState, size: TreeSize, root: Tensor | None = None
    ) -> tuple[DraftTree, Tensor] | None:
        """The entries and the tree in one graph."""
        if self._head_cache.has_windows or pending[0].shape[1] > self._num_entries or root is None:
            return None
        tree = self._drawn(pending, root, state, size)
        return None if tree is None else (tree, self._root)

    @property
    def _num_entries(self) -> int:
        """Number of entries that a graph reads: those of a whole accepted path."""
        return self._options.depth + 1

    def _drawn(self, pending: Pending | None, root: Tensor, state: DraftState, size: TreeSize) -> DraftTree | None:
        """A tree from `eagle_draft`; None, and nothing done, where there is no graph."""
        head = self._head
        keys = self._draft_keys(pending, len(root), state, size)
        key: Any = self._runner.choose(head, eagle_draft, keys)

        def arguments() -> tuple[Any, ...]:
            return self._arguments(key, pending, root, state, size.depth)

        result = self.run(key, eagle_draft, arguments, lambda: None)
        if result is None:
            return None
        if pending is not None:
            self._head_cache.tree_cache.has_moved = True
            self._head_cache.keep(pending[2])
        count = 1 + num_candidates(size.depth, min(size.width, head.spec.draft_vocab_size))
        tokens, parents, values = (part[:, :count] for part in result)
        return DraftTree(tokens, parents, max_depth=size.depth, values=values)

    def _draft_keys(self, pending: Pending | None, batch_size: int, state: DraftState, size: TreeSize) -> list[Any]:
        """Keys of the graphs that can grow a tree of this size, the least deep first."""
        deepest, num_read = self._options.depth, 0 if pending is None else self._num_entries
        form = num_read, self._head.dtype, self._starts is None, *form_of(state)

        def key_of(levels: int) -> tuple[Any, ...]:
            num_run = max(levels - 1, 1) * min(size.width, self._head.spec.draft_vocab_size)
            shape = levels, size.width, size.max_nodes
            return batch_size, capacity_for(self.end + num_read + num_run), shape, *form

        return [key_of(min(levels, deepest)) for levels in (*_DEPTHS, deepest) if levels >= size.depth]

    def _arguments(
        self, key: tuple[Any, ...], pending: Pending | None, root: Tensor, state: DraftState, depth: int
    ) -> tuple[Any, ...]:
        """The arguments of `eagle_draft`, its inputs in buffers."""
        (batch_size, capacity, shape, num_read), head, head_cache = key[:4], self._head, self._head_cache
        stacks, buffers = self.place(batch_size, capacity)
        tokens, features, counts = pending or (
            torch.zeros(batch_size, 0, dtype=torch.long, device="cpu"),
            (),
            [0] * batch_size,
        )
        missing = [0] * (num_read - tokens.shape[1])
        of_rows = zip(
            head_cache.tree_cache.lengths, head_cache.next_positions(), counts, state.root_ids.tolist(), strict=True
        )
        rows = [[*of_row, depth, *entries, *missing] for of_row, entries in zip(of_rows, tokens.tolist(), strict=True)]
        plan = buffers.tensor(("plan", num_read), (batch_size, _TOKENS + num_read), torch.long, head.device)
        self._root = buffers.tensor("root", root.shape, root.dtype, head.device)
        if self._root.data_ptr() != root.data_ptr():
            self._root.copy_(root)
        inputs = {
            "plan": copy_to_device(rows, plan),
            **self.starts(buffers),
            "prompt": self.prompt(buffers, batch_size, capacity),
            "root": self._root,
            "features": self._placed(buffers, features, num_read),
            **request_inputs(buffers, state, shape[0], head.device, self._loaded.target_ids),
        }
        return head, stacks, inputs, tuple(state.warpers), *shape

    def _placed(self, buffers: Buffers, features: Sequence[Tensor], num_read: int) -> list[Tensor]:
        """The features in one buffer for `num_read` entries. What follows the real ones is left from earlier rounds."""
        if not features:
            return []
        sources = [to_device(feature, self._head.device) for feature in features]
        sizes = [feature.shape[-1] for feature in features]
        shape = len(sources[0]), num_read, sum(sizes)
        placed = buffers.tensor(("features", num_read), shape, sources[0].dtype, self._head.device)
        torch.cat(sources, dim=-1, out=placed[:, : sources[0].shape[1]])
        return list(placed.split(sizes, dim=-1))
