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
from .refusals import AUTOCAST, DISPATCH_MODE, GRADIENTS, UNREADABLE_MASK, Refused


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


def new_rows(layers: NativeLayers, inputs: Float[Tensor, "B N H"], cache: Cache, mask: Tensor | None) -> NativeRows:
    """The rows for these layers. No entry is changed.

    Args:
        inputs: states of the rows.
        mask: [B or 1, 1, at least N, S] (`ranges_of_mask`); None if all entries up to its own are visible to every row.

    Raises:
        Refused: the modules must compute the rows.
    """
    _check_states(inputs, layers.dtype, inputs.shape[0] * inputs.shape[1])
    cache_layers = appendable_layers(cache, layers.windows)
    num_keys = cache_layers[0].get_seq_length() + inputs.shape[1]
    ranges = read_mask(mask, inputs.shape[:2], num_keys)
    buffers = reserve(cache_layers, inputs.shape[1], (inputs.shape[0], *layers.heads), layers.dtype)
    return NativeRows(layers, cache_layers, buffers, num_keys, ranges)


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
) -> TreeRows:
    """Buffers for trees. No entry is changed.

    Args:
        root: states of the roots.
        size: width and number of levels.
        visible: whether cache entries are real; None when all are.
        num_pending: number of real entries of each row that are read first.

    Raises:
        Refused: the modules must draw the trees.
    """
    batch_size, (width, num_levels) = len(root), size
    if max(size) > MOST_WIDTH:
        raise Refused(f"trees wider or deeper than {MOST_WIDTH}")
    _check_states(root, layers.dtype, batch_size * max(width, num_pending))
    cache_layers = appendable_layers(cache, layers.windows)
    num_before = cache_layers[0].get_seq_length() + num_pending
    if visible is None:
        everything = torch.tensor([[0, num_before]] * batch_size, dtype=torch.int32, device="cpu")
        before = torch.tensor(range(batch_size + 1), dtype=torch.int32, device="cpu"), everything
    else:
        before = ranges_of_mask(visible[:, None, None], batch_size, 1, num_before)
    buffers = reserve(cache_layers, num_pending + width * num_levels, (batch_size, *layers.heads), layers.dtype)
    return TreeRows(layers, buffers, num_before, before)


def _check_states(states: Tensor, dtype: torch.dtype, num_rows: int) -> None:
    """Raises `Refused` unless the kernel takes rows with such states, and this many."""
    check_not_intercepted()  # autocast changes the dtype of states
    if type(states) is not Tensor or not states.is_cpu or states.dtype is not dtype:
        raise Refused(f"states that are not {dtype} on the CPU")
    if not 0 < num_rows <= MOST_ROWS:
        raise Refused(f"more than {MOST_ROWS} rows in one forward, or none")
    if states.requires_grad and torch.is_grad_enabled():
        raise Refused(GRADIENTS)


def check_not_intercepted() -> None:
    """Raises `Refused` if autocast or a dispatch mode must see every operation."""
    if torch.is_autocast_enabled("cpu"):
        raise Refused(AUTOCAST)
    if torch._C._len_torch_dispatch_stack():
        raise Refused(DISPATCH_MODE)


def num_hidden(layer: PreallocatedLayer) -> int:
    """The number of a cache layer's first entries that are visible to no new row; masks leave them out."""
    return layer.visible_from if isinstance(layer, SlidingLayer) else 0


def read_mask(mask: Tensor | None, size: Sequence[int], num_keys: int, hidden: int = 0) -> VisibleRanges:
    """The visible ranges of queries by a mask. None if all entries up to its own, or those of its window, are visible
    to every query.

    Args:
        mask: [B or 1, 1, at least N, S] (`ranges_of_mask`), or None.
        size: number of texts, and of queries in each.
        hidden: number of the first entries that the mask leaves out because they are visible to no query.

    Raises:
        Refused: the kernel cannot read the mask.
    """
    batch_size, num_queries = size
    if mask is None:
        return attention_ranges(None, size, num_keys)
    if type(mask) is not Tensor or mask.dim() != 4 or not mask.is_cpu:
        raise Refused(UNREADABLE_MASK)
    batch_rows, heads, rows, columns = mask.shape
    is_folded = rows > num_queries and rows % num_queries == 0
    is_long = columns == num_keys - hidden or (is_folded and columns == 0 and not hidden)
    if batch_rows not in (1, batch_size) or heads != 1 or not is_long or not (rows == num_queries or is_folded):
        raise Refused(UNREADABLE_MASK)
    if num_queries == 1 and not columns:  # `TreeAttention.without_mask`
        return None
    return attention_ranges(mask, size, num_keys, hides_first=hidden > 0)


def attention_ranges(
    mask: Tensor | None, size: Sequence[int], num_keys: int, hides_first: bool = False
) -> VisibleRanges:
    """The result of `ranges_of_mask`. Without a mask it is None if causal attention is meant; else raises `Refused`."""
    batch_size, num_queries = size
    if mask is not None:
        return ranges_of_mask(mask, batch_size, num_queries, num_keys, hides_first)
    if num_queries not in (1, num_keys):
        raise Refused("several queries after a prefix, without a mask")
    return None
