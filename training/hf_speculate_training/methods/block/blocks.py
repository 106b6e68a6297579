"""Blocks of a text: their anchors, what each of their proposals is compared with, and their attention.

Source: deepseek-ai/DeepSpec, `modeling/dspark/common.py`. A block stands at an anchor: a token that the target emitted,
followed by another one of these. Its k-th proposal is for token anchor + 1 + k; token anchor + k of the text is the one
before, and the target's distribution there is the teacher. A proposal counts as long as the target is to emit every
token from the anchor on, in the anchor's document.

In decoding a block sees the context before its anchor, and itself. The context's keys and values are the same for all
blocks of a row, so they are made once, and one mask keeps the blocks apart. The mask has A * S columns next to the T of
the text, most of which a block does not see. At T = 2048, A = 64 and S = 8 that wastes a fifth of the scores, at
DeepSpec's T = 4096 and A = 512 half of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_speculate_plugins.block import BlockHead, BlockSpec, block_masks

from ...data import Batch
from ..entries import emitting_positions


@dataclass(frozen=True)
class TextBlocks:
    """A blocks in each of B rows, D proposals each.

    Attributes:
        anchors: int64 [B, A], anchors, ascending within a row; 0 after the last one of a row that has fewer.
        kept: bool [B, A], True for anchors that are there.
        counted: bool [B, A, D], True for proposals that count.
        labels: int64 [B, A, D], the text's token at each proposal; after the end of a row its last one.
        previous: int64 [B, A, D], the text's token before that.
        teachers: int64 [B, A, D], place of the teacher among the B * S tokens of the batch.
    """

    anchors: Int[Tensor, "B A"]
    kept: Bool[Tensor, "B A"]
    counted: Bool[Tensor, "B A D"]
    labels: Int[Tensor, "B A D"]
    previous: Int[Tensor, "B A D"]
    teachers: Int[Tensor, "B A D"]

    @classmethod
    def drawn(cls, batch: Batch, most: int, depth: int, *, at_random: bool) -> TextBlocks:
        """Blocks at `most` anchors of each row, see `draw_anchors`."""
        return cls.at(batch, *draw_anchors(possible_anchors(batch), most, at_random=at_random), depth)

    @classmethod
    def at(cls, batch: Batch, anchors: Int[Tensor, "B A"], kept: Bool[Tensor, "B A"], depth: int) -> TextBlocks:
        """Blocks at the given anchors."""
        ids, documents, mask = batch["input_ids"], batch["document_ids"], batch["loss_mask"].bool()
        size = ids.shape[1]
        before = anchors[:, :, None] + torch.arange(depth, device=anchors.device, dtype=torch.long)
        rows = torch.arange(len(ids), device=anchors.device, dtype=torch.long)[:, None, None]
        after, before = (before + 1).clamp(max=size - 1), before.clamp(max=size - 1)
        inside = (after > before) & (documents[rows, after] == documents[rows, anchors[:, :, None]])
        unbroken = (kept[:, :, None] & inside & mask[rows, after]).long().cumprod(-1).bool()
        return cls(anchors, kept, unbroken, ids[rows, after], ids[rows, before], rows * size + before)


def possible_anchors(batch: Batch) -> Bool[Tensor, "B S"]:
    """The tokens that the target is to emit and to continue, in the same document."""
    return batch["loss_mask"].bool() & emitting_positions(batch)


def draw_anchors(
    possible: Bool[Tensor, "B S"], most: int, *, at_random: bool
) -> tuple[Int[Tensor, "B A"], Bool[Tensor, "B A"]]:
    """At most `most` of the possible anchors of each row, ascending, and a mask of the columns that hold one.

    The number A of columns is that of the fullest row, and at least 1: without any block parameters would get no
    gradient. Drawn at random, all are equally likely. Else they are spread evenly, so that an evaluation is the same
    every time and leaves the training's random numbers alone.
    """
    available = possible.sum(1, keepdim=True)
    if at_random:
        order = (
            torch.rand(possible.shape, device=possible.device, dtype=torch.float32)
            .masked_fill(~possible, 2.0)
            .argsort(1)
        )
        rank = torch.empty_like(order)
        rank.scatter_(1, order, torch.arange(possible.shape[1], device=order.device, dtype=torch.long).expand_as(order))
        chosen = possible & (rank < most)
    else:
        share = possible.cumsum(1) * most
        steps = available.clamp(min=most)  # fewer than asked for: each is chosen
        chosen = possible & ((share - most) // steps != (share - 2 * most) // steps)
    counts = chosen.sum(1, keepdim=True)
    width = max(int(counts.max()), 1)
    kept = torch.arange(width, device=possible.device, dtype=torch.long) < counts
    first = chosen.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
    return first.masked_fill(~kept, 0), kept


def run_blocks(
    head: BlockHead, context: Float[Tensor, "B T H"], batch: Batch, blocks: TextBlocks
) -> Float[Tensor, "B A S H"]:
    """The states of all slots of all blocks; `context` are fused features of the target (`head.fuse`)."""
    num_rows, num_blocks = blocks.anchors.shape
    rows = torch.arange(num_rows, device=blocks.anchors.device, dtype=torch.long)[:, None]
    slots = torch.arange(head.spec.block_size, device=blocks.anchors.device, dtype=torch.long)
    positions = batch["position_ids"][rows, blocks.anchors][:, :, None] + slots
    token_ids = head.block_ids(batch["input_ids"][rows, blocks.anchors].flatten())
    masks = text_masks(head.spec, positions, batch["position_ids"], visible_context(batch, blocks))
    read: list[tuple[Tensor, Tensor]] = []
    head.read(context, batch["position_ids"], lambda layer, keys, values: read.append((keys, values)))
    attend = TextAttention(read, masks)
    states = head(token_ids.view(num_rows, -1), positions.flatten(1), attend)
    return states.unflatten(1, (num_blocks, -1))


class TextAttention:
    """`attend` of all blocks at once: by layer keys and values of the context, [B, kv_heads, T, d], and a mask.

    A mask is True for the context entries (first) and slots that a slot sees.
    """

    def __init__(self, context: Sequence[tuple[Tensor, Tensor]], masks: Sequence[Bool[Tensor, "B 1 N M"]]):
        self.context, self.masks = context, masks

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        # Rotary embeddings come in the dtype of the states, which under autocast is not that of the products.
        dtype = values.dtype
        read_keys, read_values = self.context[layer]
        keys = torch.cat([read_keys.to(dtype), keys.to(dtype)], dim=2)
        values = torch.cat([read_values, values], dim=2)
        grouped = keys.shape[1] != queries.shape[1]
        return scaled_dot_product_attention(
            queries.to(dtype), keys, values, attn_mask=self.masks[layer], enable_gqa=grouped
        )


def visible_context(batch: Batch, blocks: TextBlocks) -> Bool[Tensor, "B A T"]:
    """Mask of the tokens that are the context of a block: those before its anchor, in its document."""
    documents = batch["document_ids"]
    rows = torch.arange(len(documents), device=documents.device, dtype=torch.long)[:, None]
    before = torch.arange(documents.shape[1], device=documents.device, dtype=torch.long) < blocks.anchors[:, :, None]
    return before & (documents[:, None] == documents[rows, blocks.anchors][:, :, None])


def text_masks(
    spec: BlockSpec,
    positions: Int[Tensor, "B A S"],
    context_positions: Int[Tensor, "B T"],
    visible: Bool[Tensor, "B A T"],
) -> list[Bool[Tensor, "B 1 N M"]]:
    """Masks of the M = T + N entries that the N = A * S slots see, for each layer.

    A block sees the same as in decoding, and nothing of the other blocks.
    """
    num_rows, num_blocks = positions.shape[:2]
    alone = block_masks(
        spec,
        positions.flatten(0, 1),
        context_positions.repeat_interleave(num_blocks, 0),
        visible.flatten(0, 1),
        torch.float32,
    )
    known: dict[int, Tensor] = {}  # layers that see the same entries share a mask
    for mask in alone:
        assert mask is not None
        if id(mask) not in known:
            seen = (mask[:, 0] == 0).unflatten(0, (num_rows, num_blocks))
            known[id(mask)] = _side_by_side(seen, visible.shape[-1])
    return [known[id(mask)] for mask in alone]


def _side_by_side(seen: Bool[Tensor, "B A S K"], num_context: int) -> Bool[Tensor, "B 1 N M"]:
    """One mask over T + A * S entries, of the blocks' masks over T + S entries each."""
    context, own = seen.split([num_context, seen.shape[-1] - num_context], dim=-1)
    num_rows, num_blocks, num_slots, _ = seen.shape
    among = seen.new_zeros(num_rows, num_blocks, num_slots, num_blocks, num_slots)
    index = torch.arange(num_blocks, device=seen.device, dtype=torch.long)
    among[:, index, :, index] = own.transpose(0, 1)
    return torch.cat([context.flatten(1, 2), among.flatten(3).flatten(1, 2)], dim=-1)[:, None]
