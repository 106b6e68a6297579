"""Which blocks a text is cut into, and what each of their proposals is compared with.

Source: deepseek-ai/DeepSpec, `modeling/dspark/common.py`. A block stands at an anchor: a token that the target emitted,
followed by another one of these. Its k-th proposal is for token anchor + 1 + k, the text's token anchor + k being the
one before, and the target's distribution at anchor + k the teacher. It counts as long as every token from the anchor on
is one that the target is to emit, in the anchor's document.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...data import Batch
from ..entries import emitting_positions


@dataclass(frozen=True)
class Blocks:
    """A blocks in each of B rows, D proposals each.

    Attributes:
        anchors: int64 [B, A], ascending within a row; 0 behind the last one of a row that has fewer.
        kept: bool [B, A], which of them there are.
        counted: bool [B, A, D], which proposals count.
        labels: int64 [B, A, D], the text's token that each is for; behind the end of a row its last one.
        previous: int64 [B, A, D], the text's token before that.
        teachers: int64 [B, A, D], where the teacher is, among the B * S tokens of the batch.
    """

    anchors: Int[Tensor, "B A"]
    kept: Bool[Tensor, "B A"]
    counted: Bool[Tensor, "B A D"]
    labels: Int[Tensor, "B A D"]
    previous: Int[Tensor, "B A D"]
    teachers: Int[Tensor, "B A D"]

    @classmethod
    def drawn(cls, batch: Batch, most: int, depth: int, *, at_random: bool) -> Blocks:
        """At `most` anchors of each row, see `draw_anchors`."""
        return cls.at(batch, *draw_anchors(possible_anchors(batch), most, at_random=at_random), depth)

    @classmethod
    def at(cls, batch: Batch, anchors: Int[Tensor, "B A"], kept: Bool[Tensor, "B A"], depth: int) -> Blocks:
        """At the given anchors."""
        ids, documents, mask = batch["input_ids"], batch["document_ids"], batch["loss_mask"].bool()
        size = ids.shape[1]
        before = anchors[:, :, None] + torch.arange(depth, device=anchors.device)
        rows = torch.arange(len(ids), device=anchors.device)[:, None, None]
        behind, before = (before + 1).clamp(max=size - 1), before.clamp(max=size - 1)
        inside = (behind > before) & (documents[rows, behind] == documents[rows, anchors[:, :, None]])
        unbroken = (kept[:, :, None] & inside & mask[rows, behind]).long().cumprod(-1).bool()
        return cls(anchors, kept, unbroken, ids[rows, behind], ids[rows, before], rows * size + before)


def possible_anchors(batch: Batch) -> Bool[Tensor, "B S"]:
    """The tokens that the target is to emit and to go on from, in the same document."""
    return batch["loss_mask"].bool() & emitting_positions(batch)


def draw_anchors(
    possible: Bool[Tensor, "B S"], most: int, *, at_random: bool
) -> tuple[Int[Tensor, "B A"], Bool[Tensor, "B A"]]:
    """At most `most` of the possible anchors of each row, ascending, and which of the A columns hold one.

    A is what the fullest row has, at least 1: a batch without any block would leave parameters without a gradient.

    Args:
        at_random: from torch's generator, all equally likely; else spread evenly, so that an evaluation is the same
            every time and leaves the training's random numbers alone.
    """
    available = possible.sum(1, keepdim=True)
    if at_random:
        order = torch.rand(possible.shape, device=possible.device).masked_fill(~possible, 2.0).argsort(1)
        rank = torch.empty_like(order)
        rank.scatter_(1, order, torch.arange(possible.shape[1], device=order.device).expand_as(order))
        chosen = possible & (rank < most)
    else:
        share = possible.cumsum(1) * most
        steps = available.clamp(min=most)  # fewer than asked for: each is chosen
        chosen = possible & ((share - most) // steps != (share - 2 * most) // steps)
    counts = chosen.sum(1, keepdim=True)
    width = max(int(counts.max()), 1)
    kept = torch.arange(width, device=possible.device) < counts
    first = chosen.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
    return first.masked_fill(~kept, 0), kept
