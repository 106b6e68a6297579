"""Forwards of a block session behind one reading, plain and compiled: read the context, score a block.

Forwards append entries; the session tells the reading which of them stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from hf_speculate.compilation import Stacks, capacity_for, padded_mask, static_cache
from hf_speculate.drafting import DraftState, Warpers
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree

from ..heads import CachedAttention, CompiledForwards, LoadedHead, Place, Reading, form_of
from ..trees import best_tree
from .head import BlockHead, block_masks
from .scores import BlockRequest, BlockScores, num_children
from .spec import BlockOptions


class PlainSteps:
    """Forwards of the modules as they are; the reference.

    Args:
        loaded: the head.
        reading: entries that it has read.
        options: options of drafting.
    """

    def __init__(self, loaded: LoadedHead[BlockHead], reading: Reading, options: BlockOptions):
        self._loaded, self._reading, self._options = loaded, reading, options

    def context(self, joined: Float[Tensor, "B J W"]) -> None:
        """Appends the features of J committed tokens, from `BlockHead.join`."""
        positions = self._reading.positions_at(torch.arange(joined.shape[1])[None])
        append_context(self._loaded.head, self._reading.cache.cache, joined, positions)

    @torch.no_grad()
    def tree(self, state: DraftState, depth: int) -> DraftTree:
        """The best tree of this depth (>= 1); behind its nodes may be some of value -inf."""
        head, request = self._loaded.head, BlockRequest.of(self._loaded, self._options, state, depth)
        first = head.spec.first_slot
        slots = self.slots(request.anchors)[:, first : first + depth]
        shares_of = BlockScores(head, request, slots).shares()
        return best_tree(request.anchors, shares_of, depth=depth, max_nodes=self._options.max_nodes)

    @torch.no_grad()
    def slots(self, anchors: Int[Tensor, " B"]) -> Float[Tensor, "B S H"]:
        """States of all slots behind the entries that were read."""
        head = self._loaded.head
        positions, masks = block_place(head, self._reading)
        return head(head.block_ids(anchors), positions, CachedAttention(self._reading.cache.cache, masks))


@torch.no_grad()
def read_prompt(head: BlockHead, reading: Reading, joined: Float[Tensor, "B J W"]) -> None:
    """Commits the prompt's features. Prompts have many lengths: this is never compiled."""
    append_context(head, reading.cache.cache, joined, reading.prompt_positions)
    reading.keep_all()


def block_place(head: BlockHead, reading: Reading) -> Place:
    """Positions and masks of the slots of a block behind the entries that were read."""
    positions = reading.positions_at(torch.arange(head.spec.block_size)[None])
    return positions, block_masks(head.spec, positions, reading.entry_positions(), reading.visible(), head.dtype)


def append_context(head: BlockHead, cache: Cache, joined: Tensor, positions: Tensor) -> None:
    """Appends keys and values of J features, joined, to `cache`."""
    head.read(head.fuse_joined(joined), positions, lambda layer, *keys_values: cache.update(*keys_values, layer))


def block_context(
    head: BlockHead, stacks: Stacks, slots: Tensor, joined: Tensor, positions: Tensor, masks: Any
) -> None:
    append_context(head, static_cache(stacks, slots), joined, positions)


def block_tree(
    head: BlockHead,
    stacks: Stacks,
    inputs: dict[str, Tensor],
    masks: Sequence[Tensor],
    warpers: Warpers,
    options: BlockOptions,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and values of the best tree of a block [B, n].

    Args:
        stacks: keys and values of all layers.
        inputs: `anchors` [B]; `positions` of the slots [B, S], and their places in the cache, `slots` [S]; `limit`,
            depth of the tree; `log_noise` [B, D, C] and `target_ids` [Vd], where there are any.
        masks: additive masks [B, 1, S, M], one a layer.
    """
    cache = static_cache(stacks, inputs["slots"])
    token_ids = head.block_ids(inputs["anchors"])
    states = head(token_ids, inputs["positions"], CachedAttention(cache, masks))[:, head.spec.first_slot :]
    request = BlockRequest(inputs.get("target_ids"), width, inputs["anchors"], inputs.get("log_noise"), warpers)
    depth, shares_of = states.shape[1], BlockScores(head, request, states).shares()
    tree = best_tree(request.anchors, shares_of, depth=depth, max_nodes=options.max_nodes, limit=inputs["limit"])
    assert isinstance(tree.parents, Tensor)
    assert tree.values is not None
    return tree.token_ids, tree.parents, tree.values


class CompiledSteps(CompiledForwards):
    """The same forwards with fixed shapes, compiled. A tree that is to be less deep than the block is cut."""

    _plain: PlainSteps
    _options: BlockOptions

    def context(self, joined: Tensor) -> None:
        positions = self._reading.positions_at(torch.arange(joined.shape[1])[None]).expand(joined.shape[:2])
        inputs, width = (joined, positions), self._head.spec.max_depth + 1
        self.append(block_context, width, inputs, (), partial(self._plain.context, joined))

    def tree(self, state: DraftState, depth: int) -> DraftTree:
        head, size = self._head, self._head.spec.block_size
        plain = partial(self._plain.tree, state, depth)
        width = num_children(self._options, state)
        batch_size, capacity = len(state.root_ids), capacity_for(self.end + size)
        key = batch_size, capacity, width, head.dtype, self._options, *form_of(state)

        def arguments() -> tuple[Any, ...]:
            return self._arguments(state, depth, batch_size, capacity)

        result = self.run(key, block_tree, arguments, plain)
        if isinstance(result, DraftTree):
            return result
        tokens, parents, values = result
        return DraftTree(tokens, parents, max_depth=head.spec.max_depth, values=values)

    def _arguments(self, state: DraftState, depth: int, batch_size: int, capacity: int) -> tuple[Any, ...]:
        """The arguments of `block_tree`, its inputs in buffers."""
        head, reading, end = self._head, self._reading, self.end
        spec, device = head.spec, head.device
        request = BlockRequest.of(self._loaded, self._options, state, spec.max_depth)
        positions, masks = block_place(head, reading)
        inputs = {
            "anchors": request.anchors,
            "positions": positions,
            "slots": torch.arange(end, end + spec.block_size, device=device),
            "limit": to_device([depth], device),
        }
        if request.log_noise is not None:
            inputs["log_noise"] = request.log_noise
        stacks, buffers = self.place(batch_size, capacity)
        inputs = {name: buffers.filled(f"block {name}", each) for name, each in inputs.items()}
        if request.target_ids is not None:
            inputs["target_ids"] = request.target_ids
        like = torch.zeros(batch_size, spec.block_size, dtype=head.dtype, device=device)
        seen = end + spec.block_size
        placed = [
            buffers.filled(f"block mask {layer}", padded_mask(mask, like, seen, spec.block_size, capacity))
            for layer, mask in enumerate(masks)
        ]
        return head, stacks, inputs, placed, tuple(request.warpers), self._options, request.width
