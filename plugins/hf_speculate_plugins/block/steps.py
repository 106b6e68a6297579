"""Forwards of a block session, plain and compiled: read the context of a round, draft the tree of a block.

Compiled, both are one graph, as deep as the options allow. A less deep tree is a part of its tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from hf_speculate.attention import text_entries
from hf_speculate.drafting import DraftState, Warpers
from hf_speculate.graphs import Buffers, Stacks, capacity_for, static_cache
from hf_speculate.stats import EAGER, RunnerRecord
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree

from ..draft_graph import (
    DraftPlan,
    TextSlots,
    first_nodes,
    form_of,
    last_states,
    log_noise_of,
    request_inputs,
    result_of,
    rows_of_plan,
)
from ..heads import CapturedForwards, HeadCache, LoadedHead, Place
from ..trees import best_tree
from .head import BlockHead, block_masks
from .scores import BlockRequest, BlockScores, num_children
from .spec import BlockOptions


class PlainSteps:
    """Forwards of the modules as they are; the reference.

    Attributes:
        last: state of each row's last context entry [B, H]. Only heads with a lattice keep it up to date.
    """

    def __init__(
        self,
        loaded: LoadedHead[BlockHead],
        head_cache: HeadCache,
        options: BlockOptions,
        last: Tensor,
        record: RunnerRecord,
    ):
        self._loaded, self._head_cache, self._options, self.last = loaded, head_cache, options, last
        self._record = record

    @torch.no_grad()
    def context(self, features: Sequence[Float[Tensor, "B J Ht"]], lengths: Sequence[int]) -> None:
        """Commits the features of the first `lengths[r]` tokens of each row."""
        positions = self._head_cache.positions_at(
            torch.arange(features[0].shape[1], dtype=torch.long, device="cpu")[None]
        )
        head = self._loaded.head
        states = append_context(head, self._head_cache.tree_cache.cache, head.join(features), positions)
        if head.spec.lattice is not None:
            self.last = last_states(
                states, to_device(torch.tensor(lengths, dtype=torch.long, device="cpu"), head.device), self.last
            )
        self._head_cache.keep(lengths)

    def commit_pending(self) -> None:
        """Commits the features that wait for the next draft; here none wait."""

    @torch.no_grad()
    def tree(self, state: DraftState, depth: int, before: Int[Tensor, " B"] | None = None) -> DraftTree:
        """The best tree of this depth (>= 1). Its last nodes may have the value -inf, so they are impossible. For
        `before` see `BlockRequest`."""
        head, request = self._loaded.head, BlockRequest.of(self._loaded, self._options, state, depth)
        request = request._replace(before=before, last=self.last)
        log_probs_of = BlockScores.of_block(head, request, self.slots(request.anchors), depth).child_log_probs()
        return best_tree(request.anchors, log_probs_of, depth=depth, max_nodes=self._options.max_nodes)

    @torch.no_grad()
    def slots(self, anchors: Int[Tensor, " B"]) -> Float[Tensor, "B S H"]:
        """States of all slots after the entries that were read."""
        head = self._loaded.head
        positions, masks = block_place(head, self._head_cache)
        self._record.ran(EAGER)
        return head(head.block_ids(anchors), positions, head.attention(self._head_cache.tree_cache.cache, masks))


@torch.no_grad()
def read_prompt(head: BlockHead, head_cache: HeadCache, joined: Float[Tensor, "B J W"]) -> Float[Tensor, "B H"]:
    """Commits the prompt's features; the state of the last. Prompts have many lengths: this is never compiled."""
    states = append_context(head, head_cache.tree_cache.cache, joined, head_cache.prompt_positions)
    head_cache.keep_all()
    return states[:, -1].clone()


def block_place(head: BlockHead, head_cache: HeadCache) -> Place:
    """Positions and masks of the slots of a block after the entries that were read."""
    positions = head_cache.positions_at(torch.arange(head.spec.block_size, dtype=torch.long, device="cpu")[None])
    return positions, block_masks(head.spec, positions, head_cache.entry_positions(), head_cache.visible(), head.dtype)


def append_context(head: BlockHead, cache: Cache, joined: Tensor, positions: Tensor) -> Float[Tensor, "B J H"]:
    """Appends keys and values of J features, joined, to `cache`; the states that they were made of."""
    states = head.fuse_joined(joined)
    head.read(states, positions, lambda layer, *keys_values: cache.update(*keys_values, layer))
    return states


def block_draft(
    head: BlockHead, stacks: Stacks, inputs: dict[str, Tensor], warpers: Warpers, depth: int, top_k: int, max_nodes: int
) -> tuple[Tensor, ...]:
    """Reads the features of a round, and drafts the best tree of a block.

    Args:
        inputs: inputs of `TextSlots`, whose plan ends with the token before the root; `features` [B, J, W], from
            `BlockHead.join`; `last`, see `PlainSteps`; `request_inputs`.
    Returns:
        Tokens, parents and values [B, n], and the new `last` of a head with a lattice.
    """
    plan, slots, target_ids = DraftPlan(inputs["plan"]), TextSlots(stacks, inputs), inputs.get("target_ids")
    before = plan.own[:, 0] if head.spec.reads_before_anchor else None
    states = _read_context(head, slots, inputs["features"], plan.counts)
    last = [] if head.spec.lattice is None else [last_states(states, plan.counts, inputs["last"])]
    block = _run_block(head, slots, inputs["prompt"], plan.roots)
    log_noise = log_noise_of(inputs, head.spec.draft_vocab_size)
    log_noise = None if log_noise is None else log_noise.transpose(0, 1)
    request = BlockRequest(target_ids, top_k, plan.roots, log_noise, warpers, before, *last)
    log_probs_of = BlockScores.of_block(head, request, block, depth).child_log_probs()
    tree = best_tree(plan.roots, log_probs_of, depth=depth, max_nodes=max_nodes, limit=plan.limit)
    return *result_of(tree), *last


