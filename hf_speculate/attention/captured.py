"""Attention metadata of a captured forward: tensors of static shape, and layers that show whole buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..tree import additive
from .grouped import KernelAttention, MaskForm, fold
from .in_progress import attending
from .tree_kernel import DeviceTree


def text_entries(prompt: Bool[Tensor, "B M"], lengths: Int[Tensor, " B"]) -> Bool[Tensor, "B M"]:
    """Whether entries of whole buffers are in each row's text.

    Args:
        prompt: False for padding and holes of the prompt, True elsewhere.
        lengths: number of entries of each row's text.
    """
    return (torch.arange(prompt.shape[1], device=prompt.device, dtype=torch.long) < lengths[:, None]) & prompt


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
