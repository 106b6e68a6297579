"""The rows of one forward: whether native layers take them, where their entries go and what they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.cache_utils import Cache

from hf_speculate.cache import PreallocatedLayer, SlidingLayer

from .caches import appendable_layers, make_room
from .growth import MOST_WIDTH
from .layers import MOST_ROWS, Entries, NativeLayers, Sight, batch_parts, find_sight, part_of


@dataclass(frozen=True)
class NativeRows:
    """Rows that native layers can compute.

    Attributes:
        layers: native layers to run.
        cache_layers: cache layers for their entries.
        buffers: entries of these cache layers, with room.
        sight: entries that each row sees.
    """

    layers: NativeLayers
    cache_layers: Sequence[PreallocatedLayer]
    buffers: Sequence[Entries]
    num_keys: int
    sight: Sight

    def run(
        self,
        inputs: Float[Tensor, "B N H"],
        rotary: tuple[Float[Tensor, "R N D"], Float[Tensor, "R N D"]],
        second: Float[Tensor, "B N H"] | None = None,
    ) -> Float[Tensor, "L B N H"]:
        """The outputs of every layer. Their entries are then in the cache.

        A large batch runs in parts; its rows keep the same bits.
        """
        inputs, second = inputs.contiguous(), None if second is None else second.contiguous()
        parts = batch_parts(*inputs.shape[:2])
        if len(parts) == 1:
            outputs = self.layers.run(inputs, rotary, self.buffers, self.num_keys, self.sight, second)
        else:
            outputs = torch.cat([self._part(rows, inputs, rotary, second) for rows in parts], dim=1)
        for layer in self.cache_layers:
            layer.length = self.num_keys
        return outputs

    def _part(
        self, rows: slice, inputs: Tensor, rotary: tuple[Tensor, Tensor], second: Tensor | None
    ) -> Float[Tensor, "L R N H"]:
        """The outputs of some rows of the batch."""
        cos, sin = (states if len(states) == 1 else states[rows] for states in rotary)
        buffers, (sight,) = part_of(rows, inputs.shape[1], self.buffers, [self.sight])
        part = None if second is None else second[rows]
        return self.layers.run(inputs[rows], (cos, sin), buffers, self.num_keys, sight, part)


def new_rows(
    layers: NativeLayers, inputs: Float[Tensor, "B N H"], cache: Cache, first: int, mask: Tensor | None
) -> NativeRows | None:
    """The rows for these layers; None if the modules must compute them. No entry is changed.

    Args:
        inputs: states of the rows, of a kind that is `served`.
        first: index of the first layer in the cache.
        mask: [B or 1, 1, at least N, S] (`find_sight`), S without the entries that are out of sight of all rows; None
            if every row sees all entries up to its own, or those of its window.
    """
    if inputs.dtype is not layers.dtype:
        return None
    cache_layers = appendable_layers(cache, first, layers.windows)
    if not cache_layers:
        return None
    num_keys = cache_layers[0].get_seq_length() + inputs.shape[1]
    sees_before, sight = sight_of(mask, inputs.shape[:2], num_keys, num_hidden(cache_layers[0]))
    if not sees_before and sight is None:
        return None
    buffers = make_room(cache_layers, inputs, (inputs.shape[0], *layers.heads))
    return None if buffers is None else NativeRows(layers, cache_layers, buffers, num_keys, sight)


@dataclass(frozen=True)
class TreeRows:
    """Rows of trees that are run level by level after the entries of a cache. The cache does not count them.

    Attributes:
        layers: native layers to run.
        buffers: keys and values of the cache, with room for all levels.
        num_before: number of entries before the trees.
        sight_before: entries before the trees that each row sees, as runs (`find_sight`).
    """

    layers: NativeLayers
    buffers: Sequence[Entries]
    num_before: int
    sight_before: tuple[Tensor, Tensor]


def tree_rows(
    layers: NativeLayers,
    root: Float[Tensor, "B H"],
    cache: Cache,
    size: tuple[int, int],
    visible: Bool[Tensor, "B M"] | None,
    num_pending: int = 0,
) -> TreeRows | None:
    """The rows for trees of these layers; None if the modules must compute them. No entry is changed.

    Args:
        root: states of the roots, in the dtype of the layers.
        cache: cache of these layers.
        size: width and number of levels.
        visible: bool [B, M], whether cache entries are real; None when all are.
        num_pending: number of real entries of each row that are read first.
    """
    batch_size, (width, num_levels) = len(root), size
    is_large = batch_size * max(width, num_pending) > MOST_ROWS or max(size) > MOST_WIDTH
    if root.dtype is not layers.dtype or not served(root[:, None]) or is_large:
        return None
    cache_layers = appendable_layers(cache, 0, layers.windows)
    if not cache_layers:
        return None
    num_before = cache_layers[0].get_seq_length() + num_pending
    if visible is None:
        everything = torch.tensor([[0, num_before]] * batch_size, dtype=torch.int32)
        sight = torch.tensor(range(batch_size + 1), dtype=torch.int32), everything
    else:
        sight = find_sight(visible[:, None, None], batch_size, 1, num_before)
    new = root[:, None].expand(-1, num_pending + width * num_levels, -1)
    buffers = make_room(cache_layers, new, (batch_size, *layers.heads))
    return None if sight is None or buffers is None else TreeRows(layers, buffers, num_before, sight)


def served(inputs: Tensor) -> bool:
    """Whether the kernel takes these rows, and this many of each text."""
    return (
        type(inputs) is Tensor
        and inputs.is_cpu
        and inputs.dtype in (torch.bfloat16, torch.float32)
        and 0 < inputs.shape[1] <= MOST_ROWS
        and len(inputs) > 0
        and not (inputs.requires_grad and torch.is_grad_enabled())
        and not is_intercepted()
    )


def is_intercepted() -> bool:
    """Whether autocast or a dispatch mode must see every operation."""
    return torch.is_autocast_enabled("cpu") or bool(torch._C._len_torch_dispatch_stack())


def num_hidden(layer: PreallocatedLayer) -> int:
    """The number of a cache layer's first entries that no new row sees; masks leave them out."""
    return layer.visible_from if isinstance(layer, SlidingLayer) else 0


def sight_of(mask: Tensor | None, size: Sequence[int], num_keys: int, hidden: int = 0) -> tuple[bool, Sight]:
    """Whether every query sees all entries up to its own, or those of its window; else the entries that it sees, None
    if unknown.

    Args:
        mask: mask in the form for layers (`new_rows`).
        size: number of texts, and of queries in each.
        hidden: number of the first entries that the mask leaves out because no query sees them.
    """
    batch_size, num_queries = size
    if mask is None:
        return num_queries in (1, num_keys), None
    if type(mask) is not Tensor or mask.dim() != 4 or not mask.is_cpu:
        return False, None
    batch_rows, heads, rows, columns = mask.shape
    is_folded = rows > num_queries and rows % num_queries == 0
    is_long = columns == num_keys - hidden or (is_folded and columns == 0 and not hidden)
    if batch_rows not in (1, batch_size) or heads != 1 or not is_long or not (rows == num_queries or is_folded):
        return False, None
    return False, find_sight(mask, batch_size, num_queries, num_keys, hides_first=hidden > 0)