def _read_context(
    head: BlockHead, slots: TextSlots, features: Float[Tensor, "B J W"], counts: Int[Tensor, " B"]
) -> Float[Tensor, "B J H"]:
    """Appends the features of a round, in each row at the end of its text; their states."""
    positions, new = slots.next_slots(features.shape[1])
    states = append_context(head, static_cache(slots.stacks, new), features, positions)
    slots.keep(counts)
    return states


def _run_block(
    head: BlockHead, slots: TextSlots, prompt: Bool[Tensor, "B M"], anchors: Int[Tensor, " B"]
) -> Float[Tensor, "B S H"]:
    """States of all slots of a block, which is written after the longest text."""
    entries = torch.arange(prompt.shape[1], device=prompt.device, dtype=torch.long)
    positions, places = slots.next_slots(head.spec.block_size)
    seen_positions = entries + (slots.positions - slots.lengths)[:, None]
    seen = text_entries(prompt, slots.lengths)
    masks = block_masks(head.spec, positions, seen_positions, seen, head.dtype, places)
    return head(head.block_ids(anchors), positions, head.attention(static_cache(slots.stacks, places), masks))


class CapturedSteps(CapturedForwards):
    """The same with fixed shapes, compiled. Features wait for the next draft, which reads them.

    For the arguments see `CapturedForwards`.
    """

    _plain: PlainSteps
    _options: BlockOptions

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._depth = min(self._options.depth or self._head.spec.max_depth, self._head.spec.max_depth)
        self._pending: tuple[Sequence[Tensor], Sequence[int]] | None = None

    def context(self, features: Sequence[Tensor], lengths: Sequence[int]) -> None:
        self.commit_pending()
        self._pending = features, lengths
        if features[0].shape[1] > self._num_read:
            self.commit_pending()

    def commit_pending(self) -> None:
        """Commits the features that wait for the next draft."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._plain.context(*pending)

    def tree(self, state: DraftState, depth: int, before: Tensor | None = None) -> DraftTree:
        head, max_nodes = self._head, self._options.max_nodes
        top_k = num_children(head.spec, self._options, state)
        batch_size, capacity = len(state.root_ids), capacity_for(self.end + self._num_read + head.spec.block_size)
        sizes = self._depth, top_k, max_nodes
        key = batch_size, capacity, sizes, head.dtype, *form_of(state)

        def arguments() -> tuple[Any, ...]:
            stacks, buffers = self.place(batch_size, capacity)
            return head, stacks, self._inputs(buffers, state, depth, capacity, before), tuple(state.warpers), *sizes

        result = self.run(key, block_draft, arguments, lambda: None)
        if result is None:
            self.commit_pending()
            return self._plain.tree(state, depth, before)
        if self._pending is not None:
            self._head_cache.tree_cache.has_moved = True
            self._head_cache.keep(self._pending[1])
            self._pending = None
        if last := result[3:]:  # the next call overwrites it
            self._plain.last = last[0].clone()
        return first_nodes(result[:3], _num_scored(depth, top_k, max_nodes), depth)

    @property
    def _num_read(self) -> int:
        """Number of features that a graph reads: those of a whole accepted path."""
        return self._depth + 1

    def _inputs(
        self, buffers: Buffers, state: DraftState, depth: int, capacity: int, before: Tensor | None
    ) -> dict[str, Tensor]:
        """The inputs of `block_draft`, in buffers."""
        head, head_cache, batch_size = self._head, self._head_cache, len(state.root_ids)
        features, counts = self._pending or ((), [0] * batch_size)
        earlier = (state.root_ids if before is None else before)[:, None].tolist()
        lengths, positions = head_cache.tree_cache.lengths, head_cache.next_positions()
        rows = rows_of_plan(lengths, positions, counts, state.root_ids, depth, earlier)
        return {
            "plan": DraftPlan.place(buffers, rows, head.device),
            "prompt": self.prompt(buffers, batch_size, capacity),
            "features": self._placed(buffers, features, batch_size),
            **({} if head.spec.lattice is None else {"last": buffers.filled("last", self._plain.last)}),
            **request_inputs(buffers, state, self._depth, head.device, self._loaded.target_ids),
        }

    def _placed(self, buffers: Buffers, features: Sequence[Tensor], batch_size: int) -> Tensor:
        """The features in their buffer. What follows them is left from earlier rounds."""
        head = self._head
        shape = batch_size, self._num_read, head.spec.num_features * head.spec.target_hidden_size
        placed = buffers.tensor("features", shape, head.dtype, head.device)
        if features:
            placed[:, : features[0].shape[1]].copy_(head.join(features))
        return placed


def _num_scored(depth: int, top_k: int, max_nodes: int) -> int:
    """Number of nodes down to `depth` that `best_tree` chooses from."""
    total, num_parents = 0, 1
    for _ in range(depth):
        total += num_parents * top_k
        num_parents = min(max_nodes, num_parents * top_k)
    return total
