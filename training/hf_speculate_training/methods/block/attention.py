"""Attention of all blocks of a text at once.

Decoding, a block sees the context before its anchor, and itself. The context's keys and values are the same for all
blocks of a row, so they are made once, and one mask keeps the blocks apart. Blocks see one another's keys masked: A * S
columns beside the T of the text. At T = 2048, A = 64 and S = 8 the mask has 1.3 million elements a row, and a fifth of
the scores is in vain; at DeepSpec's 512 anchors of 4096 tokens it has 33 million (33 MB), and half of them is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_speculate_plugins.block import BlockHead, BlockSpec, block_masks

from ...data import Batch
from .blocks import Blocks


def run_blocks(
    head: BlockHead, context: Float[Tensor, "B T H"], batch: Batch, blocks: Blocks
) -> Float[Tensor, "B A S H"]:
    """The states of all slots of all blocks.

    Args:
        context: what `head.fuse` makes of the target's features.
        batch: on the head's device.
    """
    num_rows, num_blocks = blocks.anchors.shape
    rows = torch.arange(num_rows, device=blocks.anchors.device)[:, None]
    slots = torch.arange(head.spec.block_size, device=blocks.anchors.device)
    positions = batch["position_ids"][rows, blocks.anchors][:, :, None] + slots
    token_ids = head.block_ids(batch["input_ids"][rows, blocks.anchors].flatten())
    masks = text_masks(head.spec, positions, batch["position_ids"], visible_context(batch, blocks))
    read: list[tuple[Tensor, Tensor]] = []
    head.read(context, batch["position_ids"], lambda layer, keys, values: read.append((keys, values)))
    attend = TextAttention(read, masks)
    states = head(token_ids.view(num_rows, -1), positions.flatten(1), attend)
    return states.unflatten(1, (num_blocks, -1))


class TextAttention:
    """`attend` of all blocks at once.

    Args:
        context: for each layer keys and values of the context, [B, kv_heads, T, d].
        masks: for each layer which of the T context entries, then of the slots themselves, each slot sees.
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


def visible_context(batch: Batch, blocks: Blocks) -> Bool[Tensor, "B A T"]:
    """Which tokens are the context of a block: those before its anchor, in its document."""
    documents = batch["document_ids"]
    rows = torch.arange(len(documents), device=documents.device)[:, None]
    before = torch.arange(documents.shape[1], device=documents.device) < blocks.anchors[:, :, None]
    return before & (documents[:, None] == documents[rows, blocks.anchors][:, :, None])


def text_masks(
    spec: BlockSpec,
    positions: Int[Tensor, "B A S"],
    context_positions: Int[Tensor, "B T"],
    visible: Bool[Tensor, "B A T"],
) -> list[Bool[Tensor, "B 1 N M"]]:
    """What the N = A * S slots see of the M = T + N entries, for each layer: what each block sees in decoding, and
    nothing of the other blocks."""
    num_rows, num_blocks = positions.shape[:2]
    alone = block_masks(
        spec,
        positions.flatten(0, 1),
        context_positions.repeat_interleave(num_blocks, 0),
        visible.flatten(0, 1),
        torch.float32,
    )
    known: dict[int, Tensor] = {}  # layers that see the same share a mask
    for mask in alone:
        assert mask is not None
        if id(mask) not in known:
            seen = (mask[:, 0] == 0).unflatten(0, (num_rows, num_blocks))
            known[id(mask)] = _side_by_side(seen, visible.shape[-1])
    return [known[id(mask)] for mask in alone]


def _side_by_side(seen: Bool[Tensor, "B A S K"], num_context: int) -> Bool[Tensor, "B 1 N M"]:
    """The blocks' masks over T + S entries each as one over T + A * S."""
    context, own = seen.split([num_context, seen.shape[-1] - num_context], dim=-1)
    num_rows, num_blocks, num_slots, _ = seen.shape
    among = seen.new_zeros(num_rows, num_blocks, num_slots, num_blocks, num_slots)
    index = torch.arange(num_blocks, device=seen.device)
    among[:, index, :, index] = own.transpose(0, 1)
    return torch.cat([context.flatten(1, 2), among.flatten(3).flatten(1, 2)], dim=-1)[:, None]
