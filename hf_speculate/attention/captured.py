"""Attention metadata of a captured forward: tensors of static shape, and layers that show whole buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..tree import additive
from .grouped import MaskForm, does_more, fold
from .in_progress import StockAttention, attending
from .tree_kernel import DeviceTree, tree_attention


def text_entries(prompt: Bool[Tensor, "B M"], lengths: Int[Tensor, " B"]) -> Bool[Tensor, "B M"]:
    """Whether entries of whole buffers are in each row's text.

    Args:
        prompt: False for padding and holes of the prompt, True elsewhere.
        lengths: number of entries of each row's text.
    """
    return (torch.arange(prompt.shape[1], device=prompt.device, dtype=torch.long) < lengths[:, None]) & prompt


@dataclass(frozen=True, eq=False)
class KernelAttention:
    """Attention of one tree by the kernel (`tree_kernel`).

    Attributes:
        tree: position of the tree, and what its nodes see.
        make_mask: function that makes the additive mask, for attentions with more than the kernel computes.
    """

    tree: DeviceTree
    make_mask: Callable[[], Tensor]

    def attend(
        self, stock: StockAttention, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """The result of `stock` with the additive mask."""
        if does_more(kwargs):
            return stock(module, query, key, value, self.make_mask(), **kwargs)
        return tree_attention(query, key, value, self.tree, kwargs.get("scaling")), None


@dataclass(frozen=True, eq=False)
class CapturedMetadata:
    """The new entries of a captured forward: nodes of a tree after the text of each row.

    Attributes:
        prompt: bool [B, M], False for padding and holes of the prompt, True elsewhere.
        lengths: int64 [B], number of entries of each row's text.
        slots: int64 [S], entries of all nodes in the buffers, one after the other.
        ancestors: bool [R, N, S], the nodes that each of the last N nodes sees, itself included. R is 1 or B.
        starts: int64 [B], number of padding entries of each row, for the kernel; None if it is not used.
    """

    prompt: Bool[Tensor, "B M"]
    lengths: Int[Tensor, " B"]
    slots: Int[Tensor, " S"]
    ancestors: Bool[Tensor, "R N S"]
    starts: Int[Tensor, " B"] | None = None

    def additive(self, dtype: torch.dtype) -> Float[Tensor, "B 1 N M"]:
        """The additive mask over whole buffers."""
        prefix = text_entries(self.prompt, self.lengths)[:, None].expand(-1, self.ancestors.shape[1], -1)
        nodes = self.ancestors.expand(len(prefix), -1, -1)
        return additive(prefix.index_copy(2, self.slots, nodes)[:, None], dtype)

    def device_tree(self) -> DeviceTree:
        """The form for the kernel."""
        assert self.starts is not None
        return DeviceTree(self.starts, self.lengths, self.slots[:1], self.ancestors)

    @contextmanager
    def masking(self, form: MaskForm, groups: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """A context for a forward of a model; gives the mask in the form for it.

        Args:
            groups: query heads for each KV head (`fold`).
            dtype: dtype of queries and keys.
        """
        if form == "kernel":
            attention = KernelAttention(self.device_tree(), partial(self.additive, dtype))
            with attending(attention, self.lengths.device) as mask:
                yield mask
        else:
            mask = self.additive(dtype)
            yield fold(mask, groups) if form == "folded" else mask
