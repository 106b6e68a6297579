"""Forwards of an EAGLE session with static shapes, so that they can be captured or compiled.

A dynamic tree is one graph, together with the entries that are read before it. It runs the functions of `steps` over
static buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_speculate.drafting import DraftState, Warpers
from hf_speculate.graphs import Buffers, Stacks, capacity_for, static_cache
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree, TreePlan

from ..draft_graph import (
    CapturedRanking,
    DraftPlan,
    DraftResult,
    SlotPlace,
    TextSlots,
    first_nodes,
    form_of,
    graph_depths,
    last_states,
    request_inputs,
    result_of,
    rows_of_plan,
)
from ..heads import Attend, CachedAttention, CapturedForwards, FeedingHead, PlacedAttention
from ..trees import num_candidates
from .spec import EagleOptions, TreeSize
from .steps import Pending, PlainSteps, drafted_tree, eagle_tree


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


class SlotForwards:
    """The forwards of a captured draft, over the slots of static buffers; for the arguments see `eagle_draft`."""

    def __init__(self, head: FeedingHead[Any], stacks: Stacks, inputs: dict[str, Any]):
        self._head, self.slots = head, TextSlots(stacks, inputs)

    def entries(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """Appends the entries of a round to the text, see `PlainSteps.entries`."""
        return self._run(token_ids, states, self.slots.next_place(token_ids.shape[1]))

    def level(self, token_ids: Tensor, states: Tensor, plan: TreePlan) -> tuple[Tensor, Tensor]:
        """Appends a level of the tree, see `PlainSteps.level`."""
        return self._head.read(self._run(token_ids, states, self.slots.node_place(plan, token_ids.shape[1])))

    def _run(self, token_ids: Tensor, states: Tensor, place: SlotPlace) -> Tensor:
        metadata, keys = place.metadata, self.slots.stacks[0]
        if metadata.starts is not None:
            attend: Attend = PlacedAttention(place.cache, metadata.device_tree())
        else:
            attend = CachedAttention(place.cache, [metadata.additive(keys.dtype)] * len(keys))
        return self._head(token_ids, states, place.positions, attend)


def eagle_draft(
    head: FeedingHead[Any], stacks: Stacks, inputs: dict[str, Any], warpers: Warpers, size: TreeSize
) -> DraftResult:
    """Reads the entries of a round, and grows a dynamic tree after the last one.

    Args:
        inputs: inputs of `TextSlots`, whose plan ends with the entries' tokens; `root` [B, Hd], states that rank the
            root's children, written where a row has entries to read. `features`, one [B, J, Ht] for each that the head
            takes, if any are read; `request_inputs`.
    """
    plan, root, forwards = DraftPlan(inputs["plan"]), inputs["root"], SlotForwards(head, stacks, inputs)
    if inputs["features"]:
        tokens, counts = plan.own, plan.counts
        hidden = forwards.entries(tokens, head.fuse(inputs["features"]))
        forwards.slots.keep(counts)
        root.copy_(last_states(hidden, counts, root))
    rank, target_ids = CapturedRanking(inputs, head.spec.draft_vocab_size, warpers), inputs.get("target_ids")
    tree = eagle_tree(head, forwards.level, rank, root, plan.roots, size, target_ids, limit=plan.limit)
    forwards.slots.drop()
    return result_of(tree)


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
            return drafted_tree(self._loaded, self.level, root, state, size)
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
        num_drafted = num_candidates(size.depth, min(size.width, head.spec.draft_vocab_size))
        return first_nodes(result, num_drafted, size.depth)

    def _draft_keys(self, pending: Pending | None, batch_size: int, state: DraftState, size: TreeSize) -> list[Any]:
        """Keys of the graphs that can grow a tree of this size, the least deep first."""
        num_read = 0 if pending is None else self._num_entries
        form = num_read, self._head.dtype, self._starts is None, *form_of(state)

        def key_of(levels: int) -> tuple[Any, ...]:
            num_run = max(levels - 1, 1) * min(size.width, self._head.spec.draft_vocab_size)
            shape = levels, size.width, size.max_nodes
            return batch_size, capacity_for(self.end + num_read + num_run), shape, *form

        return [key_of(levels) for levels in graph_depths(size.depth, self._options.depth)]

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
        lengths, positions = head_cache.tree_cache.lengths, head_cache.next_positions()
        entries = [[*row, *missing] for row in tokens.tolist()]
        rows = rows_of_plan(lengths, positions, counts, state.root_ids, depth, entries)
        self._root = buffers.tensor("root", root.shape, root.dtype, head.device)
        if self._root.data_ptr() != root.data_ptr():
            self._root.copy_(root)
        inputs = {
            "plan": DraftPlan.place(buffers, rows, head.device),
            **self.starts(buffers),
            "prompt": self.prompt(buffers, batch_size, capacity),
            "root": self._root,
            "features": self._placed(buffers, features, num_read),
            **request_inputs(buffers, state, shape[0], head.device, self._loaded.target_ids),
        }
        return head, stacks, inputs, tuple(state.warpers), TreeSize(*shape)

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
