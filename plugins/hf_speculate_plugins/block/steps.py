"""What a session has its head do: read the context, and score a block."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from hf_speculate.drafting import DraftState
from hf_speculate.tree import DraftTree

from ..heads import CachedAttention, Place, Reading
from ..trees import best_tree
from .checkpoint import LoadedHead
from .head import BlockHead
from .masks import block_masks
from .options import BlockOptions
from .scores import BlockRequest, BlockScores


@runtime_checkable
class Steps(Protocol):
    """Forwards of a head behind one reading. They append entries; what stays is said to the reading."""

    def context(self, joined: Float[Tensor, "B J W"]) -> None:
        """Appends what the features of J committed tokens, from `BlockHead.join`, are to the layers."""
        ...

    def tree(self, state: DraftState, depth: int) -> DraftTree:
        """The best tree of this depth (>= 1); behind its nodes may be some of value -inf."""
        ...


class PlainSteps:
    """`Steps` as they are.

    Args:
        loaded: the head.
        reading: what it has read.
        options: how much is drafted.
    """

    def __init__(self, loaded: LoadedHead, reading: Reading, options: BlockOptions):
        self._loaded, self._reading, self._options = loaded, reading, options

    def context(self, joined: Tensor) -> None:
        positions = self._reading.positions_at(torch.arange(joined.shape[1])[None])
        append_context(self._loaded.head, self._reading.cache.cache, joined, positions)

    @torch.no_grad()
    def tree(self, state: DraftState, depth: int) -> DraftTree:
        head, request = self._loaded.head, BlockRequest.of(self._loaded, self._options, state, depth)
        first = head.spec.first_slot
        slots = self.slots(request.anchors)[:, first : first + depth]
        shares_of = BlockScores(head, request, slots).shares()
        return best_tree(request.anchors, shares_of, depth=depth, max_nodes=self._options.max_nodes)

    @torch.no_grad()
    def slots(self, anchors: Int[Tensor, " B"]) -> Float[Tensor, "B S H"]:
        """States of all slots behind what was read."""
        head = self._loaded.head
        positions, masks = block_place(head, self._reading)
        return head(head.block_ids(anchors), positions, CachedAttention(self._reading.cache.cache, masks))


@torch.no_grad()
def read_prompt(head: BlockHead, reading: Reading, joined: Float[Tensor, "B J W"]) -> None:
    """Commits the prompt's features. Prompts have many lengths: this is never compiled."""
    append_context(head, reading.cache.cache, joined, reading.prompt_positions)
    reading.keep_all()


def block_place(head: BlockHead, reading: Reading) -> Place:
    """Of the slots of a block behind what was read."""
    positions = reading.positions_at(torch.arange(head.spec.block_size)[None])
    return positions, block_masks(head.spec, positions, reading.entry_positions(), reading.visible(), head.dtype)


def append_context(head: BlockHead, cache: Cache, joined: Tensor, positions: Tensor) -> None:
    """What J features side by side are to the layers, into `cache`."""
    head.read(head.fuse_joined(joined), positions, lambda layer, *keys_values: cache.update(*keys_values, layer))
