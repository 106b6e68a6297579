"""The rows of one forward: whether native layers take them, where their entries go and which are visible to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.cache_utils import Cache

from hf_speculate.cache import PreallocatedLayer, SlidingLayer

from .caches import appendable_layers, reserve
from .growth import MOST_WIDTH
from .layers import MOST_ROWS, Entries, NativeLayers, VisibleRanges, ranges_of_mask


@dataclass(frozen=True)
class NativeRows:
    """Rows that native layers can compute, with memory for their entries in a cache."""

    layers: NativeLayers
    cache_layers: Sequence[PreallocatedLayer]
    buffers: Sequence[Entries]
    num_keys: int
    visible_ranges: VisibleRanges

    def run(
        self,
        inputs: Float[Tensor, "B N H"],
        rotary: tuple[Float[Tensor, "R N D"], Float[Tensor, "R N D"]],
        second: Float[Tensor, "B N H"] | None,
    ) -> Float[Tensor, "L B N H"]:
        """The outputs of every layer (`NativeLayers.run`). The entries of the rows are then in the cache."""
        inputs, second = inputs.contiguous(), None if second is None else second.contiguous()
        outputs = self.layers.run(inputs, rotary, self.buffers, self.num_keys, self.visible_ranges, second)
        for layer in self.cache_layers:
            layer.length = self.num_keys
        return outputs


def new_rows(
    layers: NativeLayers, inputs: Float[Tensor, "B N H"], cache: Cache, mask: Tensor | None
) -> NativeRows | None:
    """The rows for these layers; None if the modules must compute them. No entry is changed.

    Args:
        inputs: states of the rows.
        mask: [B or 1, 1, at least N, S] (`ranges_of_mask`); None if all entries up to its own are visible to every row.
    """
    if inputs.dtype is not layers.dtype or not _serves(inputs, inputs.shape[0] * inputs.shape[1]):
        return None
    cache_layers = appendable_layers(cache, layers.windows)
    if not cache_layers:
        return None
    num_keys = cache_layers[0].get_seq_length() + inputs.shape[1]
    is_causal, ranges = read_mask(mask, inputs.shape[:2], num_keys)
    if not is_causal and ranges is None:
        return None
    buffers = reserve(cache_layers, inputs.shape[1], (inputs.shape[0], *layers.heads), layers.dtype)
    return None if buffers is None else NativeRows(layers, cache_layers, buffers, num_keys, ranges)


@dataclass(frozen=True)
class TreeRows:
    """Buffers for the entries of trees after those of a cache. The cache does not count them.

    Attributes:
        num_before: number of entries before the trees.
        ranges_before: visible ranges of each row among the entries before the trees (`ranges_of_mask`).
    """

    layers: NativeLayers
    buffers: Sequence[Entries]
    num_before: int
    ranges_before: tuple[Tensor, Tensor]


def tree_rows(
    layers: NativeLayers,
    root: Float[Tensor, "B H"],
    cache: Cache,
    size: tuple[int, int],
    visible: Bool[Tensor, "B M"] | None,
    num_pending: int,
) -> TreeRows | None:
    """Buffers for trees; None if the modules must draw them. No entry is changed.

    Args:
        root: states of the roots.
        size: width and number of levels.
        visible: whether cache entries are real; None when all are.
        num_pending: number of real entries of each row that are read first.
    """
    batch_size, (width, num_levels) = len(root), size
    is_served = _serves(root, batch_size * max(width, num_pending)) and max(size) <= MOST_WIDTH
    if root.dtype is not layers.dtype or not is_served:
        return None
    cache_layers = appendable_layers(cache, layers.windows)
    if not cache_layers:
        return None
    num_before = cache_layers[0].get_seq_length() + num_pending
    if visible is None:
        everything = torch.tensor([[0, num_before]] * batch_size, dtype=torch.int32, device="cpu")
        before = torch.tensor(range(batch_size + 1), dtype=torch.int32, device="cpu"), everything
    else:
        before = ranges_of_mask(visible[:, None, None], batch_size, 1, num_before)
    buffers = reserve(cache_layers, num_pending + width * num_levels, (batch_size, *layers.heads), layers.dtype)
    return None if before is None or buffers is None else TreeRows(layers, buffers, num_before, before)


def _serves(inputs: Tensor, num_rows: int) -> bool:
    """Whether the kernel takes rows with such states, and this many."""
    return (
        type(inputs) is Tensor
        and inputs.is_cpu
        and 0 < num_rows <= MOST_ROWS
        and not (inputs.requires_grad and torch.is_grad_enabled())
        and not is_intercepted()
    )


def is_intercepted() -> bool:
    """Whether autocast or a dispatch mode must see every operation."""
    return torch.is_autocast_enabled("cpu") or bool(torch._C._len_torch_dispatch_stack())


def num_hidden(layer: PreallocatedLayer) -> int:
    """The number of a cache layer's first entries that are visible to no new row; masks leave them out."""
    return layer.visible_from if isinstance(layer, SlidingLayer) else 0


def read_mask(mask: Tensor | None, size: Sequence[int], num_keys: int, hidden: int = 0) -> tuple[bool, VisibleRanges]:
    """Whether all entries up to its own, or those of its window, are visible to every query; else the visible ranges,
    None if unknown.

    Args:
        mask: [B or 1, 1, at least N, S] (`ranges_of_mask`), or None.
        size: number of texts, and of queries in each.
        hidden: number of the first entries that the mask leaves out because they are visible to no query.
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
    if num_queries == 1 and not columns:  # `TreeAttention.without_mask`
        return True, None
    return False, ranges_of_mask(mask, batch_size, num_queries, num_keys, hides_first=hidden > 0)
